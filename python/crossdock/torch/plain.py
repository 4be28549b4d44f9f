"""The calls of dispatchers and layers in Python, for machines without the compiled module (native.py), which has the same functions."""
import ctypes
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

import crossdock
from crossdock._errors import check
from crossdock._library import lib

from . import kept
from .core import Core, core_of
from .tensors import by_map, contiguous, empty, gradient_memory, is_captured, rows_on_device, stream_of, usable_weights, view_of, weights_dtype


class Routes(NamedTuple):
    """A plan with its dispatcher."""

    core: Core
    plan: crossdock.Plan

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens

    @property
    def _handle(self) -> Optional[int]:
        return self.plan._handle


def routes_of(plan: torch.Tensor) -> Routes:
    routes = kept.owned_by(plan)
    if routes is None:
        raise RuntimeError("the plan of this call no longer exists: its handle was copied, and the original was freed")
    return routes


def dropped(plan: torch.Tensor) -> List[int]:
    """[E] number of this rank's routes to each expert that capacity dropped. May wait for the GPU."""
    routes = routes_of(plan)
    counts = (ctypes.c_int64 * routes.core.config["num_experts"])()
    check(lib.plan_dropped(routes._handle, counts))
    return counts[:]


def _view(tensor: Optional[torch.Tensor]) -> Any:
    return None if tensor is None else view_of(contiguous(tensor))


def _use_stream(caller: Any, tensor: torch.Tensor) -> None:
    """Queues the next calls of a dispatcher or a layer in torch's current stream."""
    if tensor.is_cuda:
        caller.set_stream(stream_of(tensor))


def _rows_per_expert(plan: crossdock.Plan) -> torch.Tensor:
    if plan.device is not None:
        return rows_on_device(plan)
    size = plan.num_local_experts + 1
    starts = (ctypes.c_int64 * size).from_address(plan.segment_starts_ptr)[:]
    return torch.tensor(starts, dtype=torch.int64, device="cpu").diff()


def _empty_rows(like: torch.Tensor, routes: Routes, is_torchs: bool = False) -> Tuple[Optional[torch.Tensor], Any]:
    """Memory for rows [R, D], as a tensor and as an argument. None: the library provides it, as on the CPU: other ranks
    write there directly, combine reads there without a copy, and it is reused. On a GPU torch does, because it knows the
    streams that use the memory."""
    num_rows = routes.plan.capacity_rows
    return empty(like, (num_rows, routes.core.width)) if like.is_cuda or is_torchs or num_rows == 0 else (None, None)


def _plan(x: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor, core: Core) -> Routes:
    _use_stream(core.dispatcher, x)
    routes = {"map" if routing.dtype == torch.bool else "expert_ids": _view(routing)}
    return Routes(core, core.dispatcher.plan(weights=view_of(usable_weights(weights, x.dtype)), **routes))


def _outputs(x: torch.Tensor, routes: Routes, with_row_weights: bool, scales: Optional[torch.Tensor]) -> Tuple:
    """Tensors and arguments for the row weights and the scales."""
    num_rows, weights, row_scales = routes.plan.capacity_rows, (None, False), (None, None)
    if with_row_weights:
        weights = empty(x, (num_rows,), weights_dtype(x.dtype))
    if scales is not None:
        row_scales = empty(scales, (num_rows, *scales.shape[1:]))
    return weights, row_scales


def _results(x, weights, routes, row_weights) -> Tuple:
    """What a dispatch returns after the rows."""
    if is_captured(x):
        routes.core.captured.append(routes)
    if row_weights is not None and row_weights.dtype != weights.dtype:
        row_weights = row_weights.to(weights.dtype)
    return row_weights, _rows_per_expert(routes.plan), kept.tensor_owning(routes)


def dispatch_scaled(x, routing, weights, dispatcher, with_row_weights, scales) -> Tuple:
    core = core_of(dispatcher)
    with core.lock:
        routes = _plan(x, routing, weights, core)
        rows, memory = _empty_rows(x, routes)
        (row_weights, of_weights), (row_scales, of_scales) = _outputs(x, routes, with_row_weights, scales)
        made = core.dispatcher.dispatch(
            routes.plan, _view(x), _view(scales), row_weights=of_weights, rows=memory, row_scales=of_scales
        )
    rows = torch.from_dlpack(made.rows) if rows is None else rows
    return (rows, *_results(x, weights, routes, row_weights), row_scales)


def dispatch(x, routing, weights, dispatcher, with_row_weights) -> Tuple:
    return dispatch_scaled(x, routing, weights, dispatcher, with_row_weights, None)[:4]


# ---- Calls with a plan ----


def _move(name: str, source: torch.Tensor, routes: Routes, width: int, **options: Any) -> torch.Tensor:
    """A call with one input and one output [T, width]."""
    core = routes.core
    with core.lock:
        _use_stream(core.dispatcher, source)
        target, memory = empty(source, (routes.num_tokens, width))
        output = {"dispatch_backward": "grad_x", "combine": "out", "collect_routes": "routes"}[name]
        getattr(core.dispatcher, name)(routes.plan, _view(source), **{output: memory}, **options)
    return target


def dispatch_backward(grad_rows, plan, num_tokens) -> torch.Tensor:
    routes = routes_of(plan)
    return _move("dispatch_backward", grad_rows, routes, routes.core.width)


def combine(y, weights, routing, plan) -> torch.Tensor:
    routes = routes_of(plan)
    return _move("combine", y, routes, routes.core.width)


def combine_unweighted(y, plan, num_tokens) -> torch.Tensor:
    routes = routes_of(plan)
    return _move("combine", y, routes, routes.core.width, weighted=False)


def collect_routes(values, routing, plan) -> torch.Tensor:
    routes = routes_of(plan)
    return by_map(_move("collect_routes", values, routes, routes.plan.top_k), routing)


def combine_backward(grad_out, y, routing, plan) -> Tuple[torch.Tensor, torch.Tensor]:
    routes = routes_of(plan)
    core = routes.core
    with core.lock:
        _use_stream(core.dispatcher, y)
        grad_y, memory = _empty_rows(y, routes)
        by_slot, of_slots = empty(y, (routes.num_tokens, routes.plan.top_k), weights_dtype(y.dtype))
        made = core.dispatcher.combine_backward(
            routes.plan, _view(grad_out), _view(y), grad_rows=memory, grad_weights=of_slots
        )
    return torch.from_dlpack(made.grad_rows) if grad_y is None else grad_y, by_map(by_slot, routing)


def combine_unweighted_backward(grad_out, plan, num_rows) -> torch.Tensor:
    routes = routes_of(plan)
    core = routes.core
    with core.lock:
        _use_stream(core.dispatcher, grad_out)
        rows, memory = _empty_rows(grad_out, routes)
        made = core.dispatcher.dispatch(routes.plan, _view(grad_out), rows=memory)
    return torch.from_dlpack(made.rows) if rows is None else rows


# ---- Calls in two halves ----


class _Begun(NamedTuple):
    core: Core
    call: Any  #: crossdock's Pending
    like: torch.Tensor  #: of the device


def begin_dispatch(x, routing, weights, dispatcher, with_row_weights, scales, num_chunks) -> Tuple:
    core = core_of(dispatcher)
    with core.lock:
        routes = _plan(x, routing, weights, core)
        rows, memory = _empty_rows(x, routes, is_torchs=True)
        (row_weights, of_weights), (row_scales, of_scales) = _outputs(x, routes, with_row_weights, scales)
        call = core.dispatcher.begin_dispatch(
            *(routes.plan, _view(x), _view(scales)),
            row_weights=of_weights,
            rows=memory,
            row_scales=of_scales,
            num_chunks=num_chunks,
        )
    return (_Begun(core, call, x), rows, *_results(x, weights, routes, row_weights), row_scales)


def begin_combine(y, plan) -> Tuple[_Begun, torch.Tensor]:
    routes = routes_of(plan)
    core = routes.core
    with core.lock:
        _use_stream(core.dispatcher, y)
        out, memory = empty(y, (routes.num_tokens, core.width))
        return _Begun(core, core.dispatcher.begin_combine(routes.plan, _view(y), out=memory), y), out


def next_chunk(begun: _Begun) -> Optional[Tuple[int, int]]:
    with begun.core.lock:
        _use_stream(begun.core.dispatcher, begun.like)
        chunk = next(begun.call.chunks(), None)
    return None if chunk is None else chunk[1:]


def finish(begun: _Begun) -> None:
    with begun.core.lock:
        _use_stream(begun.core.dispatcher, begun.like)
        begun.call.finish()


def drop(begun: _Begun) -> None:
    begun.call.close()


# ---- Calls of a layer ----


def new_layer(layer: crossdock.Layer, *_: Any) -> crossdock.Layer:
    return layer


def _layer_weights(tensors: Tuple) -> crossdock.LayerWeights:
    gate, gate_bias, w1, w2, b1, b2, s1, s2, c1, c2, expert_bias = map(_view, tensors[1:12])
    shared = None if s1 is None else crossdock.ExpertWeights(s1, s2, c1, c2)
    return crossdock.LayerWeights(gate, crossdock.ExpertWeights(w1, w2, b1, b2), shared, gate_bias, expert_bias)


def layer_forward(layer, tensors, num_sequences, total_sequences, jitter_seed, earlier, with_saved) -> Tuple:
    x = tensors[0]
    _use_stream(layer, x)
    out, memory = empty(x, x.shape)
    known = dict(zip(("mask", "sequence_ids", "forced_ids", "token_ids"), map(_view, tensors[12:])))
    made = layer.forward(
        _view(x),
        _layer_weights(tensors),
        **known,
        num_sequences=num_sequences,
        total_sequences=total_sequences,
        jitter_seed=jitter_seed,
        earlier=earlier,
        out=memory,
        save=with_saved,
    )
    return out, (made.aux_loss, made.z_loss, *made.aux_losses), made.saved


_IS_MATRIX = (False, False, *2 * (True, True, False, False))  # gate, gate_bias, w1, w2, b1, b2, those of shared experts


def _gradients(x: torch.Tensor, parameters: Sequence, wanted: Sequence[bool]) -> Tuple[List, crossdock.LayerGradients]:
    """Tensors for the gradients of the 10 parameters, None where not wanted, and the argument for the call."""
    grads, memories = [], []
    for parameter, want, is_matrix in zip(parameters, wanted, _IS_MATRIX):
        grad, memory = gradient_memory(parameter, want, None if is_matrix else weights_dtype(x.dtype)) if want else (None, None)
        grads.append(grad)
        memories.append(memory)
    gate, gate_bias, *experts = memories
    of_experts, of_shared = crossdock.ExpertWeights(*experts[:4]), crossdock.ExpertWeights(*experts[4:])
    return grads, crossdock.LayerGradients(gate, of_experts, of_shared, gate_bias)


def _in_dtypes(grads: Sequence, parameters: Sequence) -> Iterator:
    return (None if grad is None else grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters))


def layer_backward(layer, tensors, grad_out, saved, wanted, grad_losses, delay_dw) -> Tuple:
    x, parameters = tensors[0], tensors[1:11]
    _use_stream(layer, x)
    wanted = [want and not (delay_dw and index > 1) for index, want in enumerate(wanted)]
    grads, outputs = _gradients(x, parameters, wanted)
    grad_x, memory = empty(x, x.shape)
    options = dict(grad_losses=grad_losses, delay_dw=delay_dw, grad_x=memory)
    layer.backward(_view(x), _layer_weights(tensors), _view(grad_out), saved, outputs, **options)
    return (grad_x, *_in_dtypes(grads, parameters))


def layer_backward_dw(layer, x, grad_out, saved, parameters) -> Tuple:
    _use_stream(layer, x)
    parameters = (None, None, *parameters)
    grads, outputs = _gradients(x, parameters, [parameter is not None for parameter in parameters])
    nothing = crossdock.LayerWeights(None, crossdock.ExpertWeights(None, None))
    layer.backward_dw(_view(x), nothing, _view(grad_out), saved, outputs)
    return tuple(_in_dtypes(grads, parameters))[2:]
