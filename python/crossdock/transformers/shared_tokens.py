"""Tokens that the ranks of a tensor-parallel group share: each rank sends a part of them, and gets the results of all parts.

`torch.ops.crossdock.take_part` and `join_parts`. Parts travel with a dispatcher of the group in which every rank is an expert
that all tokens choose, so its rows are the parts of all ranks, in order. So a dead rank is named on any device, and a GPU is not
waited for, as the number of rows is known.
"""
import itertools
import weakref
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist

import crossdock
from crossdock.torch import calls, group
from crossdock.torch.groups import lock_of
from crossdock.torch.registration import define
from crossdock.torch.tensors import view_of

from .dispatchers import dispatcher_of
from .local_dispatch import row_limit

_SAMPLED = 64  # values of the tokens that are compared
_DIFFERENT = 0.1  # relative norm; ranks may round differently

_keys = itertools.count(1)
_known: "weakref.WeakValueDictionary[int, SharedTokens]" = weakref.WeakValueDictionary()


class SharedTokens:
    """Of one experts module. Collective over the ranks of `process_group`, as are all calls."""

    def __init__(self, process_group: Any, group_options: Dict[str, Any]):
        self.group = group(process_group, **group_options)
        self.ranks = dist.get_process_group_ranks(process_group)
        self.were_compared = False
        self.key = next(_keys)
        _known[self.key] = self

    def bounds(self, num_tokens: Any) -> Tuple[Any, Any]:
        """The first token of this rank's part, and the one after its last. May be symbols."""
        length = (num_tokens + self.group.size - 1) // self.group.size
        first, last = (torch.sym_min(rank * length, num_tokens) for rank in (self.group.rank, self.group.rank + 1))
        return first, last

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        first, last = self.bounds(whole.shape[0])
        return whole[first:last]

    def compare(self, whole: torch.Tensor) -> None:
        """Raises an error on all ranks if the tokens differ. Values on a GPU are compared in the first call only, which waits for
        the GPU; the number of tokens is compared in every call, unless it is captured."""
        if whole.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        told = torch.zeros((self.group.size, 1 + _SAMPLED), dtype=torch.float64)
        told[self.group.rank, 0] = whole.shape[0]
        if whole.numel() > 0 and not (whole.is_cuda and self.were_compared):
            flat = whole.detach().reshape(-1)
            chosen = torch.arange(_SAMPLED, device=whole.device) * flat.shape[0] // _SAMPLED
            told[self.group.rank, 1:] = flat[chosen].cpu()
        self.were_compared = True
        with lock_of(self.group):
            self.group.all_reduce(view_of(told))
        _check_equal(told)

    def join(self, part: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """part -> whole [T, ...]"""
        size = self.group.size
        max_rows = row_limit(num_tokens) if part.is_cuda else None
        dispatcher = dispatcher_of(self.group, num_experts=size, top_k=size, width=part.shape[1], max_rows=max_rows)
        everyone = torch.arange(size, device=part.device).expand(part.shape[0], size).contiguous()
        weights = torch.ones((part.shape[0], size), device=part.device)
        return calls.dispatch(part, everyone, weights, dispatcher, False)[0][:num_tokens]


def _check_equal(told: torch.Tensor) -> None:
    first: List[float] = told[0].tolist()
    for rank, other in enumerate(told):
        here = f"rank {rank} of the ranks that share tokens (tensor parallelism)"
        if other[0] != first[0]:
            what = f"{here} has {int(other[0])} tokens, rank 0 has {int(first[0])}; they must have the same tokens"
        elif (other[1:] - told[0, 1:]).norm() > _DIFFERENT * told[0, 1:].norm():
            what = f"{here} has other tokens than rank 0; they must have the same tokens"
        else:
            continue
        raise crossdock.Error(what, crossdock.ErrorCode.MISMATCH, rank, "take_part")


def _tokens_of(key: int) -> SharedTokens:
    found = _known.get(key)
    if found is None:
        raise RuntimeError("the experts module that these tokens belong to no longer exists")
    return found


def _call(tokens: SharedTokens, function: Callable, *inputs: Any) -> Any:
    """Ranks in errors are those of the group; says which ranks of the job these are."""
    try:
        return function(*inputs)
    except crossdock.Error as error:
        text = f"{error} (ranks {tokens.ranks} of the job share tokens)"
        raise crossdock.Error(text, error.code, error.culprit, error.operation, error.sequence) from error


# ---- Operators ----


def _take_part(x: torch.Tensor, weights: torch.Tensor, key: int) -> Tuple[torch.Tensor, torch.Tensor]:
    tokens = _tokens_of(key)
    _call(tokens, tokens.compare, x)
    return tokens.take(x).clone(), tokens.take(weights).clone()


def _fake_take_part(x, weights, key):
    first, last = _tokens_of(key).bounds(x.shape[0])
    return x.new_empty((last - first, *x.shape[1:])), weights.new_empty((last - first, *weights.shape[1:]))


def _save_take_part(ctx: Any, inputs: Tuple, output: Any) -> None:
    ctx.num_tokens, ctx.tokens = inputs[0].shape[0], _tokens_of(inputs[2])


def _grad_take_part(ctx: Any, grad_x: torch.Tensor, grad_weights: torch.Tensor) -> Tuple:
    """The gradients are complete, and the same on all ranks that share the tokens."""
    wanted = zip((grad_x, grad_weights), ctx.needs_input_grad)
    return (*(join_parts(grad, ctx.num_tokens, ctx.tokens.key) if needed else None for grad, needed in wanted), None)


def _join_parts(part: torch.Tensor, num_tokens: int, key: int) -> torch.Tensor:
    tokens = _tokens_of(key)
    return _call(tokens, tokens.join, part, num_tokens)


def _save_join_parts(ctx: Any, inputs: Tuple, output: Any) -> None:
    ctx.tokens = _tokens_of(inputs[2])


def _grad_join_parts(ctx: Any, grad: torch.Tensor) -> Tuple:
    """The gradient of the whole is the same on all ranks that share the tokens."""
    return ctx.tokens.take(grad).clone(), None, None


take_part = define(
    "take_part",
    "(Tensor x, Tensor weights, int tokens) -> (Tensor, Tensor)",
    _take_part,
    _fake_take_part,
    _save_take_part,
    _grad_take_part,
)
join_parts = define(
    "join_parts",
    "(Tensor part, SymInt num_tokens, int tokens) -> Tensor",
    _join_parts,
    lambda part, num_tokens, key: part.new_empty((num_tokens, *part.shape[1:])),
    _save_join_parts,
    _grad_join_parts,
)
