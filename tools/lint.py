#!/usr/bin/env python3
"""Format, clang-tidy and layer checks over the sources.

clang-tidy reads every .cpp that a build compiles: the release build and, if it is configured, the CUDA build, whose host
sources are plain C++ with the headers of CUDA (clang-tidy cannot read .cu files). Tests get fewer checks, see
NOT_FOR_TESTS; the static analyzer and checks that cost more than they find are for --full.

Most of the 3 to 10 s that a file takes is spent on the headers that it includes. So files of a module are read
together, as one source that includes them, unless their names clash; if anything is found there, each is read by
itself. A clean result is remembered under build/lint/: the key is a hash of the file, of every project header it
reaches, of its compile command, of the checks and of clang-tidy's version.
"""
import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import check_layers

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "lint" / "passed"
FOLDERS = ("include", "src", "cli", "tests", "examples", "bench", "python")
SUFFIXES = (".hpp", ".h", ".cpp", ".c", ".cuh", ".cu")
ANALYZER = "clang-analyzer-*"
# The analyzer, and checks that take a third of the time of all others, mostly on system headers.
SLOW = (
    ANALYZER,
    "bugprone-assert-side-effect",
    "bugprone-multiple-statement-macro",
    "bugprone-reserved-identifier",
    "bugprone-stringview-nullptr",
    "bugprone-suspicious-semicolon",
    "bugprone-suspicious-string-compare",
)
# Checks for speed and large sizes, which do not matter in tests; and the analyzer.
NOT_FOR_TESTS = (ANALYZER, "performance-*", "bugprone-implicit-widening-of-multiplication-result")
PRECOMPILED = re.compile(r" -Winvalid-pch| -include \S+/cmake_pch\.hxx| -fpch-preprocess")  # of another compiler
BATCH = 24  # maximum number of files read together
DECLARED = re.compile(r"^(?!namespace|using \w+::|#|//|[})\]]|TEST)\w[^\n=;({]*?(?<!:)\b(\w+)\s*(?:[=;({]|\[|: )", re.M)
CLASH = re.compile(r"^(\S+?):\d+:\d+: error: .*\[clang-diagnostic-error\]$", re.M)
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


def checks_of(entry, full):
    """Checks added to those of .clang-tidy."""
    left_out = (NOT_FOR_TESTS if entry["name"].startswith("tests/") else ()) + (() if full else SLOW)
    return ",".join(f"-{name}" for name in left_out)


def tidy_key(entry, salt):
    digest = hashlib.sha256(salt + entry["checks"].encode() + entry["command"].encode())
    for path in closure(pathlib.Path(entry["file"]), include_dirs(entry["command"])):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def flags_of(entry):
    """The words of its compile command, except the names of the source and the object."""
    words = shlex.split(entry["command"])
    at_output = words.index("-o")
    return [word for word in words[:at_output] + words[at_output + 2:] if word not in ("-c", entry["file"])]


def split_flags(entry):
    """Flags that determine what a source finds, and flags that determine how it is compiled."""
    finds, compiled = [], []
    words = iter(flags_of(entry))
    for word in words:
        if word == "-isystem":
            finds.append(f"-isystem{next(words)}")
        else:
            (finds if word.startswith(("-I", "-D", "-isystem")) else compiled).append(word)
    return finds, compiled


def batch_of(entries):
    """One entry for a source that includes all of them."""
    if len(entries) == 1:
        return {**entries[0], "members": entries}
    first = entries[0]
    finds = dict.fromkeys(flag for entry in entries for flag in split_flags(entry)[0])
    name = hashlib.sha256("".join(entry["file"] for entry in entries).encode()).hexdigest()[:16]
    source = CACHE / f"batch_{name}.cpp"
    lines = [f'#include "{entry["file"]}"  // NOLINT(bugprone-suspicious-include)\n' for entry in entries]
    source.write_text("".join(lines))
    command = [*split_flags(first)[1], *finds, "-o", "batch.o", "-c", str(source)]
    return {**first, "file": str(source), "command": shlex.join(command), "members": entries}


def own_names(entry):
    """The names that a source declares at the left margin, most of them in an unnamed namespace."""
    return set(DECLARED.findall(pathlib.Path(entry["file"]).read_text()))


def batches_of(entries):
    """Divides entries with the same flags into batches in which no two declare the same name."""
    batches = []  # of (members, names)
    for entry in entries:
        names = own_names(entry)
        for members, taken in batches:
            if len(members) < BATCH and not names & taken:
                members.append(entry)
                taken |= names
                break
        else:
            batches.append(([entry], names))
    return [batch_of(members) for members, _ in batches]


def module_of(name):
    """src/dispatch of src/dispatch/host/pack.cpp, cli of cli/run/report.cpp."""
    parts = pathlib.Path(name).parts[:-1]
    return parts[:2] if parts[0] in ("src", "tests") else parts[:1]


def groups_of(entries):
    """Entries that may share a batch: in one module, with the same flags and checks, and without the analyzer."""
    groups = {}
    for entry in entries:
        alone = entry["name"] if f"-{ANALYZER}" not in entry["checks"].split(",") else ""
        features = [flag for flag in split_flags(entry)[0] if flag.startswith("-DCROSSDOCK_HAS_")]
        key = (*module_of(entry["name"]), *features, *split_flags(entry)[1], alone)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def run_tidy(entry):
    command = ["clang-tidy", "--quiet", "--extra-arg=-Wno-error", f"--checks={entry['checks']}", entry["file"]]
    start = time.monotonic()
    result = subprocess.run([*command, "--", *flags_of(entry)[1:]], cwd=ROOT, capture_output=True, text=True)
    return entry, result, time.monotonic() - start


def tidy_entries(builds):
    """Every source once, with the command of the first target of the first build that compiles it."""
    names = {str(ROOT / name): name for name in sources() if name.endswith(".cpp")}
    by_name = {}
    for build in builds:
        for entry in json.loads((build / "compile_commands.json").read_text()):
            if name := names.get(entry["file"]):
                command = PRECOMPILED.sub("", entry["command"])
                by_name.setdefault(name, {**entry, "name": name, "command": command})
    return [by_name[name] for name in sorted(by_name)]


def tidy_batch(batch):
    """(entry, result, seconds) of each member."""
    entry, result, seconds = run_tidy(batch)
    members = batch["members"]
    if len(members) == 1:
        return [(entry, result, seconds)]
    if result.returncode == 0:
        return [(member, result, seconds / len(members)) for member in members]
    where = set(CLASH.findall(result.stdout))
    apart = [member for member in members[1:] if member["file"] in where]
    if not apart:
        return [run_tidy(member) for member in members]
    rest = [member for member in members if member not in apart]
    return tidy_batch(batch_of(rest)) + tidy_batch(batch_of(apart))


def check_tidy(build, cuda, options):
    if not (build / "compile_commands.json").exists():
        print(f"tidy: {build}/compile_commands.json is missing, run `cmake --preset lint`")
        return False
    has_cuda = (cuda / "compile_commands.json").exists()
    if not has_cuda:
        print("tidy: CUDA sources are left out, as `cmake --preset lint-cuda` was not run")
    salt = output_of("clang-tidy", "--version").encode()
    salt += (ROOT / ".clang-tidy").read_bytes()
    entries = tidy_entries([build, cuda] if has_cuda else [build])
    entries = [e for e in entries if not options.only or e["name"].startswith(tuple(options.only))]
    for entry in entries:
        entry["checks"] = checks_of(entry, options.full)
    keys = {e["file"]: tidy_key(e, salt) for e in entries}
    todo = [e for e in entries if not (CACHE / keys[e["file"]]).exists()]
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        batches = [batch for group in groups_of(todo) for batch in batches_of(group)]
        batches.sort(key=lambda batch: -len(batch["members"]))
        for entry, result, seconds in itertools.chain.from_iterable(pool.map(tidy_batch, batches)):
            if result.returncode == 0:
                (CACHE / keys[entry["file"]]).write_text(f"{entry['name']}\n")
                print(f"tidy: {entry['name']} ok ({seconds:.1f} s)", flush=True)
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
    parser.add_argument("--full", action="store_true", help="clang-tidy: with the static analyzer, not for tests")
    parser.add_argument("--only", action="append", metavar="PATH", help="clang-tidy: files that begin with this")
    parser.add_argument("--jobs", type=int, default=2, help="of clang-tidy, at the same time")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "lint", help="the folder of preset lint")
    parser.add_argument("--cuda-build", type=pathlib.Path, default=ROOT / "build" / "lint-cuda", help="the folder of preset lint-cuda")
    args = parser.parse_args()
    run = {
        "layers": run_layers,
        "format": lambda: check_format(args.fix),
        "tidy": lambda: check_tidy(args.build.resolve(), args.cuda_build.resolve(), args),
    }
    for name in set(args.checks) - set(run):
        parser.error(f"CHECK must be one of {', '.join(run)}, got {name}")
    results = [run[name]() for name in args.checks or run]  # run all of them, then give the verdict
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
