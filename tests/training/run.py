#!/usr/bin/env python3
"""Tests of the training example: tests/training/run.py [pattern ...]; patterns select tests by parts of their names."""
import argparse
import os
import pathlib
import subprocess
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "python"
sys.path[:0] = [str(HERE), str(EXAMPLE)]

import killed  # noqa: E402
import launch  # noqa: E402
import rank_tests  # noqa: E402
import torch.distributed as dist  # noqa: E402
import units  # noqa: E402
from train import start_processes  # noqa: E402

WORLD = 8


def timed(test, quiet=False):
    start = time.monotonic()
    test()
    if not quiet:
        print(f"  ok {time.monotonic() - start:6.2f} s  {test.__name__}", flush=True)


def rank_main(tests):
    start_processes()
    for test in tests:
        try:
            timed(test, quiet=dist.get_rank() != 0)
        except BaseException:
            print(f"rank {dist.get_rank()}, {test.__name__}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)  # the launcher ends the others
    dist.destroy_process_group()


def a_killed_run_continues_bit_for_bit():
    options = ["--dp", "2", "--ep", "2", "--preset", "deepseek-v3", "--steps", "20"]
    problems = killed.kill_and_continue(2, options, kills=2, seed=int(time.time()))
    assert not problems, problems


def the_command_explains_itself():
    text = subprocess.run([sys.executable, str(EXAMPLE / "train.py"), "--help"], capture_output=True, text=True)
    assert text.returncode == 0 and "--checkpoint FOLDER" in text.stdout, text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deadline", type=float, default=900, help="seconds for the tests on ranks")
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args()

    def selected(tests):
        return [test for test in tests if not options.patterns or any(part in test.__name__ for part in options.patterns)]

    for test in selected(units.TESTS):
        timed(test)
    tests, ok = selected(rank_tests.TESTS), True
    if tests:
        ok = launch.wait(launch.start_forks(WORLD, lambda: rank_main(tests)), options.deadline)
    for test in selected([a_killed_run_continues_bit_for_bit, the_command_explains_itself]):
        timed(test)
    print("passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
