"""Chooses the experts of every token, and keeps their load balanced."""
from typing import NamedTuple

import torch
import torch.nn.functional as functional

from collectives import sum_over
from mesh import Mesh
from parameters import Parts
from presets import ModelConfig
from shards import Shard


class Routed(NamedTuple):
    expert_ids: torch.Tensor  # [T, K]
    weights: torch.Tensor  # [T, K]
    loss: torch.Tensor  # this rank's part; the parts of all ranks of the stage sum to the loss


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest values of each row; among equals, the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class Router(Parts):
    def __init__(self, config: ModelConfig, mesh: Mesh):
        super().__init__()
        self.config, self.mesh = config, mesh
        self.add_part("weight", (config.experts, config.width), scale=config.width**-0.5)
        if config.router_bias:
            self.add_part("bias", (config.experts,))
        self.register_buffer("selection_bias", torch.zeros(config.experts))
        self.step_load = torch.zeros(config.experts, dtype=torch.int64)  # routes of all ranks since the last step
        if config.idle_expert is not None:
            self.selection_bias[config.idle_expert] = -1e6

    def forward(self, x: torch.Tensor, shard: Shard) -> Routed:
        logits = functional.linear(x, self.weight, self.bias if self.config.router_bias else None)
        logits = logits if x.dtype == torch.float64 else logits.float()
        scores = logits.sigmoid() if self.config.score == "sigmoid" else logits.softmax(dim=-1)
        expert_ids = self._choose(logits if self.config.score == "softmax_of_chosen" else scores)
        load = torch.bincount(expert_ids.flatten(), minlength=self.config.experts)
        sum_over(load, self.mesh.group("tokens"))
        self.step_load += load
        loss = self._losses(logits, scores, load, shard)
        return Routed(expert_ids, self._weights(logits, scores, expert_ids), loss)

    def update_bias(self) -> None:
        """After a step, makes experts with less than the mean load easier to choose."""
        if self.config.bias_rate:
            load = self.step_load.double()
            self.selection_bias += self.config.bias_rate * torch.sign(load.mean() - load).to(self.selection_bias.dtype)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, K], by biased scores, from the best groups."""
        biased = scores.detach() + self.selection_bias
        groups, kept = self.config.groups, self.config.top_groups
        if groups > 1:
            by_group = biased.unflatten(1, (groups, -1))
            summed = max(1, self.config.top_k // kept)
            best = largest(by_group.sort(dim=-1, descending=True).values[..., :summed].sum(dim=-1), kept)
            allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, True)
            biased = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return largest(biased, self.config.top_k)

    def _weights(self, logits: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        if self.config.score == "softmax_of_chosen":
            return logits.gather(1, expert_ids).softmax(dim=-1) * self.config.weight_scale
        weights = scores.gather(1, expert_ids)
        if self.config.normalise_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.config.weight_scale

    def _losses(self, logits: torch.Tensor, scores: torch.Tensor, load: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Load and tokens are those of all ranks of the stage; scores are this rank's."""
        config, tokens = self.config, max(1, shard.micro_batch_tokens)
        if config.score == "sigmoid":
            scores = scores / scores.sum(dim=-1, keepdim=True)
        factor = config.balance_loss * config.experts / (config.top_k * tokens**2)
        loss = factor * (scores.sum(dim=0) * load).sum()
        return loss + config.z_loss / tokens * logits.logsumexp(dim=-1).square().sum()
