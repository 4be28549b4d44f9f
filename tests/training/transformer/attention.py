"""Causal attention over packed sequences, with tensor, sequence and context parallelism."""
import math

import torch
import torch.nn.functional as functional

from collectives import gather, reduce_scatter
from mesh import Mesh
from parameters import TENSOR, Parts
from presets import ModelConfig
from shards import Shard


class Norm(Parts):
    """RMS norm over the last dimension."""

    def __init__(self, width: int):
        super().__init__()
        self.add_part("weight", (width,), scale=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """x [T, heads, head_width]: rotary positions, halves rotated against each other."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions[:, None, None] * frequencies).to(x.dtype)
    cosine, sine = angles.cos(), angles.sin()
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Attention(Parts):
    """x [T, D] -> [T, D]. Inside, a tp rank has some of the heads for all tokens of its tp group; outside, only some of
    these tokens: tokens are gathered before, and partial results summed and scattered after. A cp rank gathers the keys
    and values of the other cp ranks.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh):
        super().__init__()
        self.config, self.mesh = config, mesh
        self.heads, self.key_heads = self._share(config.heads), self._share(config.key_heads)
        scale = 1 / math.sqrt(config.width)
        for name, heads in (("query", config.heads), ("key", config.key_heads), ("value", config.key_heads)):
            mine = {0: self._slice_of_heads(heads)}
            shape = (heads * config.head_width, config.width)
            self.add_part(name, shape, TENSOR, cuts=mine, scale=scale)
            if config.attention_bias:
                self.add_part(f"{name}_bias", shape[:1], TENSOR, cuts=mine)
        self.add_part(
            "out", (config.width, config.heads * config.head_width), TENSOR,
            cuts={1: self._slice_of_heads(config.heads)}, scale=scale,
        )
        if config.attention_bias:
            self.add_part("out_bias", (config.width,))
        if config.normalise_heads:
            self.query_norm, self.key_norm = Norm(config.head_width), Norm(config.head_width)

    def forward(self, x: torch.Tensor, shard: Shard) -> torch.Tensor:
        tp, cp = self.mesh.group("tp"), self.mesh.group("cp")
        x = gather(x, shard.tp_counts, tp)[shard.order]  # [T_cp, D]
        query, key, value = (self._project(x, name) for name in ("query", "key", "value"))
        if self.config.normalise_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query = rotate(query, shard.positions, self.config.rotary_base)
        key = rotate(key, shard.positions, self.config.rotary_base)
        key, value = gather(torch.stack([key, value], dim=1), shard.cp_counts, cp).unbind(1)
        y = self._attend(query, key, value, shard.visible) @ self.out.t()  # [T_cp, D], a sum over tp
        y = reduce_scatter(y[shard.places], shard.tp_counts, tp)
        return y + self.out_bias if self.config.attention_bias else y

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """[T_cp, heads of this rank, head_width]."""
        bias = getattr(self, f"{name}_bias") if self.config.attention_bias else None
        return functional.linear(x, getattr(self, name), bias).unflatten(1, (-1, self.config.head_width))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """One dense matrix for all sequences: simple, but only for short ones."""
        repeats = self.heads // self.key_heads
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(self.config.head_width)
        scores = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", scores, value).flatten(1)

    def _share(self, heads: int) -> int:
        tp = self.mesh.shape.tp
        if heads % tp:
            raise ValueError(f"heads and key heads ({heads}) must be a multiple of tp ({tp})")
        return heads // tp

    def _slice_of_heads(self, heads: int) -> range:
        size = self._share(heads) * self.config.head_width
        first = self.mesh.at["tp"] * size
        return range(first, first + size)
