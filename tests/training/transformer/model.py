"""A small transformer with mixture-of-experts layers; a pipeline stage has some of its blocks."""
from typing import Any, List, Tuple

import torch
import torch.nn.functional as functional
from torch import nn

from attention import Attention, Norm
from experts import Experts, activate, virtual_routes
from mesh import Mesh
from parameters import Parts, initialise
from presets import VOCABULARY, ModelConfig
from router import Router
from shards import Shard, even_part


class SharedExpert(Parts):
    """Sees every token, in addition to the experts that the router chooses."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        for name in ("gate", "linear"):
            self.add_part(name, (config.shared_inner, config.width), scale=config.width**-0.5)
        self.add_part("out", (config.width, config.shared_inner), scale=config.shared_inner**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return activate(x @ self.gate.t(), x @ self.linear.t(), "swiglu") @ self.out.t()


class MixtureOfExperts(nn.Module):
    """x [T, D] -> [T, D], and the losses of the router. T may differ between ranks and be 0; all make the same calls."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dispatcher: Any):
        super().__init__()
        self.dispatcher, self.etp = dispatcher, mesh.shape.etp
        self.router = Router(config, mesh)
        self.experts = Experts(config, mesh)
        self.shared = SharedExpert(config) if config.shared_inner else None
        self.step_routes = 0  # of this rank's tokens since the last step
        self.step_rows = 0  # that arrived here; fewer on all ranks than routes if some were dropped

    def forward(self, x: torch.Tensor, shard: Shard) -> Tuple[torch.Tensor, torch.Tensor]:
        routed = self.router(x, shard)
        # A route to an expert is a route to each of its etp parts; combine sums their results.
        expert_ids = virtual_routes(routed.expert_ids, self.etp)
        weights = routed.weights.repeat_interleave(self.etp, dim=1)
        sent = self.dispatcher.dispatch(x, expert_ids, weights, row_weights=False)
        self.step_routes += expert_ids.numel()
        self.step_rows += sent.rows.shape[0]
        out = self.dispatcher.combine(self.experts(sent.rows, sent.tokens_per_expert), sent.handle)
        return out + self.shared(x) if self.shared else out, routed.loss

    def finish_step(self) -> None:
        self.router.update_bias()
        self.router.step_load.zero_()
        self.step_routes = self.step_rows = 0


class Block(nn.Module):
    def __init__(self, config: ModelConfig, mesh: Mesh, dispatcher: Any):
        super().__init__()
        self.attention_norm, self.attention = Norm(config.width), Attention(config, mesh)
        self.moe_norm, self.moe = Norm(config.width), MixtureOfExperts(config, mesh, dispatcher)

    def forward(self, x: torch.Tensor, shard: Shard) -> Tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x), shard)
        y, loss = self.moe(self.moe_norm(x), shard)
        return x + y, loss


class Embedding(Parts):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.add_part("weight", (VOCABULARY, config.width), scale=1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight)


class Head(Parts):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = Norm(config.width)
        self.add_part("weight", (VOCABULARY, config.width), scale=config.width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(x), self.weight)


class Stage(nn.Module):
    """The blocks of a pipeline stage. The first stage takes tokens, the last returns the sum of the tokens' losses."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dispatcher: Any):
        super().__init__()
        if config.layers < mesh.shape.pp:
            raise ValueError(f"layers ({config.layers}) must be at least pp ({mesh.shape.pp})")
        self.embedding = Embedding(config) if mesh.is_first_stage else None
        mine = even_part(config.layers, mesh.shape.pp, mesh.at["pp"])
        self.blocks = nn.ModuleDict({str(index): Block(config, mesh, dispatcher) for index in mine})
        self.head = Head(config) if mesh.is_last_stage else None

    def forward(self, x: torch.Tensor, shard: Shard) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns activations [T, D], or the loss from the last stage, and the routers' losses. Every rank has a part of
        each loss; they are sums over ranks."""
        if self.embedding is not None:
            x = self.embedding(x)
        losses: List[torch.Tensor] = []
        for block in self.blocks.values():
            x, loss = block(x, shard)
            losses.append(loss)
        if self.head is not None:
            x = functional.cross_entropy(self.head(x), shard.targets, reduction="sum")
        return x, torch.stack(losses).sum()

    def layers(self) -> List[MixtureOfExperts]:
        return [block.moe for block in self.blocks.values()]


def make_stage(config: ModelConfig, mesh: Mesh, dispatcher: Any, *, seed: int, dtype: torch.dtype) -> Stage:
    stage = Stage(config, mesh, dispatcher).to(dtype)
    initialise(stage, seed)
    return stage
