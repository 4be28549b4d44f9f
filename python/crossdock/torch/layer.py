"""A mixture-of-experts layer: router, dispatch, experts, combine."""
from typing import Any, Optional

import torch
from torch import nn

from .dispatcher import Dispatcher
from .experts import GroupedExperts, library_computes
from .library_layer import moe_layer
from .registration import HAS_OPERATORS, is_transformed, transform_error
from .tensors import weights_dtype


MOST_EXPERTS, MOST_ROUTES = 1024, 32  # limits of the library's router on a GPU


def _is_unchanged(module: nn.Module, kind: type) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(module) is kind and not any(getattr(module, name, None) for name in hooks)


def is_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's kind of device."""
    kind = tensor.device.type
    if HAS_OPERATORS:
        return torch.is_autocast_enabled(kind)
    return torch.is_autocast_enabled() if kind == "cuda" else torch.is_autocast_cpu_enabled()


def best_experts(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """scores [T, E] in [0, 1] or NaN -> expert ids [T, K], best first. As in the library's router, NaN is worse than any
    number, and equal scores go to the lower id.

    In fp32 on the CPU a topk of distinct keys decides as a stable sort does, in a fifth to two thirds of the time.
    Non-negative fp64 values order like their bit patterns, and the low 29 bits of a converted fp32 value are zero, so
    they can hold the id. NaN becomes -1, whose bit pattern is a negative integer.
    """
    last = scores.shape[-1] - 1
    scores = scores.nan_to_num(nan=-1.0)
    if scores.dtype != torch.float32 or not scores.is_cpu:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    keys = scores.double().view(torch.int64) | torch.arange(last, -1, -1, device=scores.device)
    return keys.topk(min(top_k, last + 1), dim=-1).indices


class MoELayer(nn.Module):
    """x [..., D] -> [..., D]: the tokens of all ranks of a group through the experts of all ranks.

    `expert_parameters()` belong to this rank alone: keep them out of reductions over the group (DDP:
    `torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`; FSDP2: shard them over the
    ranks that have the same experts, or not at all). `router` is replicated.

    On a GPU, tokens in bf16 or fp16 go through the library's own layer, as one operator (`torch.ops.crossdock.moe_layer`):
    it computes logits in fp32 and, with `max_rows`, waits for nothing. With modules that you changed (`route`
    overridden, hooks or parametrizations on `router` or `experts`, your own experts), autocast, or `normalise` with
    top_k=1, the same steps run one by one.

    Args:
        group: as for `Dispatcher`.
        num_experts, top_k, width: E, K and D.
        inner: F, the inner width of an expert.
        score: "softmax" over all experts, or "sigmoid".
        normalise: divide the weights of a token by their sum.
        scale: factor on the weights.
        experts: your own experts, called with (rows [R, D], tokens_per_expert [E_local]), instead of GroupedExperts.
        options: options of `Dispatcher`, for example `alignment` or `max_rows`.
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
        self.width = width
        self.score = score
        self.normalise = normalise
        self.scale = scale
        self.dispatcher = Dispatcher(group, num_experts=num_experts, top_k=top_k, width=width, **options)
        self.router = nn.Linear(width, num_experts, bias=False, device=device, dtype=dtype)
        if experts is None:
            own = self.dispatcher.local_experts
            numbers = {} if self.dispatcher.group.size == 1 else {"expert_ids": own, "num_experts": num_experts}
            experts = GroupedExperts(len(own), width, inner, **numbers, device=device, dtype=dtype)
        self.experts = experts

    def expert_parameters(self) -> list:
        """The parameters of this rank's experts."""
        return list(self.experts.parameters())

    def _is_own_route(self) -> bool:
        return type(self).route is MoELayer.route and "route" not in self.__dict__

    def _is_one_operator(self, tokens: torch.Tensor) -> bool:
        """Whether the library's layer computes the same as this module."""
        if not tokens.is_cuda or is_autocast(tokens):
            return False
        if not self._is_own_route() or (self.normalise and self.top_k == 1):
            return False
        if not (_is_unchanged(self.router, nn.Linear) and _is_unchanged(self.experts, GroupedExperts)):
            return False
        if self.router.bias is not None or self.router.out_features > MOST_EXPERTS or self.top_k > MOST_ROUTES:
            return False
        w1, w2 = self.experts.w1, self.experts.w2
        same = self.router.weight.dtype == w1.dtype == w2.dtype == tokens.dtype
        return same and library_computes(tokens, self.router.weight, w1, w2)

    def route(self, x: torch.Tensor) -> tuple:
        """x [T, D] -> expert_ids [T, K] and weights [T, K], fp32 (fp64 for fp64 tokens). Equal scores go to the lower
        expert id, and NaN is worse than any number."""
        logits = self.router(x)
        logits = logits.to(weights_dtype(logits.dtype))
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        expert_ids = best_experts(scores.detach(), self.top_k)
        weights = scores.gather(-1, expert_ids)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return expert_ids, weights * self.scale

    def _check_kind(self, x: torch.Tensor) -> None:
        """Refuses tokens that the router cannot multiply, on every rank: the others would wait in dispatch."""
        weight = getattr(self.router, "weight", None)
        if not isinstance(weight, torch.Tensor) or (x.dtype == weight.dtype and x.device == weight.device):
            return
        if not self._is_own_route() or not _is_unchanged(self.router, nn.Linear):
            return  # they may convert x
        if x.device == weight.device and x.is_floating_point() and x.dtype != torch.float64 and is_autocast(x):
            return
        wanted, given = (f"{tensor.dtype} on {tensor.device}" for tensor in (weight, x))
        error = f"x must have the dtype and device of the layer, {wanted}, got {given}; convert x or the layer, or use autocast"
        self.dispatcher._open().refuse(TypeError(error))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or x.shape[-1:] != (self.width,):
            found = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            self.dispatcher._open().refuse(TypeError(f"x must be a tensor [..., {self.width}], got {found}"))
        if is_transformed((x,)):  # routing cannot be
            self.dispatcher._open().refuse(transform_error())
        self._check_kind(x)
        tokens = x.reshape(-1, x.shape[-1])
        if self._is_one_operator(tokens):
            parameters = (self.router.weight, self.experts.w1, self.experts.w2)
            options = (self.dispatcher._key, self.score, self.normalise, self.scale)
            return moe_layer(tokens, *parameters, *options, torch.is_grad_enabled())[0].reshape(x.shape)
        expert_ids, weights = self.route(tokens)
        sent = self.dispatcher.dispatch(tokens, expert_ids, weights, row_weights=False)
        y = self.experts(sent.rows, sent.tokens_per_expert)
        return self.dispatcher.combine(y, sent.handle).to(x.dtype).reshape(x.shape)
