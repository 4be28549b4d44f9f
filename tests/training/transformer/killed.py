"""A run that is killed and continued has the same losses, bit for bit, as one that was not."""
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import List, Sequence

import launch

TRAIN = str(pathlib.Path(__file__).resolve().parent / "train.py")


def losses_of(log: pathlib.Path) -> List[tuple]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["step"], line["loss"], line["router_loss"], line["gradient_norm"]) for line in lines]


def steps_in(log: pathlib.Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def start_and_kill(world: int, command: Sequence[str], log: pathlib.Path, steps: int, generator: random.Random) -> bool:
    """Kills one rank or all of them, at a random moment after this number of steps. False: they had ended before."""
    processes = launch.start(world, command, quiet=True)
    try:
        while steps_in(log) < steps and any(process.poll() is None for process in processes):
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.1))
        victims = generator.choice([processes, [generator.choice(processes)]])
        running = [process for process in victims if process.poll() is None]
        for process in running:
            process.kill()
    finally:
        launch.wait(processes, 30)
    return bool(running)


def kill_and_continue(world: int, options: Sequence[str], steps: int, kills: int, seed: int) -> List[str]:
    """Problems found in a run of this number of steps."""
    generator = random.Random(seed)
    options = [*options, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if not launch.wait(launch.start(world, [TRAIN, *options, "--log", str(folder / "whole.jsonl")]), 600):
            return ["the run without interruption failed"]
        log, checkpoints = folder / "killed.jsonl", folder / "checkpoints"
        command = [TRAIN, *options, "--log", str(log), "--checkpoint", str(checkpoints), "--every", "3"]
        interrupted = 0
        for after in sorted(generator.sample(range(1, steps // 2), kills)):
            interrupted += start_and_kill(world, command, log, after, generator)
            print(f"  killed after {steps_in(log)} steps", file=sys.stderr, flush=True)
        if not launch.wait(launch.start(world, command), 600):
            return ["the continued run failed"]
        if not interrupted:
            return ["no run was interrupted: it ended before"]
        want, got = losses_of(folder / "whole.jsonl"), losses_of(log)
        return [f"step {a[0]}: {b[1:]} instead of {a[1:]}" for a, b in zip(want, got) if a != b] + (
            [] if len(want) == len(got) else [f"{len(got)} steps are logged instead of {len(want)}"]
        )
