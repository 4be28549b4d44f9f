#!/usr/bin/env python3
"""A rank of a model that dies, and examples/10_transformers.py: hf_runs.py"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

from launch import PATIENCE, connect, start_ranks, wait_for

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD, VICTIM = 4, 2


def killed(rank, folder):
    """The victim dies in a layer, in which the others wait for its tokens."""
    connect(rank, WORLD, folder)
    import hf_models
    import torch
    from transformers.distributed import DistributedConfig

    import crossdock.transformers
    from crossdock.transformers import expert_parallel

    crossdock.transformers.register(arrival_deadline=PATIENCE)
    with hf_models.folder("qwen3_moe") as path:
        parallel = DistributedConfig(fsdp_size=WORLD, ep_size=WORLD, ep_implementation="crossdock")
        model = hf_models.load("qwen3_moe", path, distributed_config=parallel)
    ids = torch.randint(3, 64, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    if rank == VICTIM:
        expert_parallel.ops.dispatch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(input_ids=ids)
    except crossdock.Error as error:
        assert error.culprit == VICTIM and f"rank {VICTIM}" in str(error), error
        print(f"    rank {rank}: {error}", flush=True)
        os._exit(0)
    sys.exit("the death of a rank went unnoticed")


def run_killed():
    with tempfile.TemporaryDirectory() as folder:
        codes = wait_for(start_ranks(WORLD, [__file__, folder]), PATIENCE)
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
        killed(int(sys.argv[2]), pathlib.Path(sys.argv[1]))
    run_killed()
    run_example()
    print("killed rank and example: passed")
