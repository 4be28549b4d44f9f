"""A mixture-of-experts layer: router, dispatch, experts, combine."""
import math
from typing import Any, Optional

import torch
import torch.nn.functional as functional
from torch import nn

from .dispatcher import Dispatcher


class GroupedExperts(nn.Module):
    """The experts of one rank: SwiGLU networks over rows that are grouped by expert.

    w1 [E_local, 2F, D] has the gate's rows, then the linear ones; w2 is [E_local, D, F]. Every expert takes part in
    the graph, so experts without rows get zero gradients.
    """

    def __init__(self, num_local_experts: int, width: int, inner: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.w1 = nn.Parameter(torch.empty((num_local_experts, 2 * inner, width), **options))
        self.w2 = nn.Parameter(torch.empty((num_local_experts, width, inner), **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.w1.uniform_(-1, 1).div_(math.sqrt(self.w1.shape[2]))
            self.w2.uniform_(-1, 1).div_(math.sqrt(self.w2.shape[2]))

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """rows [R, D], grouped by expert -> y [R, D]."""
        if _has_grouped_product(rows, self.w2.shape[2]):
            ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
            gate, linear = torch._grouped_mm(rows, self.w1.to(rows.dtype).transpose(1, 2), offs=ends).chunk(2, dim=1)
            inner = functional.silu(gate) * linear
            return torch._grouped_mm(inner, self.w2.to(rows.dtype).transpose(1, 2), offs=ends)
        counts = tokens_per_expert.tolist()
        unused = rows.shape[0] - sum(counts)  # with max_rows on a GPU
        segments = rows.split(counts + [unused])
        w1, w2 = self.w1.to(rows.dtype), self.w2.to(rows.dtype)
        y = [_swiglu(segment, w1[e], w2[e]) for e, segment in enumerate(segments[:-1])]
        return torch.cat(y + [torch.zeros_like(segments[-1])])


def _swiglu(rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, linear = (rows @ w1.t()).chunk(2, dim=1)
    return (functional.silu(gate) * linear) @ w2.t()


def _has_grouped_product(rows: torch.Tensor, inner: int) -> bool:
    """Whether torch._grouped_mm is there for these rows: bf16, and rows of matrices in multiples of 16 bytes."""
    if not hasattr(torch, "_grouped_mm") or rows.dtype != torch.bfloat16 or rows.shape[1] % 8 or inner % 8:
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] >= 9


class MoELayer(nn.Module):
    """x [..., D] -> [..., D]: the tokens of all ranks of a group through the experts of all ranks.

    `expert_parameters()` belong to this rank alone: keep them out of reductions over the group (DDP:
    `torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`; FSDP2: shard them over the
    ranks that have the same experts, or not at all). `router` is replicated.

    Args:
        group: as for `Dispatcher`.
        num_experts, top_k, width: E, K and D.
        inner: F, the inner width of an expert.
        score: "softmax" over all experts, or "sigmoid".
        normalise: divide the weights of a token by their sum.
        scale: factor of the weights.
        experts: your own experts, called with (rows [R, D], tokens_per_expert [E_local]), instead of GroupedExperts.
        options: of `Dispatcher`, for example `alignment` or `max_rows`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        top_k: int,
        width: int,
        inner: Optional[int] = None,
        score: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        experts: Optional[nn.Module] = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ):
        super().__init__()
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f'score must be "softmax" or "sigmoid", not {score!r}')
        if (experts is None) == (inner is None):
            raise ValueError("pass either inner, the inner width of the experts, or experts of your own")
        self.top_k = top_k
        self.score = score
        self.normalise = normalise
        self.scale = scale
        self.dispatcher = Dispatcher(group, num_experts=num_experts, top_k=top_k, width=width, **options)
        self.router = nn.Linear(width, num_experts, bias=False, device=device, dtype=dtype)
        if experts is None:
            num_local_experts = self.dispatcher.num_local_experts
            experts = GroupedExperts(num_local_experts, width, inner, device=device, dtype=dtype)
        self.experts = experts

    def expert_parameters(self) -> list:
        """The parameters of this rank's experts."""
        return list(self.experts.parameters())

    def route(self, x: torch.Tensor) -> tuple:
        """x [T, D] -> expert_ids [T, K] and weights [T, K], fp32."""
        logits = self.router(x).float()
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        weights, expert_ids = scores.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return expert_ids, weights * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        expert_ids, weights = self.route(tokens)
        sent = self.dispatcher.dispatch(tokens, expert_ids, weights, row_weights=False)
        y = self.experts(sent.rows, sent.tokens_per_expert)
        return self.dispatcher.combine(y, sent.handle).to(x.dtype).reshape(x.shape)
