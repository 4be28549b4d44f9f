#!/usr/bin/env python3
"""Runs the commands in README.md and docs/*.md, as far as they need nothing but this build.

Usage: commands_test.py COMMAND SOURCE_DIR

 - every command in an indented block or a ```bash block is run, if need be with SMALLER sizes, or matches a line of NOT_RUN,
   which says why not
 - every option of every `crossdock` command exists, also of those that are not run
 - every `make` target, and every file that a command names, exists; packages for apt are those of tools/setup.sh, and make
 - every ```python block compiles; a block is a program that tests/torch/readme.py runs, or lines of a file that is run,
   or a fragment of a page in FRAGMENTS
"""
import ast
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile

DEADLINE = 120  # seconds, for a command that takes one or two
NOT_RUN = {  # what matches a command, and why it is not run here
    r"--device cuda|build/cuda": "needs a GPU: cli_cuda_test, and tools/bench_run.py measures",
    r"^crossdock verify --quick": "half a minute; conformance tests run the same checks",
    r"^crossdock verify --faults(?! --list)": "minutes; the fault tests of tests/dispatch and tests/comm",
    r"^mpirun .*--map-by|^RANK=0 ": "needs several machines",
    r"^srun|^#SBATCH|scontrol|^export CROSSDOCK_REPORT": "needs Slurm; tests of the sockets communicator set its variables",
    r"^torchrun --nnodes|^torchrun .*(--no-python|train\.py)": "needs torch, or several machines: tests/torch, tests/training",
    r"^torchrun .*examples/|^python3 examples/": "tests/torch, tests/python",
    r"^torchrun \.\.\.": "needs a model: tests/torch/case_titan.py",
    r"^python3? -m (crossdock\.compare|torch\.)": "needs torch: tests/torch",
    r"^python3 -c \"import crossdock\.torch\"": "needs torch and the package: tests/torch",
    r"tests/training/transformer": "tests/training/run.py",
    r"^build/release/tests/training": "tests/training/CMakeLists.txt",
    r"tests/torch/run\.py|bench/\w+\.py": "needs torch, or a GPU",
    r"^tests/nodes/testbed\.py": "needs network namespaces: tests/nodes",
    r"^make |^cmake |^tools/": "builds, installs or measures; .ci/run runs the main ones",
    r"^pip install|^export |^sudo apt|^python3 -m venv": "changes the environment of the reader",
}
WITH_MPI = r"^mpirun|--communicator mpi"  # run if this build has MPI
SMALLER = {  # what is replaced in a command before it is run here, mostly so that it takes a second or two
    r"--random \d{3,}": "--random 20",
    r"--communicator threads,sockets,mpi": "--communicator threads,sockets",
    r"crossdock bench --scenario cpu-large": r"\g<0> --tokens 16 --ranks 2 --communicator threads --repeat 1",
    r"(--scenario layer|bench) --tokens \d+:\d+:x\d": r"\1 --tokens 8:16:x2 --repeat 1",
    r"--width 512,1024": "--width 16,32 --ranks 2 --communicator threads",
    r"--width 2048": "--width 64 --communicator threads",
    r"crossdock run --ranks 8 --ranks-per-node 4": r"\g<0> --tokens 16 --width 16 --inner 16",
    r"crossdock run(?= &)": r"\g<0> --tokens 16 --width 16 --inner 16",
    r"--tokens-total 256": "--tokens-total 32 --width 64 --inner 64",
    r"^mpirun ": "mpirun --oversubscribe ",
    r"done; wait$": "done; for job in $(jobs -p); do wait $job || exit 1; done",  # with the exit status of each
}
CONFIG = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4}  # config.json
FRAGMENTS = {  # pages with lines of Python that stand for a reader's program, and where the calls are tested
    "README.md": "tests/torch/readme.py; the lines for transformers: tests/torch/hf_runs.py",
    "checkpoints.md": "tests/torch/case_checkpoint.py",
    "python.md": "tests/python",
    "pytorch.md": "tests/torch",
    "megatron.md": "tests/torch/case_megatron.py",
    "torchtitan.md": "tests/torch/case_titan.py",
    "transformers.md": "tests/torch",
}
STARTS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:sudo apt|build/\w+/\S+|crossdock|make|cmake|pip|python3?|torchrun|mpirun|srun|tools/\S+|tests/\S+|export|for \w+ in|done)\b"
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOOP = re.compile(r"^for \w+ in .*?^done.*?$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^|\n\n)((?:    [^\n]*\n|\n(?=    ))+)")


def pages(source):
    return [source / "README.md", *sorted((source / "docs").glob("*.md"))]


def commands_of(text):
    """Every command of a page, without comments; lines that end in a backslash are joined."""
    plain = BLOCK.sub("", text)
    blocks = [block for language, block in BLOCK.findall(text) if language in ("bash", "sh")]
    blocks += [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in INDENTED.findall(plain)]
    for block in blocks:
        block = LOOP.sub(lambda loop: re.sub(r"\s+", " ", loop.group()), block.replace("\\\n", " "))
        for line in block.split("\n"):
            line = re.sub(r"\s+#\s.*", "", line).strip()
            if STARTS.match(line) and not line.startswith("crossdock.") and not re.match(r"crossdock \w+: ", line):
                yield re.sub(r"\s+", " ", line)


def checked_options(words, helps):
    """What is wrong with the options of a `crossdock` command."""
    names = re.findall(r"^\s+(?:-\w, )?(--[\w-]+)(?:, (--[\w-]+))?", helps.get(words[0], ""), re.MULTILINE)
    known = {name for pair in names for name in pair if name}
    for word in words[1:]:
        option = word.split("=")[0]
        if option.startswith("--") and option not in known:
            yield f"crossdock {words[0]} has no option {option}"


def missing_files(command, source):
    for word in shlex.split(command.split(" > ")[0]):
        if re.match(r"(examples|tests|tools|bench)/", word) and not (source / word).exists() and "*" not in word:
            yield f"{word} does not exist"


def missing_target(command, source):
    if command.startswith("make "):
        targets = " ".join(re.findall(r"^\.PHONY: (.*)$", (source / "Makefile").read_text(), re.MULTILINE)).split()
        target = command.split()[1]
        if target not in targets:
            yield f"the Makefile has no target {target}"


def unknown_packages(command, source):
    if command.startswith("sudo apt install "):
        known = set(re.findall(r"[\w.+-]+", (source / "tools/setup.sh").read_text())) | {"make"}
        for word in command.split("&&")[0].split()[3:]:
            if word not in known:
                yield f"tools/setup.sh does not install {word}"


def python_faults(source):
    run_blocks = "\n".join(path.read_text() for path in sorted((source / "examples").rglob("*.py")))
    run_lines = {line.split("  #")[0].strip() for line in run_blocks.split("\n")}
    for page in pages(source):
        for language, code in BLOCK.findall(page.read_text()):
            if language != "python":
                continue
            where = f"{page.relative_to(source)}: the Python block that begins with {code.strip().splitlines()[0]!r}"
            try:
                ast.parse(code)
            except SyntaxError as error:
                yield f"{where} does not compile: {error}"
            is_program = "init_process_group" in code and "destroy_process_group" in code
            own = [line.split("  #")[0].strip() for line in code.split("\n")]
            is_excerpt = all(line in run_lines for line in own if line not in ("", "..."))
            if not (is_program or is_excerpt or page.name in FRAGMENTS):
                yield f"{where} is neither a program, nor lines of examples/, nor on a page in FRAGMENTS"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command, binary, source):
    """Runs a command as in a reader's home, with examples/ and a model's config.json."""
    for pattern, smaller in SMALLER.items():
        command = re.sub(pattern, smaller, command)
    command = re.sub(r"(?<![\w/])(?:build/\w+/)?crossdock(?= )", lambda _: shlex.quote(binary), command)
    command = command.replace("MASTER_PORT=29500", f"MASTER_PORT={free_port()}")
    with tempfile.TemporaryDirectory() as folder:
        home = pathlib.Path(folder)
        (home / "examples").symlink_to(source / "examples")
        (home / "config.json").write_text(json.dumps(CONFIG))
        (home / ".config/fish/completions").mkdir(parents=True)
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env={**os.environ, **as_root, "HOME": folder},
            capture_output=True, text=True, timeout=DEADLINE, check=False,
        )
    return [] if done.returncode == 0 else [f"{command}\n  exit status {done.returncode}: {done.stderr.strip()[-500:]}"]


def has_mpi(binary):
    """Whether this build has MPI, and mpirun is here to start its ranks."""
    info = subprocess.run([binary, "info", "--json"], capture_output=True, text=True, timeout=DEADLINE, check=True)
    return shutil.which("mpirun") is not None and any(
        part["name"] == "mpi" and part["works"] for part in json.loads(info.stdout)["parts"]
    )


def main():
    binary, source = str(pathlib.Path(sys.argv[1]).resolve()), pathlib.Path(sys.argv[2]).resolve()
    found = {re.sub(r"^build/release/crossdock\b", "crossdock", c): c for page in pages(source) for c in commands_of(page.read_text())}
    assert len(found) >= 40, f"only {len(found)} commands were found in the documentation"
    failures, helps, used, to_run, with_mpi = list(python_faults(source)), {}, set(), [], has_mpi(binary)
    for command in found:
        failures += [f"{command}\n  {fault}" for check in (missing_files, missing_target, unknown_packages) for fault in check(command, source)]
        after = re.search(r"(?:^|/|\s)crossdock ((?!-)[\w-]+(?: .*)?)$", re.split(r" [>&|]", command)[0])
        if after and not command.startswith(("python", "pip", "make")):
            words = shlex.split(after.group(1))
            if words[0] not in helps:
                helps[words[0]] = subprocess.run([binary, words[0], "--help"], capture_output=True, text=True, timeout=DEADLINE).stdout
            failures += [f"{command}\n  {fault}" for fault in checked_options(words, helps)]
        reasons = {pattern for pattern in NOT_RUN if re.search(pattern, command)}
        used |= reasons
        if not reasons and (with_mpi or not re.search(WITH_MPI, command)):
            to_run.append(command)
    failures += [f"NOT_RUN: no command matches {pattern}" for pattern in NOT_RUN.keys() - used]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        failures += [fault for faults in pool.map(lambda command: run(command, binary, source), to_run) for fault in faults]
    print("\n".join(failures))
    print(f"{len(found)} commands, {len(to_run)} run, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
