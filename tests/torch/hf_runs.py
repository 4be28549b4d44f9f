#!/usr/bin/env python3
"""A rank of a model that dies, examples/10_transformers.py, and the lines of the README for transformers: hf_runs.py"""
import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from launch import PATIENCE, connect, start_ranks, wait_for, wait_for_file
from readme import python_blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD, VICTIM = 4, 2
PLACES = {"forward": 2, "backward": 1}  # where the victim dies, and tp_size
README_WORLD = 8  # tp_size 2 · fsdp_size 4
README_MODEL = "Qwen/Qwen3-30B-A3B"  # here a tiny one, in a folder of this name
USE = """
import torch
ids = torch.arange(3, 19).reshape(2, 8)
print(f"loss {model(input_ids=ids, labels=ids).loss.item():.5f}", flush=True)
"""


def die(*_):
    time.sleep(1)  # whatever torch's own collectives had begun is over
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, folder, place):
    """The victim dies in a layer, in which the others wait for its tokens or gradients."""
    connect(rank, WORLD, folder)
    import hf_models
    import torch
    from transformers.distributed import DistributedConfig

    import crossdock.transformers
    from crossdock.torch import calls
    from crossdock.transformers import expert_parallel

    tp = PLACES[place]
    crossdock.transformers.register(arrival_deadline=PATIENCE)
    with hf_models.folder("qwen3_moe") as path:
        parallel = DistributedConfig(tp_size=tp, fsdp_size=WORLD // tp, ep_size=WORLD, ep_implementation="crossdock")
        model = hf_models.load("qwen3_moe", path, distributed_config=parallel)
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(rank // tp))
    model(input_ids=ids, labels=ids).loss.backward()
    if rank == VICTIM:
        if place == "forward":
            expert_parallel.take_part = die
        else:
            calls.combine_backward = die
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    except crossdock.Error as error:
        shares_tokens = place == "forward" and rank // tp == VICTIM // tp
        culprit = VICTIM % tp if shares_tokens else VICTIM  # in its group
        assert error.culprit == culprit and f"rank {culprit}" in str(error), error
        assert ("ranks [2, 3] of the job" in str(error)) == shares_tokens, error
        print(f"    {place}, rank {rank}: {error}", flush=True)
        (folder / f"named {rank}").touch()
        for other in set(range(WORLD)) - {VICTIM}:
            wait_for_file(folder / f"named {other}")  # otherwise others may see this rank end first
        os._exit(0)
    sys.exit("the death of a rank went unnoticed")


def run_killed(place):
    with tempfile.TemporaryDirectory() as folder:
        codes = wait_for(start_ranks(WORLD, [__file__, folder, place]), PATIENCE, grace=30)
    assert codes == [-signal.SIGKILL if rank == VICTIM else 0 for rank in range(WORLD)], codes


def launched(program, world, **options):
    """What the ranks print, under torchrun."""
    command = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(program)]
    path = os.pathsep.join(os.path.abspath(folder) for folder in os.environ["PYTHONPATH"].split(os.pathsep))
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, **options)
    text = done.stdout + done.stderr
    aborted_at_exit = "terminate called without an active exception" in text  # by gloo: docs/pytorch.md
    assert done.returncode == 0 or aborted_at_exit, text
    return done.stdout


def run_example():
    printed = launched(ROOT / "examples" / "10_transformers.py", WORLD)
    losses = [float(loss) for loss in re.search(r"^loss (.*)$", printed, re.MULTILINE).group(1).split()]
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0], losses


def run_readme():
    """The README's lines as they are: transformers looks for a folder of the model's name before it asks the network."""
    import hf_models

    (lines,) = (code for code in python_blocks("README.md") if "from_pretrained" in code)
    with tempfile.TemporaryDirectory() as folder:
        model = hf_models.make("qwen3_moe")
        model.save_pretrained(f"{folder}/{README_MODEL}")
        program = pathlib.Path(folder) / "program.py"
        program.write_text(lines + USE)
        printed = launched(program, README_WORLD, cwd=folder)
        scope = {"model": model}
        with contextlib.redirect_stdout(io.StringIO()) as alone:
            exec(USE, scope)
    of_ranks, of_one = ([float(loss) for loss in re.findall(r"loss ([\d.]+)", text)] for text in (printed, alone.getvalue()))
    assert len(of_ranks) == README_WORLD and all(abs(loss - of_one[0]) < 1e-4 for loss in of_ranks), (of_ranks, of_one)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        killed(int(sys.argv[3]), pathlib.Path(sys.argv[1]), sys.argv[2])
    for place in PLACES:
        run_killed(place)
    run_example()
    run_readme()
    print("killed ranks, example and README: passed")
