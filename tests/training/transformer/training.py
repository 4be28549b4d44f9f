"""A training run: model, data, optimizer and checkpoints on a mesh."""
import dataclasses
import pathlib
from typing import Dict, List, Optional

import torch
import torch.distributed as dist

import checkpoint
from collectives import sum_over
from data import Loader
from data_parallel import DataParallel
from experts import connect, make_dispatcher
from mesh import Mesh, MeshShape
from model import make_stage
from pipeline import Pipeline
from presets import PRESETS, ModelConfig
from shards import shard_step


@dataclasses.dataclass(frozen=True)
class Settings:
    model: ModelConfig = PRESETS["qwen3"]
    mesh: MeshShape = MeshShape()
    data_parallel: str = "sum"
    strategy: str = "auto"
    ranks_per_node: int = 0  # simulates nodes for the strategies; 0: as they are
    capacity_factor: Optional[float] = None
    dtype: torch.dtype = torch.float32
    seed: int = 1
    data: Optional[str] = None
    rows: int = 4  # of a micro-batch, on all ranks
    length: int = 32  # of a row
    micro_batches: int = 2
    vary_rows: bool = False
    learning_rate: float = 0.01
    max_norm: float = 1.0  # of the gradient


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics of one step, the same on every rank."""

    step: int
    loss: float  # mean of the tokens
    router_loss: float
    gradient_norm: float
    tokens: int
    imbalance: float  # routes of the busiest expert / mean, in the worst layer
    dropped: int  # routes


class MissingGradient(RuntimeError):
    """Raised on every rank if some parameter of some rank took no part in the step."""


class Trainer:
    """One rank of a run. Collective over the mesh; every rank makes the same calls."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.mesh = Mesh(settings.mesh)
        self.dispatcher = make_dispatcher(
            settings.model,
            self.mesh,
            connect(self.mesh.group("experts"), settings.ranks_per_node),
            strategy=settings.strategy,
            capacity_factor=settings.capacity_factor,
        )
        self.stage = make_stage(settings.model, self.mesh, self.dispatcher, seed=settings.seed, dtype=settings.dtype)
        self.model = DataParallel(self.stage, self.mesh, settings.data_parallel)
        self.pipeline = Pipeline(self.model, self.mesh, width=settings.model.width, dtype=settings.dtype)
        self.optimizer = torch.optim.AdamW(
            self.stage.parameters(), lr=settings.learning_rate, weight_decay=0.01, foreach=False
        )
        self.loader = Loader(
            settings.data,
            seed=settings.seed,
            rows=settings.rows,
            length=settings.length,
            micro_batches=settings.micro_batches,
            vary_rows=settings.vary_rows,
        )
        self.step = 0

    def train_step(self) -> Metrics:
        metrics = self.compute_gradients()
        self.update(metrics)
        return metrics

    def compute_gradients(self) -> Metrics:
        """Forward and backward of the next step; parameters then have their final gradients."""
        shards, tokens = shard_step(self.loader.next_step(), self.mesh)
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.pipeline.step(shards)
        missing = self.model.missing_gradients()
        layers = self.stage.layers()
        routes, rows = (sum(getattr(layer, name) for layer in layers) for name in ("step_routes", "step_rows"))
        sums = torch.tensor([*losses, routes - rows, len(missing)], dtype=torch.float64)
        loss, router_loss, dropped, num_missing = sum_over(sums, self.mesh.group("world")).tolist()
        if num_missing:
            raise MissingGradient(f"{num_missing:.0f} parameters have no gradient; on this rank: {missing}")
        self.model.sum_gradients()
        return Metrics(
            step=self.step + 1,
            loss=loss,
            router_loss=router_loss,
            gradient_norm=self.model.gradient_norm(),
            tokens=tokens,
            imbalance=self._imbalance(),
            dropped=round(dropped) // self.settings.mesh.etp,
        )

    def update(self, metrics: Metrics) -> None:
        if metrics.gradient_norm > self.settings.max_norm:
            self.model.scale_gradients(self.settings.max_norm / metrics.gradient_norm)
        self.optimizer.step()
        for layer in self.stage.layers():
            layer.finish_step()
        self.step += 1

    def gradients(self) -> Dict[str, torch.Tensor]:
        """Logical gradients, on the first rank; {} elsewhere."""
        return checkpoint.collect(self.stage, self.mesh, lambda parameter: parameter.grad)

    def save(self, folder: pathlib.Path) -> None:
        training = {"step": self.step, "position": self.loader.position, "seed": self.settings.seed}
        checkpoint.save(folder, training, self.stage, self.optimizer, self.mesh)

    def resume(self, folder: pathlib.Path) -> bool:
        """Continues from the newest checkpoint. False: there is none."""
        found: List[Optional[pathlib.Path]] = [checkpoint.newest(folder) if self.mesh.rank == 0 else None]
        dist.broadcast_object_list(found, src=0, group=self.mesh.group("world"))
        if found[0] is None:
            return False
        training = checkpoint.load(found[0], self.stage, self.optimizer)
        self.step, self.loader.position = training["step"], training["position"]
        return True

    def close(self) -> None:
        self.dispatcher.close()

    def _imbalance(self) -> float:
        loads = torch.stack([layer.router.step_load.double() for layer in self.stage.layers()])
        worst = (loads.max(dim=1).values / loads.mean(dim=1)).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.mesh.group("world"))
        return worst.item()
