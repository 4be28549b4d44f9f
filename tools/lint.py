#!/usr/bin/env python3
"""Format, clang-tidy and layer checks over the sources.

clang-tidy reads every .cpp that a build compiles: the release build, and the CUDA build where it is configured, whose
host sources are plain C++ with the headers of CUDA (what nvcc compiles, .cu, it cannot read). Tests get fewer checks, see
NOT_FOR_TESTS: the static analyzer takes half to four fifths of the time. A file takes 3 to 18 s, so a clean result is
remembered under build/lint/: the key is a hash of the file, of every project header it reaches, of its compile command,
of the checks and of clang-tidy's version.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import check_layers

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "lint"
FOLDERS = ("include", "src", "cli", "tests", "examples", "bench", "python")
SUFFIXES = (".hpp", ".h", ".cpp", ".c", ".cuh", ".cu")
# Slow; and what matters for speed and for large sizes, which tests have not.
NOT_FOR_TESTS = ("clang-analyzer-*", "performance-*", "bugprone-implicit-widening-of-multiplication-result")
INCLUDE = re.compile(rb'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)


def output_of(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def sources():
    paths = (path for top in FOLDERS for path in (ROOT / top).rglob("*"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in SUFFIXES)


def check_format(fix):
    names = sources()
    if not names:
        return True
    mode = ["-i"] if fix else ["--dry-run", "--Werror"]
    result = subprocess.run(["clang-format", *mode, *names], cwd=ROOT, capture_output=True, text=True)
    for name in sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", result.stderr, re.M))):
        print(f"format: {name} differs")
    print(f"format: {len(names)} files, " + ("ok" if result.returncode == 0 else "run `make format`"))
    return result.returncode == 0


def include_dirs(command):
    parts = command.split()
    return [pathlib.Path(p[2:]) for p in parts if p.startswith("-I") and p[2:].startswith(str(ROOT))]


def closure(source, dirs):
    """The source and all project files it can reach by #include, whatever the conditions around them."""
    seen, todo = {source}, [source]
    while todo:
        path = todo.pop()
        for header in INCLUDE.findall(path.read_bytes()):
            for folder in (path.parent, *dirs):
                candidate = (folder / header.decode()).resolve()
                if candidate.is_file() and candidate not in seen:
                    seen.add(candidate)
                    todo.append(candidate)
    return sorted(seen)


def checks_of(entry):
    """Added to those of .clang-tidy."""
    return ",".join(f"-{name}" for name in NOT_FOR_TESTS) if entry["name"].startswith("tests/") else ""


def tidy_key(entry, salt):
    digest = hashlib.sha256(salt + checks_of(entry).encode() + entry["command"].encode())
    for path in closure(pathlib.Path(entry["file"]), include_dirs(entry["command"])):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_tidy(entry):
    command = ["clang-tidy", "--quiet", "-p", str(CACHE), "--extra-arg=-Wno-error"]
    command += [f"--checks={checks_of(entry)}", entry["file"]]
    start = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return entry, result, time.monotonic() - start


def tidy_entries(builds):
    """Every source once, as the first target of the first build that has it compiles it."""
    names = {str(ROOT / name): name for name in sources() if name.endswith(".cpp")}
    by_name = {}
    for build in builds:
        for entry in json.loads((build / "compile_commands.json").read_text()):
            if name := names.get(entry["file"]):
                by_name.setdefault(name, {**entry, "name": name})
    return [by_name[name] for name in sorted(by_name)]


def write_commands(entries):
    """For clang-tidy, which would otherwise read a source once for every target that has it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    part = CACHE / f"compile_commands.{os.getpid()}.part"
    part.write_text(json.dumps([{key: e[key] for key in ("directory", "command", "file")} for e in entries], indent=1))
    part.replace(CACHE / "compile_commands.json")


def check_tidy(release, cuda, only, jobs):
    if not (release / "compile_commands.json").exists():
        print(f"tidy: {release}/compile_commands.json is missing, run `cmake --preset release`")
        return False
    has_cuda = (cuda / "compile_commands.json").exists()
    if not has_cuda:
        print("tidy: CUDA sources are left out, as `cmake --preset cuda` was not run")
    salt = output_of("clang-tidy", "--version").encode()
    salt += (ROOT / ".clang-tidy").read_bytes()
    entries = tidy_entries([release, cuda] if has_cuda else [release])
    write_commands(entries)
    entries = [e for e in entries if not only or e["name"].startswith(tuple(only))]
    keys = {e["file"]: tidy_key(e, salt) for e in entries}
    todo = [e for e in entries if not (CACHE / keys[e["file"]]).exists()]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for entry, result, seconds in pool.map(run_tidy, todo):
            if result.returncode == 0:
                (CACHE / keys[entry["file"]]).write_text(f"{entry['name']}\n")
                print(f"tidy: {entry['name']} ok ({seconds:.0f} s)", flush=True)
            else:
                failed += 1
                print(f"tidy: {entry['name']} failed\n{result.stdout or result.stderr}", flush=True)
    print(f"tidy: {len(entries)} files, {len(entries) - len(todo)} unchanged, {failed} failed")
    return failed == 0


def run_layers():
    errors = check_layers.check(ROOT)
    print("\n".join(errors) or "layers: ok")
    return not errors


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="layers, format or tidy; default: all of them")
    parser.add_argument("--fix", action="store_true", help="let format rewrite the files")
    parser.add_argument("--only", action="append", metavar="PATH", help="clang-tidy: files that begin with this")
    parser.add_argument("--jobs", type=int, default=2, help="of clang-tidy, at the same time")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release", help="the release build")
    parser.add_argument("--cuda-build", type=pathlib.Path, default=ROOT / "build" / "cuda", help="the CUDA build")
    args = parser.parse_args()
    run = {
        "layers": run_layers,
        "format": lambda: check_format(args.fix),
        "tidy": lambda: check_tidy(args.build.resolve(), args.cuda_build.resolve(), args.only, args.jobs),
    }
    for name in set(args.checks) - set(run):
        parser.error(f"CHECK must be one of {', '.join(run)}, got {name}")
    results = [run[name]() for name in args.checks or run]  # all of them, then the verdict
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
