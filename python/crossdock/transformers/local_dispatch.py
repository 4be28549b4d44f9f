"""Grouping the rows of one rank's experts: `torch.ops.crossdock.dispatch_here`.

As `crossdock.torch.ops.dispatch`, with a dispatcher of this rank alone that is found when the call runs: its row limit depends
on T, which compilers do not know.
"""
from typing import Any, Optional, Tuple

import torch

from crossdock.torch import ops
from crossdock.torch.groups import group_of_one
from crossdock.torch.registration import define

from .dispatchers import dispatcher_of

Results = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # rows, their weights, rows per expert, plan


def row_limit(num_routes: int) -> int:
    """T * K, rounded up to one of eight sizes per power of two, so that few dispatchers are made."""
    step = 1 << max(num_routes.bit_length() - 4, 0)
    return max(-(-num_routes // step) * step, 1)


def _dispatcher_of(x: torch.Tensor, routing: torch.Tensor, num_experts: int) -> int:
    """On a GPU a row limit spares the wait for the number of rows."""
    sizes = dict(num_experts=num_experts, top_k=routing.shape[1], width=x.shape[1])
    max_rows: Optional[int] = row_limit(routing.numel()) if routing.is_cuda else None
    return dispatcher_of(group_of_one(), max_rows=max_rows, **sizes)


def _operator(*inputs: Any) -> Results:
    x, routing, weights, num_experts, with_row_weights = inputs
    return ops._dispatch_operator(x, routing, weights, _dispatcher_of(x, routing, num_experts), with_row_weights)


def _eager(*inputs: Any) -> Results:
    x, routing, weights, num_experts, with_row_weights = inputs
    return ops.dispatch(x, routing, weights, _dispatcher_of(x, routing, num_experts), with_row_weights)


def _fake(x, routing, weights, num_experts, with_row_weights):
    num_routes = routing.numel()
    is_known = routing.is_cuda and isinstance(num_routes, int)
    num_rows = row_limit(num_routes) if is_known else torch.library.get_ctx().new_dynamic_size()
    row_weights = weights.new_empty((num_rows if with_row_weights else 0,))
    counts = routing.new_empty((num_experts,), dtype=torch.int64)
    return x.new_empty((num_rows, x.shape[1])), row_weights, counts, torch.empty((1,), dtype=torch.int64, device="cpu")


dispatch_here = define(
    "dispatch_here",
    "(Tensor x, Tensor routing, Tensor weights, int num_experts, bool with_row_weights) -> (Tensor, Tensor, Tensor, Tensor)",
    _operator,
    _fake,
    ops._save_dispatch,
    ops._grad_dispatch,
    eager=_eager,
)
