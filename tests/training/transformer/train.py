#!/usr/bin/env python3
"""Trains a small mixture-of-experts transformer on bytes, on any mesh.

    python tests/training/transformer/train.py
    torchrun --nproc-per-node 8 tests/training/transformer/train.py --tp 2 --cp 2 --pp 2 --ep 2
    torchrun --nproc-per-node 4 tests/training/transformer/train.py --dp 2 --tp 2 --ep 4 --data-parallel fsdp

The processes are tp*cp*dp*pp; the experts are divided over etp*ep of each pipeline stage. The same options on another
mesh give the same losses, up to rounding.
"""
import argparse
import dataclasses
import datetime
import gc
import json
import os
import pathlib
import sys
import time
from typing import Iterator, Optional, TextIO

import torch
import torch.distributed as dist

from mesh import MeshShape
from presets import PRESETS
from training import Metrics, Settings, Trainer


def start_processes(patience_s: float = 300) -> None:
    """Joins the other processes, which may be up to `patience_s` late; without torchrun's variables this process is
    alone."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=patience_s)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


class Report:
    """On the first rank: a line of JSON per step in a file, and a line on the terminal if there is one."""

    def __init__(self, path: Optional[str], steps: int, first_step: int):
        self.steps = steps
        self.first: Optional[Metrics] = None
        self.last: Optional[Metrics] = None
        self.file: Optional[TextIO] = None
        self.watched = sys.stderr.isatty()
        if path is not None:
            self._drop_lines_after(path, first_step)
            self.file = open(path, "a", buffering=1)
        self.time = time.monotonic()

    def add(self, metrics: Metrics) -> None:
        now = time.monotonic()
        speed = metrics.tokens / (now - self.time)
        self.time = now
        self.first, self.last = self.first or metrics, metrics
        if self.file is not None:
            self.file.write(json.dumps({**dataclasses.asdict(metrics), "tokens_per_second": round(speed, 1)}) + "\n")
        if self.watched:
            line = f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}  {speed:.0f} tokens/s  "
            line += f"imbalance {metrics.imbalance:.2f}  dropped {metrics.dropped}"
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self.watched:
            print(file=sys.stderr)
        if self.file is not None:
            self.file.close()
        if self.first is not None:
            print(f"steps {self.first.step} to {self.last.step}: loss {self.first.loss:.4f} to {self.last.loss:.4f}")

    @staticmethod
    def _drop_lines_after(path: str, step: int) -> None:
        """A run that was killed may have logged steps after its last checkpoint; they are repeated."""
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= step] if step else []
        temporary = f"{path}.tmp"
        with open(temporary, "w") as file:
            file.writelines(kept)
        os.replace(temporary, path)


def _complete_lines(path: str) -> Iterator[str]:
    if os.path.exists(path):
        with open(path) as file:
            yield from (line for line in file if line.endswith("\n"))


def parse(arguments: Optional[list] = None) -> argparse.Namespace:
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=usage)
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=sorted(PRESETS), default="qwen3", help="a tiny model like it (default qwen3)")
    model.add_argument("--layers", type=int, help="number of blocks")
    model.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    mesh = parser.add_argument_group("mesh")
    for name, text in (
        ("tp", "tensor parallelism of attention, with sequence parallelism"),
        ("cp", "context parallelism: parts of the same sequences"),
        ("dp", "data parallelism: different rows"),
        ("pp", "pipeline stages"),
        ("etp", "tensor parallelism of experts"),
        ("ep", "expert parallelism"),
    ):
        mesh.add_argument(f"--{name}", type=int, default=1, help=text)
    mesh.add_argument("--data-parallel", choices=["sum", "ddp", "fsdp"], default="sum", help="what sums gradients")
    mesh.add_argument("--strategy", default="auto", help="auto, allgather, alltoall, direct or hierarchical")
    mesh.add_argument("--ranks-per-node", type=int, default=0, help="simulate nodes of this many ranks")
    mesh.add_argument("--capacity-factor", type=float, help="drop routes beyond this multiple of the mean")
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="FILE", help="learn the paragraphs of a file (default: generated text)")
    data.add_argument("--rows", type=int, default=4, help="rows of a micro-batch on all ranks (default 4)")
    data.add_argument("--length", type=int, default=32, help="most tokens in a row (default 32)")
    data.add_argument("--micro-batches", type=int, default=2, help="per step (default 2)")
    data.add_argument("--vary-rows", action="store_true", help="micro-batches have 1 to --rows rows")
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=50, help="number of steps (default 50)")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--learning-rate", type=float, default=0.01)
    run.add_argument("--log", metavar="FILE.jsonl", help="write a line per step")
    run.add_argument("--checkpoint", metavar="FOLDER", type=pathlib.Path, help="write checkpoints; continue from them")
    run.add_argument("--every", type=int, default=10, help="steps between checkpoints (default 10)")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    model = PRESETS[options.preset]
    if options.layers is not None:
        model = dataclasses.replace(model, layers=options.layers)
    return Settings(
        model=model,
        mesh=MeshShape(*(getattr(options, name) for name in ("tp", "cp", "dp", "pp", "etp", "ep"))),
        data_parallel=options.data_parallel,
        strategy=options.strategy,
        ranks_per_node=options.ranks_per_node,
        capacity_factor=options.capacity_factor,
        dtype=getattr(torch, options.dtype),
        seed=options.seed,
        data=options.data,
        rows=options.rows,
        length=options.length,
        micro_batches=options.micro_batches,
        vary_rows=options.vary_rows,
        learning_rate=options.learning_rate,
    )


def main() -> None:
    options = parse()
    settings = settings_of(options)
    start_processes()
    if dist.get_world_size() != settings.mesh.world:
        raise SystemExit(f"{settings.mesh} needs {settings.mesh.world} processes, there are {dist.get_world_size()}")
    train(options, settings)
    gc.collect()  # no object may hold a process group when it is destroyed
    dist.destroy_process_group()


def train(options: argparse.Namespace, settings: Settings) -> None:
    trainer = Trainer(settings)
    if options.checkpoint is not None:
        trainer.resume(options.checkpoint)
    report = Report(options.log, options.steps, trainer.step) if dist.get_rank() == 0 else None
    while trainer.step < options.steps:
        metrics = trainer.train_step()
        if report is not None:
            report.add(metrics)
        if options.checkpoint is not None and (trainer.step % options.every == 0 or trainer.step == options.steps):
            trainer.save(options.checkpoint)
    if report is not None:
        report.finish()
    trainer.close()


if __name__ == "__main__":
    main()
