"""The experts of a rank, cut over etp, and their dispatcher."""
import math
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as functional

import crossdock
import crossdock.torch
from mesh import Mesh, MeshShape
from parameters import EXPERT, Parts
from presets import ModelConfig
from shards import even_part


def placement(experts: int, shape: MeshShape) -> List[int]:
    """Rank in the etp·ep group of each virtual expert: expert e is e·etp ... e·etp + etp - 1, one per rank of etp."""
    found = []
    for owner in range(shape.ep):
        for _ in even_part(experts, shape.ep, owner):
            found += [owner * shape.etp + index for index in range(shape.etp)]
    return found


def connect(process_group: dist.ProcessGroup, ranks_per_node: int = 0) -> crossdock.Group:
    """The ranks that exchange rows; ranks_per_node > 0 simulates nodes."""
    if not ranks_per_node:
        return crossdock.torch.group(process_group)

    def exchange(blob: bytes) -> List[bytes]:
        blobs: List[Any] = [None] * process_group.size()
        dist.all_gather_object(blobs, blob, group=process_group)
        return blobs

    return crossdock.Group.from_all_gather(exchange, process_group.rank(), ranks_per_node=ranks_per_node)


def make_dispatcher(
    config: ModelConfig, mesh: Mesh, group: crossdock.Group, **options: Any
) -> crossdock.torch.Dispatcher:
    """For all layers of a model."""
    etp = mesh.shape.etp
    return crossdock.torch.Dispatcher(
        group,
        num_experts=config.experts * etp,
        top_k=config.top_k * etp,
        width=config.width,
        placement=placement(config.experts, mesh.shape),
        **options,
    )


def virtual_routes(ids: torch.Tensor, etp: int) -> torch.Tensor:
    """[T, K] experts -> [T, K·etp] virtual experts; -1, no route, stays."""
    spread = ids[..., None] * etp + torch.arange(etp, device=ids.device)
    return torch.where(ids[..., None] < 0, -1, spread).flatten(1)


def activate(gate: torch.Tensor, linear: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "swiglu":
        return functional.silu(gate) * linear
    gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


class Experts(Parts):
    """rows [R, D], grouped by expert -> y [R, D]; with etp, this rank's term of a sum."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        super().__init__()
        self.config = config
        shape, at = mesh.shape, mesh.at
        if config.inner % shape.etp:
            raise ValueError(f"inner ({config.inner}) must be a multiple of etp ({shape.etp})")
        mine = even_part(config.experts, shape.ep, at["ep"])
        size = config.inner // shape.etp
        inner = range(at["etp"] * size, (at["etp"] + 1) * size)
        wide, narrow = (config.experts, config.inner, config.width), (config.experts, config.width, config.inner)
        for name in ("gate", "linear"):
            self.add_part(name, wide, EXPERT, cuts={0: mine, 1: inner}, scale=1 / math.sqrt(config.width))
        self.add_part("out", narrow, EXPERT, cuts={0: mine, 2: inner}, scale=1 / math.sqrt(config.inner))
        if config.expert_bias_terms:
            for name in ("gate", "linear"):
                self.add_part(f"{name}_bias", wide[:2], EXPERT, cuts={0: mine, 1: inner})
            if at["etp"] == 0:  # enters the sum once
                self.add_part("out_bias", narrow[:2], EXPERT, cuts={0: mine})

    def forward(self, rows: torch.Tensor, rows_per_expert: torch.Tensor) -> torch.Tensor:
        counts = rows_per_expert.tolist()
        if not counts:  # a rank without experts; its parameters are empty, and part of the graph as on every rank
            return rows + sum(parameter.sum() for parameter in self.parameters())
        return torch.cat([self._expert(index, segment) for index, segment in enumerate(rows.split(counts))])

    def _expert(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Also runs without rows: an expert that nobody chose has a gradient of zeros."""
        bias: Dict[str, Optional[torch.Tensor]] = {
            name: getattr(self, name)[index] if name in self.parts else None
            for name in ("gate_bias", "linear_bias", "out_bias")
        }
        gate = functional.linear(rows, self.gate[index], bias["gate_bias"])
        linear = functional.linear(rows, self.linear[index], bias["linear_bias"])
        return functional.linear(activate(gate, linear, self.config.activation), self.out[index], bias["out_bias"])
