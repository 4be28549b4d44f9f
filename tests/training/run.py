#!/usr/bin/env python3
"""Tests of the training example: tests/training/run.py [pattern ...]; patterns select tests by parts of their names."""
import argparse
import os
import pathlib
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "python"
sys.path[:0] = [str(HERE), str(EXAMPLE)]

import launch  # noqa: E402

WORLD = 8


def selected(tests, patterns):
    return [test for test in tests if not patterns or any(pattern in test.__name__ for pattern in patterns)]


def timed(test, quiet=False):
    start = time.monotonic()
    test()
    if not quiet:
        print(f"  ok {time.monotonic() - start:6.2f} s  {test.__name__}", flush=True)


def rank_main(patterns):
    import rank_tests
    import torch.distributed as dist
    from train import start_processes

    start_processes()
    for test in selected(rank_tests.TESTS, patterns):
        try:
            timed(test, quiet=dist.get_rank() != 0)
        except BaseException:
            print(f"rank {dist.get_rank()}, {test.__name__}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)  # the launcher ends the others
    dist.destroy_process_group()


def a_killed_run_continues_bit_for_bit():
    import killed

    options = ["--dp", "2", "--ep", "2", "--preset", "deepseek-v3", "--steps", "20"]
    problems = killed.kill_and_continue(2, options, kills=2, seed=int(time.time()))
    assert not problems, problems


def the_command_explains_itself():
    import subprocess

    text = subprocess.run([sys.executable, str(EXAMPLE / "train.py"), "--help"], capture_output=True, text=True)
    assert text.returncode == 0 and "--checkpoint FOLDER" in text.stdout, text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.patterns)
    import rank_tests
    import units

    for test in selected(units.TESTS, options.patterns):
        timed(test)
    ok = True
    if selected(rank_tests.TESTS, options.patterns):
        ok = launch.run(WORLD, [__file__, "--rank", "--", *options.patterns], seconds=400)
    for test in selected([a_killed_run_continues_bit_for_bit, the_command_explains_itself], options.patterns):
        timed(test)
    print("passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
