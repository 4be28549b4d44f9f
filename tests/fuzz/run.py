#!/usr/bin/env python3
"""Runs the fuzz targets, one after the other.

Usage: run.py BUILD_DIR SECONDS [TARGET...]

Each starts from tests/fuzz/seeds/<target> and from what earlier runs found in BUILD_DIR/corpus/<target>. An input that crashes,
leaks, takes longer than 60 s or 2 GB is left in BUILD_DIR; to run it alone: BUILD_DIR/tests/fuzz/fuzz_<target> FILE.
"""
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TARGETS = ["capi", "case", "frames", "planner", "store"]
MORE_SEEDS = {"case": [HERE.parents[1] / "examples/cases"]}
LIMITS = ["-timeout=60", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1", "-verbosity=0"]


def fuzz(build, target, seconds):
    """Whether it found nothing."""
    corpus = build / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = [HERE / "seeds" / target, *MORE_SEEDS.get(target, [])]
    command = [build / "tests/fuzz" / f"fuzz_{target}", *LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={build}/{target}-",
               corpus, *(folder for folder in seeds if folder.is_dir())]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=seconds + 600, check=False)
    if done.returncode != 0:
        print(f"{done.stdout}\nfuzz_{target}: failed with exit status {done.returncode}", flush=True)
        return False
    runs = re.search(r"number_of_executed_units: (\d+)", done.stdout)
    print(f"fuzz_{target}: {runs.group(1) if runs else '?'} inputs, {len(list(corpus.iterdir()))} kept, no findings", flush=True)
    return True


def main():
    build, seconds = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2])
    found_nothing = [fuzz(build, target, seconds) for target in sys.argv[3:] or TARGETS]
    return 0 if all(found_nothing) else 1


if __name__ == "__main__":
    sys.exit(main())
