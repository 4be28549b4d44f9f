#!/usr/bin/env python3
"""Runs all benchmarks of one GPU and prints one table, with date, driver and command.

    tools/bench_gpu.py [--repeat 31] [--command build/cuda/crossdock] [--write] [SCENARIO...]

--write puts it into docs/benchmarks.md instead. Results are checked bit by bit.
"""
import datetime
import json
import subprocess

import benchmarks_page

SCENARIOS = ("h200-deepseek", "h200-qwen3", "h200-gptoss", "h200-decode")
# Ratios that must be reached on an H200; of decode, microseconds.
LARGE = {"dispatch": 1.15, "plan+dispatch": 1.30, "combine": 1.08, "dispatch_backward": 1.10, "combine_backward": 1.20}
SMALL = {"dispatch": 1.3, "plan+dispatch": 1.6, "combine": 1.15, "dispatch_backward": 1.2, "combine_backward": 1.3}
GOALS = {"h200-deepseek": LARGE, "h200-qwen3": LARGE, "h200-gptoss": SMALL}
MOST_US = {("h200-decode", "plan+disp.+combine"): 120}


def gpu():
    line = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0].split(", ")
    return f"{name}, driver {driver}"


def time_us(us):
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def goal_of(scenario, name):
    if (scenario, name) in MOST_US:
        return f"{MOST_US[scenario, name]} µs"
    goal = GOALS.get(scenario, {}).get(name)
    return "" if goal is None else f"{goal:.2f}"


def table(entries):
    lines = ["| scenario | step | MB | median µs | least | largest | floor µs | ratio | at most |", "|---" * 9 + "|"]
    for entry in entries:
        for name, step in entry["steps"].items():
            floor = f"{time_us(step['copy_us'])} | {step['ratio']:.2f}" if name not in ("nothing", "plan") else "|"
            lines.append(f"| {entry['scenario']} | {name} | {step['bytes'] / 1e6:.1f} | {time_us(step['median_us'])} "
                         f"| {time_us(step['min_us'])} | {time_us(step['max_us'])} | {floor} "
                         f"| {goal_of(entry['scenario'], name)} |")
    return lines


def describe(entry):
    step = entry["steps"]["dispatch"]
    sizes = "P{ranks} T{tokens} D{width} K{top_k} E{experts} {dtype}".format(**entry)
    if "max_sms" in entry:
        sizes += f", {entry['max_sms']} multiprocessors a rank"
    checked = "checked" if entry["checked"] else "NOT checked"
    return f"- `{entry['scenario']}`: {sizes}; copies at {step['bytes'] / step['copy_us'] / 1e6:.2f} TB/s; results {checked}"


def report(arguments):
    line = [arguments.command, "bench", "--device", "cuda", "--repeat", str(arguments.repeat)]
    line += [word for scenario in arguments.scenarios for word in ("--scenario", scenario)]
    result = subprocess.run([*line, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    entries = json.loads(result.stdout)
    lines = [f"{datetime.date.today().isoformat()}, {gpu()}: `{' '.join(line)}`", ""]
    return "\n".join([*lines, *map(describe, entries), "", *table(entries), ""])


if __name__ == "__main__":
    benchmarks_page.main(__doc__, scenarios=SCENARIOS, command="build/cuda/crossdock", repeat=31, marker="gpu figures",
                         report=report)
