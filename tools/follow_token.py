#!/usr/bin/env python3
"""Compares the lists under "Follow one token" in docs/architecture.md with what runs.

Usage: tools/follow_token.py [--gpu] BUILD

BUILD is a build folder of the preset coverage (or coverage-cuda, for --gpu) with the target follow_token. A list must
name every file of src/ with a function that runs

 - on the CPU: on the stack between MoeLayer::forward and the strategy of its dispatch, or in Dispatcher::dispatch
 - on a GPU: in Dispatcher::dispatch on the host, or as one of its kernels

except core/, ops/ but for the last file, and what lies below Group::agree: comm/ but for the memory of the ranks of a
node or the signals of GPUs. A header counts as the source beside it. --gpu needs a GPU and nsys; device functions in
headers cannot be measured and are listed by hand.
"""
import argparse
import csv
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
STORE = "src/ops/copy_rows.cpp"
BY_HAND = {"src/comm/cuda/peer_signals.cuh"}  # device functions


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def counts(path):
    """Whether a file of src/ belongs in the lists."""
    if path.startswith("src/comm/"):
        return path.startswith(("src/comm/memory/window", "src/comm/cuda/"))
    return path.startswith("src/") and (not path.startswith(("src/core/", "src/ops/")) or path == STORE)


def source_of(path):
    """The source beside a header, relative to the repository; None outside it."""
    path = pathlib.Path(path).resolve()
    if ROOT not in path.parents:
        return None
    for suffix in (".cpp", ".cu"):
        if path.suffix in (".hpp", ".cuh") and path.with_suffix(suffix).exists():
            path = path.with_suffix(suffix)
    return path.relative_to(ROOT).as_posix()


def covered(build, *command):
    """The files of the functions that run in `command`."""
    for old in build.rglob("*.gcda"):
        old.unlink()
    run(*command)
    files = set()
    for data in build.rglob("*.gcda"):
        for line in run("gcov", "--json-format", "--stdout", data).splitlines():
            report = json.loads(line)
            for file in report["files"]:
                if any(function["execution_count"] for function in file["functions"]):
                    files.add(source_of(build / report["current_working_directory"] / file["file"]))
    return files


def stacked(program):
    """The files on the stack from MoeLayer::forward to the strategy, which is not among them."""
    addresses = re.findall(rf"{program.name}\(\+(0x[0-9a-f]+)\)", run(program, "stack"))
    lines = run("addr2line", "-Cfe", program, *addresses).splitlines()
    files = []
    for function, place in zip(lines[::2], lines[1::2]):
        files.append(source_of(place.rsplit(":", 1)[0]) if place.startswith("/") else None)
        if function.startswith("crossdock::MoeLayer::forward("):
            return set(files)
    sys.exit("MoeLayer::forward is not on the stack of the strategy")


def kernel_files(program):
    """The files of the kernels of a dispatch on a GPU."""
    report = program.parent / "follow_token"
    run("nsys", "profile", "--force-overwrite=true", "-t", "cuda", "-o", report, program, "gpu")
    table = run("nsys", "stats", "--force-export=true", "-q", "-r", "cuda_gpu_trace:base", "-f", "csv", f"{report}.nsys-rep")
    names = {row["Name"] for row in csv.DictReader(table.splitlines())}
    defined = {name: path for path in (ROOT / "src").rglob("*.cu")
               for name in re.findall(r"__global__[^;{]*?\b(\w+)\(", path.read_text())}
    plans = {"plan_kernel"}
    return {path.relative_to(ROOT).as_posix() for name, path in defined.items()
            if name not in plans and any(re.search(rf"\b{name}\b", shown) for shown in names)}


def listed(heading):
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.search(rf"^\*\*{heading}.*?\n\n((?:\d+\. .*\n)+)", page, re.MULTILINE).group(1)
    return set(re.findall(r"^\d+\. `([^`]+)`", rows, re.MULTILINE))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("build", type=pathlib.Path)
    args = parser.parse_args()
    build = args.build.resolve()
    program = next(build.rglob("follow_token"))
    if args.gpu:
        found = covered(build, program, "gpu") | kernel_files(program) | BY_HAND
    else:
        found = covered(build, program, "dispatch") | stacked(program)
    found = {path for path in found if path and counts(path)}
    shown = listed("On a GPU" if args.gpu else "On the CPU")
    for path in sorted(found - shown):
        print(f"docs/architecture.md: {path} runs and is not listed")
    for path in sorted(shown - found):
        print(f"docs/architecture.md: {path} is listed and does not run")
    print(f"{len(found)} files run, {len(shown)} are listed")
    return int(found != shown)


if __name__ == "__main__":
    sys.exit(main())
