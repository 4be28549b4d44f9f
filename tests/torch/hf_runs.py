#!/usr/bin/env python3
"""A rank of a model that dies, and examples/10_transformers.py: hf_runs.py"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from launch import PATIENCE, connect, start_ranks, wait_for, wait_for_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD, VICTIM = 4, 2
PLACES = {"forward": 2, "backward": 1}  # where the victim dies, and tp_size


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


def run_example():
    command = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    command.append(str(ROOT / "examples" / "10_transformers.py"))
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    text = done.stdout + done.stderr
    aborted_at_exit = "terminate called without an active exception" in text  # by gloo: docs/pytorch.md
    assert done.returncode == 0 or aborted_at_exit, text
    losses = [float(loss) for loss in re.search(r"^loss (.*)$", done.stdout, re.MULTILINE).group(1).split()]
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0], losses


if __name__ == "__main__":
    if len(sys.argv) > 1:
        killed(int(sys.argv[3]), pathlib.Path(sys.argv[1]), sys.argv[2])
    for place in PLACES:
        run_killed(place)
    run_example()
    print("killed ranks and example: passed")
