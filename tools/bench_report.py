#!/usr/bin/env python3
"""Runs benchmarks of the CPU and prints their tables, with date, machine and command.

    tools/bench_report.py [--repeat 7] [--command build/release/crossdock] [--write] [SCENARIO...]

Each scenario is a run of its own. --write puts the tables into docs/benchmarks.md instead.
Figures from a machine that does other work too are worth nothing: the load before each run is in the text.
"""
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

import benchmarks_page

SCENARIOS = ("cpu-large", "cpu-medium", "cpu-many-ranks", "decode", "backward", "experts-gemm", "layer", "scale-*")


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def machine():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{os.cpu_count()} cores ({cpu_name()}), {memory:.0f} GiB, Linux {platform.release()}"


def time_ms(us):
    return f"{us / 1000:.3g}" if us < 100e3 else f"{us / 1000:.0f}"


def sizes(entry):
    return "P{ranks} T{tokens} D{width} K{top_k} E{experts} {dtype}".format(**entry)


def table(entries):
    lines = ["| strategy | engine | step | median ms | min to max | copy ms | ratio | traffic ms | ratio | |",
             "|---" * 10 + "|"]
    for entry in entries:
        for name, step in entry["steps"].items():
            plain = entry["steps"].get(name + "_blas")
            traffic = f"{time_ms(step['traffic_us'])} | {step['traffic_ratio']:.2f}" if "traffic_us" in step else "|"
            note = f"{step['gflops']:.0f} GFLOP/s" if "gflops" in step else ""
            if plain:
                note += f", {plain['median_us'] / step['median_us']:.0%} of BLAS"
            lines.append(
                f"| {entry['strategy']} | {entry['communicator']} | {name} | {time_ms(step['median_us'])} "
                f"| {time_ms(step['min_us'])} to {time_ms(step['max_us'])} | {time_ms(step['copy_us'])} "
                f"| {step['ratio']:.2f} | {traffic} | {note} |")
    return lines


def run(command, scenario, repeat):
    line = [command, "bench", "--json", "--scenario", scenario, "--repeat", str(repeat)]
    load = os.getloadavg()[0]
    result = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return " ".join(["crossdock", *line[1:2], "--scenario", f"'{scenario}'" if "*" in scenario else scenario,
                     "--repeat", str(repeat)]), load, json.loads(result.stdout)


def report(arguments):
    lines = [f"{datetime.date.today().isoformat()}, {machine()}.", ""]
    for scenario in arguments.scenarios:
        print(f"bench_report: {scenario}", file=sys.stderr, flush=True)
        line, load, entries = run(arguments.command, scenario, arguments.repeat)
        lines += [f"`{line}` (load before it: {load:.1f})", ""]
        for name in dict.fromkeys(entry["scenario"] for entry in entries):
            of_scenario = [entry for entry in entries if entry["scenario"] == name]
            lines += [f"**{name}**: {sizes(of_scenario[0])}", "", *table(of_scenario), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    benchmarks_page.main(__doc__, scenarios=SCENARIOS, command="build/release/crossdock", repeat=7, marker="figures",
                         report=report)
