#!/usr/bin/env python3
"""Runs the benchmarks of this machine and writes a raw file of results.

    tools/bench_run.py cpu                    # -> bench/results/cpu.json
    tools/bench_run.py h200                   # -> bench/results/h200.json, on a machine with that GPU
    tools/bench_run.py cpu --output my.json --repeat 3 cpu-large decode

Each CPU scenario is a separate run. Results are checked bit by bit. Run it on an idle machine: the load average before
each run is recorded. tools/bench_page.py makes the page from the raw files.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "bench" / "results"
CPU = ("cpu-large", "cpu-medium", "cpu-many-ranks", "decode", "backward", "experts-gemm", "layer", "scale-*")
H200 = ("h200-deepseek", "h200-qwen3", "h200-gptoss", "h200-decode")
MACHINES = {
    "cpu": {"scenarios": CPU, "command": "build/release/crossdock", "repeat": 7, "options": []},
    "h200": {"scenarios": H200, "command": "build/cuda/crossdock", "repeat": 31, "options": ["--device", "cuda"]},
}


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def machine(name):
    if name == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        return f"{os.cpu_count()} cores ({cpu_name()}), {memory:.0f} GiB, Linux {platform.release()}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0].split(", ")
    return f"{gpu}, driver {driver}"


def run(command, options, scenarios, repeat):
    """Runs the command once. Returns the command line, the load before it, and its results."""
    words = ["bench", *options, *(word for name in scenarios for word in ("--scenario", name)), "--repeat", str(repeat)]
    load = os.getloadavg()[0]
    done = subprocess.run([command, *words, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    shown = " ".join(f"'{word}'" if "*" in word else word for word in ["crossdock", *words])
    return {"command": shown, "load": round(load, 1), "entries": json.loads(done.stdout)}


def text_of(results):
    """JSON with one line per entry, for readable diffs."""
    lines = [f'{{"machine": {json.dumps(results["machine"])},', f' "date": {json.dumps(results["date"])},', ' "runs": [']
    for run_of in results["runs"]:
        entries = ",\n".join("    " + json.dumps(entry) for entry in run_of["entries"])
        head = json.dumps({key: value for key, value in run_of.items() if key != "entries"})[:-1]
        lines.append(f'  {head}, "entries": [\n{entries}\n  ]}}' + ("," if run_of is not results["runs"][-1] else ""))
    return "\n".join([*lines, " ]}", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("machine", choices=MACHINES, help="the scenarios to run and the file they go to")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="instead of those of the machine")
    parser.add_argument("--repeat", type=int, help="timed repetitions (cpu: 7, h200: 31)")
    parser.add_argument("--command", help="the command that is measured (build/release/crossdock, build/cuda/crossdock)")
    parser.add_argument("--output", type=pathlib.Path, help="the raw file (bench/results/MACHINE.json)")
    arguments = parser.parse_intermixed_args()
    own = MACHINES[arguments.machine]
    scenarios = arguments.scenarios or own["scenarios"]
    batches = [[name] for name in scenarios] if arguments.machine == "cpu" else [scenarios]
    results = {"machine": "", "date": datetime.date.today().isoformat(), "runs": []}
    try:
        results["machine"] = machine(arguments.machine)
        for batch in batches:
            print(f"bench_run: {' '.join(batch)}", file=sys.stderr, flush=True)
            results["runs"].append(run(arguments.command or own["command"], own["options"], batch,
                                       arguments.repeat or own["repeat"]))
    except (OSError, subprocess.CalledProcessError) as error:  # a missing program, or one that has printed its reason
        sys.exit(f"{parser.prog}: {error}")
    (arguments.output or RESULTS / f"{arguments.machine}.json").write_text(text_of(results))


if __name__ == "__main__":
    main()
