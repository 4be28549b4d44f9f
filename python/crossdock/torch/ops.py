"""The calls as differentiable operators: `torch.ops.crossdock.dispatch` and so on."""
from typing import Any, Callable, Optional, Set, Tuple

import torch
from torch.autograd import forward_ad

from crossdock._library import lib

from . import calls
from .core import core_of
from .registration import HAS_OPERATORS, apply_of, define, eager_function, is_observed, refuse_gradient, save_nothing
from .tensors import weights_dtype

# T tokens, K slots, E experts, R rows, D width. `routing` is [T, K] ids or a [T, E] map; `weights` has its shape.
_SCHEMAS = {
    "dispatch": "(Tensor x, Tensor routing, Tensor weights, int dispatcher, bool with_row_weights)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "dispatch_backward": "(Tensor grad_rows, Tensor plan, SymInt num_tokens) -> Tensor",
    "combine": "(Tensor y, Tensor weights, Tensor routing, Tensor plan) -> Tensor",
    "combine_unweighted": "(Tensor y, Tensor plan, SymInt num_tokens) -> Tensor",
    "combine_backward": "(Tensor grad_out, Tensor y, Tensor routing, Tensor plan) -> (Tensor, Tensor)",
    "combine_unweighted_backward": "(Tensor grad_out, Tensor plan, SymInt num_rows) -> Tensor",
    "collect_routes": "(Tensor values, Tensor routing, Tensor plan) -> Tensor",
}


# ---- Shapes ----


def _fake_dispatch(x, routing, weights, dispatcher, with_row_weights):
    core = core_of(dispatcher)
    if core.max_rows and x.is_cuda:
        num_rows = core.max_rows
    else:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    rows = x.new_empty((num_rows, x.shape[1]))
    row_weights = weights.new_empty((num_rows if with_row_weights else 0,))
    rows_per_expert = routing.new_empty((core.num_local_experts,), dtype=torch.int64)
    return rows, row_weights, rows_per_expert, torch.empty((1,), dtype=torch.int64, device="cpu")


def _fake_tokens(rows, plan, num_tokens):
    return rows.new_empty((num_tokens, rows.shape[1]))


def _fake_combine(y, weights, routing, plan):
    return y.new_empty((routing.shape[0], y.shape[1]))


def _fake_combine_backward(grad_out, y, routing, plan):
    return y.new_empty(y.shape), y.new_empty(routing.shape, dtype=weights_dtype(y.dtype))


def _fake_rows(grad_out, plan, num_rows):
    return grad_out.new_empty((num_rows, grad_out.shape[1]))


def _fake_collect_routes(values, routing, plan):
    return values.new_empty(routing.shape)


_FAKES = {
    "dispatch": _fake_dispatch,
    "dispatch_backward": _fake_tokens,
    "combine": _fake_combine,
    "combine_unweighted": _fake_tokens,
    "combine_backward": _fake_combine_backward,
    "combine_unweighted_backward": _fake_rows,
    "collect_routes": _fake_collect_routes,
}


# ---- Gradients ----


# The plan in the results of a dispatch owns the routes, but hooks may replace a saved tensor with a copy
# (torch.autograd.graph.save_on_cpu). So the graph owns the plan itself.


def _is_plain(grad: torch.Tensor) -> bool:
    """Whether nothing observes the operators of backward or requests their gradients, which are refused."""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return False
    return not (HAS_OPERATORS and is_observed(grad))


def _save_dispatch(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    x, routing, weights, _, with_row_weights = inputs
    rows, _, _, plan = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(routing, plan)
    ctx.like = (x.shape[0], rows.shape, x.dtype, weights.dtype if with_row_weights else None)
    ctx.plan = plan


def _grad_dispatch(ctx: Any, grad_rows, grad_row_weights, *_) -> Tuple:
    routing, plan = ctx.saved_tensors
    num_tokens, shape, tokens_dtype, dtype = ctx.like
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        # Rows that are unused on this rank may be used on others: all ranks make this call.
        if grad_rows is None:
            grad_rows = torch.zeros(shape, dtype=tokens_dtype, device=grad_row_weights.device)
        grad_x = dispatch_backward(grad_rows, plan, num_tokens)
    if dtype is not None and ctx.needs_input_grad[2] and grad_row_weights is not None:
        values = grad_row_weights.to(weights_dtype(tokens_dtype))
        grad_weights = collect_routes(values, routing, plan).to(dtype)
    return grad_x, None, grad_weights, None, None


def _save_combine(ctx: Any, inputs: Tuple, output: torch.Tensor) -> None:
    y, weights, routing, plan = inputs
    ctx.save_for_backward(y, routing, plan)
    ctx.weights_dtype = weights.dtype
    ctx.plan = plan


def _grad_combine(ctx: Any, grad_out: torch.Tensor) -> Tuple:
    return _grad_combined(ctx, grad_out, *ctx.saved_tensors)


def _grad_combined(ctx: Any, grad_out: torch.Tensor, y: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor) -> Tuple:
    call = calls.combine_backward if _is_plain(grad_out) else combine_backward
    grad_y, grad_weights = call(grad_out, y, routing, plan)
    if grad_weights.dtype != ctx.weights_dtype:
        grad_weights = grad_weights.to(ctx.weights_dtype)
    return grad_y, grad_weights, None, None


def _save_combine_unweighted(ctx: Any, inputs: Tuple, output: torch.Tensor) -> None:
    y, plan, _ = inputs
    ctx.save_for_backward(plan)
    ctx.num_rows = y.shape[0]
    ctx.plan = plan


def _grad_combine_unweighted(ctx: Any, grad_out: torch.Tensor) -> Tuple:
    (plan,) = ctx.saved_tensors
    return combine_unweighted_backward(grad_out, plan, ctx.num_rows), None, None


_GRADIENTS = {
    "dispatch": (_save_dispatch, _grad_dispatch),
    "combine": (_save_combine, _grad_combine),
    "combine_unweighted": (_save_combine_unweighted, _grad_combine_unweighted),
    "dispatch_backward": (save_nothing, refuse_gradient),
    "combine_backward": (save_nothing, refuse_gradient),
    "combine_unweighted_backward": (save_nothing, refuse_gradient),
    "collect_routes": (save_nothing, refuse_gradient),
}


# ---- Eager calls ----
#
# Cheaper than functions made of `save` and the gradient: only tensors that have gradients pass through autograd, and the
# graph saves fewer of them.


class _SendRows(torch.autograd.Function):
    """A dispatch without row weights. `call` is a list: the other arguments, and then the results."""

    @staticmethod
    def forward(ctx, x, call):
        call[:] = calls.dispatch(x, *call, False)
        ctx.plan = call[3]
        return call[0]

    @staticmethod
    def backward(ctx, grad_rows):
        plan = ctx.plan
        if _is_plain(grad_rows):
            return calls.dispatch_backward(grad_rows, plan, 0), None
        return dispatch_backward(grad_rows, plan, calls.routes_of(plan).num_tokens), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, routing, plan):
        ctx.plan, ctx.weights_dtype = plan, weights.dtype
        ctx.save_for_backward(y, routing)
        return calls.combine(y, weights, routing, plan)

    @staticmethod
    def backward(ctx, grad_out):
        return _grad_combined(ctx, grad_out, *ctx.saved_tensors, ctx.plan)


_send_rows = apply_of(_SendRows)
_combine = apply_of(_Combine)
_dispatch = eager_function("dispatch", calls.dispatch, *_GRADIENTS["dispatch"])


def _eager_dispatch(x, routing, weights, dispatcher, with_row_weights):
    if with_row_weights or not torch.is_grad_enabled():
        return _dispatch(x, routing, weights, dispatcher, with_row_weights)
    call = [routing, weights, dispatcher]
    rows = _send_rows(x, call)
    return (rows, *call[1:])


def _eager_combine(y, weights, routing, plan):
    call = _combine if torch.is_grad_enabled() else calls.combine
    return call(y, weights, routing, plan)


# Results of calls that are no operators, from lists: `arrived` takes those of `calls.dispatch`, `combined` [out].
arrived = eager_function("arrived", lambda x, routing, weights, made, _: tuple(made), *_GRADIENTS["dispatch"])
combined = eager_function(
    "combined",
    lambda y, weights, routing, plan, made: made[0],
    lambda ctx, inputs, output: _save_combine(ctx, inputs[:4], output),
    lambda ctx, grad_out: (*_grad_combine(ctx, grad_out), None),
)


# ---- Operators ----


def _dispatch_operator(x, routing, weights, dispatcher, with_row_weights):
    """Operators return tensors only."""
    rows, row_weights, counts, plan = calls.dispatch(x, routing, weights, dispatcher, with_row_weights)
    return rows, weights.new_empty(0) if row_weights is None else row_weights, counts, plan


def _refusal(name: str) -> Callable:
    """Makes the call that the other ranks make, which raises the error on all of them."""
    function = getattr(lib, {"combine_unweighted_backward": "dispatch"}.get(name, name))
    arguments = _SCHEMAS[name].split(" -> ")[0].strip("()").split(", ")

    def refuse(error: Exception, inputs: Tuple) -> None:
        if name == "dispatch":
            core_of(inputs[arguments.index("int dispatcher")]).refuse(error)
        routes = calls.routes_of(inputs[arguments.index("Tensor plan")])
        routes.core.refuse(error, function, routes._handle)

    return refuse


def _define(name: str, operator_call: Optional[Callable] = None, eager: Optional[Callable] = None) -> Callable:
    call, fake, gradient = getattr(calls, name), _FAKES[name], _GRADIENTS[name]
    return define(name, _SCHEMAS[name], call, fake, *gradient, operator_call, eager, _refusal(name))


dispatch = _define("dispatch", _dispatch_operator, _eager_dispatch)
dispatch_backward = _define("dispatch_backward")
combine = _define("combine", eager=_eager_combine)
combine_unweighted = _define("combine_unweighted")
combine_backward = _define("combine_backward")
combine_unweighted_backward = _define("combine_unweighted_backward")
collect_routes = _define("collect_routes")


def save_ops() -> "Set[torch._ops.OpOverload]":
    """The operators whose results selective checkpointing should save instead of communicating again."""
    if not HAS_OPERATORS:
        return set()
    names = ("dispatch", "dispatch_fp8", "combine", "combine_unweighted", "whole_layer", "sum_over_group")
    return {getattr(torch.ops.crossdock, name).default for name in names}
