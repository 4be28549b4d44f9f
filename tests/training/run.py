#!/usr/bin/env python3
"""Tests of the transformer in tests/training/transformer: tests/training/run.py [pattern ...]; patterns select tests by parts of their names."""
import argparse
import json
import os
import pathlib
import pty
import subprocess
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = HERE / "transformer"
sys.path[:0] = [str(HERE), str(PROGRAM)]

import killed  # noqa: E402
import launch  # noqa: E402
import rank_tests  # noqa: E402
import torch.distributed as dist  # noqa: E402
import units  # noqa: E402
from train import start_processes  # noqa: E402

WORLD = 8  # ranks


def timed(test, quiet=False):
    start = time.monotonic()
    test()
    if not quiet:
        print(f"  ok {time.monotonic() - start:6.2f} s  {test.__name__}", flush=True)


def rank_main(tests):
    start_processes(patience_s=1800)
    for test in tests:
        try:
            timed(test, quiet=dist.get_rank() != 0)
        except BaseException:
            print(f"rank {dist.get_rank()}, {test.__name__}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)  # the launcher ends the others
    dist.destroy_process_group()


def a_killed_run_continues_bit_for_bit():
    options = ["--dp", "2", "--ep", "2", "--preset", "deepseek-v3"]
    problems = killed.kill_and_continue(2, options, steps=20, kills=2, seed=int(time.time()))
    assert not problems, problems


def a_terminal_shows_progress_and_a_file_is_learned():
    terminal, its_end = pty.openpty()
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.jsonl"
        command = [sys.executable, str(PROGRAM / "train.py"), "--steps", "2", "--log", str(log)]
        command += ["--data", str(HERE.parents[1] / "README.md")]
        ended = subprocess.run(command, stderr=its_end, stdout=subprocess.PIPE, text=True, timeout=300)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    shown = os.read(terminal, 10000).decode()
    assert ended.returncode == 0 and ended.stdout.startswith("steps 1 to 2: loss "), (ended, shown)
    assert all(word in shown for word in ("step 2/2", "loss", "tokens/s", "imbalance", "dropped 0")), shown
    assert [line["step"] for line in lines] == [1, 2], lines
    os.close(its_end)
    os.close(terminal)


def without_a_terminal_there_is_no_progress():
    command = [sys.executable, str(PROGRAM / "train.py"), "--steps", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "imbalance" not in ended.stderr, ended


def the_command_explains_itself():
    text = subprocess.run([sys.executable, str(PROGRAM / "train.py"), "--help"], capture_output=True, text=True)
    assert text.returncode == 0 and "--checkpoint FOLDER" in text.stdout, text


COMMAND_TESTS = [
    a_killed_run_continues_bit_for_bit,
    a_terminal_shows_progress_and_a_file_is_learned,
    without_a_terminal_there_is_no_progress,
    the_command_explains_itself,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deadline", type=float, default=900, help="seconds for the tests on ranks")
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args()

    def selected(tests):
        patterns = options.patterns or [""]
        return [test for test in tests if any(pattern in test.__name__ for pattern in patterns)]

    for test in selected(units.TESTS):
        timed(test)
    tests, ok = selected(rank_tests.TESTS), True
    if tests:
        ok = launch.wait(launch.start_forks(WORLD, lambda: rank_main(tests)), options.deadline)
    for test in selected(COMMAND_TESTS):
        timed(test)
    print("passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
