"""A run that is killed and continued has the losses of a run that was not, bit for bit."""
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


def start_and_kill(world: int, command: Sequence[str], generator: random.Random, duration: float) -> bool:
    """Kills one rank or all of them, at a random moment. False: they had ended before."""
    processes = launch.start(world, command, quiet=True)
    try:
        time.sleep(generator.uniform(0.4, 1.0) * duration)
        victims = generator.choice([processes, [generator.choice(processes)]])
        running = [process for process in victims if process.poll() is None]
        for process in running:
            process.kill()
    finally:
        launch.wait(processes, 30)
    return bool(running)


def kill_and_continue(world: int, options: Sequence[str], kills: int, seed: int) -> List[str]:
    """Problems found."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        start = time.monotonic()
        if not launch.wait(launch.start(world, [TRAIN, *options, "--log", str(folder / "whole.jsonl")]), 600):
            return ["the run without interruption failed"]
        duration = time.monotonic() - start
        log, checkpoints = folder / "killed.jsonl", folder / "checkpoints"
        command = [TRAIN, *options, "--log", str(log), "--checkpoint", str(checkpoints), "--every", "3"]
        interrupted = 0
        for _ in range(kills):
            interrupted += start_and_kill(world, command, generator, duration)
            done = len(log.read_text().splitlines()) if log.exists() else 0
            print(f"  killed after {done} steps", file=sys.stderr, flush=True)
        if not launch.wait(launch.start(world, command), 600):
            return ["the continued run failed"]
        if not interrupted:
            return ["no run was interrupted: it ended before"]
        want, got = losses_of(folder / "whole.jsonl"), losses_of(log)
        return [f"step {a[0]}: {b[1:]} instead of {a[1:]}" for a, b in zip(want, got) if a != b] + (
            [] if len(want) == len(got) else [f"{len(got)} steps are logged instead of {len(want)}"]
        )
