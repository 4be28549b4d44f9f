"""The calls of dispatchers and layers in Python, where there is no compiled module (native.py). It has the same functions."""
import ctypes
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

import crossdock
from crossdock._errors import check
from crossdock._library import lib

from . import kept
from .core import Core, core_of
from .tensors import by_map, contiguous, empty, gradient_memory, is_captured, stream_of
from .tensors import usable_weights, view_of, weights_dtype


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
        return torch.as_tensor(plan.segment_starts, device=torch.device("cuda", plan.device)).diff()
    size = plan.num_local_experts + 1
    starts = (ctypes.c_int64 * size).from_address(plan.segment_starts_ptr)[:]
    return torch.tensor(starts, dtype=torch.int64, device="cpu").diff()


def _plan(x: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor, core: Core) -> Routes:
    _use_stream(core.dispatcher, x)
    routes = {"map" if routing.dtype == torch.bool else "expert_ids": _view(routing)}
    return Routes(core, core.dispatcher.plan(weights=view_of(usable_weights(weights, x.dtype)), **routes))


def _call(name: str, routes: Routes, inputs: Sequence, outputs: Dict[str, Tuple], **options: Any) -> Tuple[Any, ...]:
    """A call with a plan. Inputs may be None; the first one has the device. outputs: the tensors that new ones are like, shapes
    and dtypes, by the names of the dispatcher.

    Outputs are torch's memory, because torch knows the streams that use it. Only rows on the CPU are the library's: other ranks
    write there directly, combine reads there without a copy, and it is reused."""
    dispatcher, like = routes.core.dispatcher, inputs[0]
    with routes.core.lock:
        _use_stream(dispatcher, like)
        made, given = {}, {}
        for output, (of, shape, dtype) in outputs.items():
            if not output.endswith("rows") or like.is_cuda or shape[0] == 0:
                made[output], given[output] = empty(of, shape, dtype)
        results = getattr(dispatcher, name)(routes.plan, *map(_view, inputs), **given, **options)
    return tuple(made[output] if output in made else torch.from_dlpack(getattr(results, output)) for output in outputs)


def dispatch_scaled(x, routing, weights, dispatcher, with_row_weights, scales) -> Tuple:
    core = core_of(dispatcher)
    with core.lock:
        routes = _plan(x, routing, weights, core)
        num_rows = routes.plan.capacity_rows
        outputs: Dict[str, Tuple] = {"rows": (x, (num_rows, core.width), None)}
        if with_row_weights:
            outputs["row_weights"] = (x, (num_rows,), weights_dtype(x.dtype))
        if scales is not None:
            outputs["row_scales"] = (scales, (num_rows, *scales.shape[1:]), None)
        made = dict(zip(outputs, _call("dispatch", routes, (x, scales), outputs)))
    if is_captured(x):
        core.captured.append(routes)
    row_weights = made.get("row_weights")
    if row_weights is not None and row_weights.dtype != weights.dtype:
        row_weights = row_weights.to(weights.dtype)
    counts = _rows_per_expert(routes.plan)
    return made["rows"], row_weights, counts, kept.tensor_owning(routes), made.get("row_scales")


def dispatch(x, routing, weights, dispatcher, with_row_weights) -> Tuple:
    return dispatch_scaled(x, routing, weights, dispatcher, with_row_weights, None)[:4]


def dispatch_backward(grad_rows, plan, num_tokens) -> torch.Tensor:
    routes = routes_of(plan)
    outputs = {"grad_x": (grad_rows, (routes.num_tokens, routes.core.width), None)}
    return _call("dispatch_backward", routes, (grad_rows,), outputs)[0]


def combine(y, weights, routing, plan, weighted=True) -> torch.Tensor:
    routes = routes_of(plan)
    outputs = {"out": (y, (routes.num_tokens, routes.core.width), None)}
    return _call("combine", routes, (y,), outputs, weighted=weighted)[0]


def combine_unweighted(y, plan, num_tokens) -> torch.Tensor:
    return combine(y, None, None, plan, weighted=False)


def combine_backward(grad_out, y, routing, plan) -> Tuple[torch.Tensor, torch.Tensor]:
    routes = routes_of(plan)
    outputs = {
        "grad_rows": (y, (routes.plan.capacity_rows, routes.core.width), None),
        "grad_weights": (y, (routes.num_tokens, routes.plan.top_k), weights_dtype(y.dtype)),
    }
    grad_rows, by_slot = _call("combine_backward", routes, (grad_out, y), outputs)
    return grad_rows, by_map(by_slot, routing)


def combine_unweighted_backward(grad_out, plan, num_rows) -> torch.Tensor:
    routes = routes_of(plan)
    outputs = {"rows": (grad_out, (routes.plan.capacity_rows, routes.core.width), None)}
    return _call("dispatch", routes, (grad_out,), outputs)[0]


def collect_routes(values, routing, plan) -> torch.Tensor:
    routes = routes_of(plan)
    outputs = {"routes": (values, (routes.num_tokens, routes.plan.top_k), None)}
    return by_map(_call("collect_routes", routes, (values,), outputs)[0], routing)


# ---- Calls in two halves: here they are complete at once ----


class _Begun:
    """A call that has been made."""

    def __init__(self, core: Core):
        self.core = core
        self.chunks = iter([(0, core.num_local_experts)])


def begin_dispatch(x, routing, weights, dispatcher, with_row_weights, scales, num_chunks) -> Tuple:
    core = core_of(dispatcher)
    if not 0 <= num_chunks < 2**31:
        core.refuse(ValueError(f"num_chunks must be in [0, {2**31 - 1}], got {num_chunks}"))
    return (_Begun(core), *dispatch_scaled(x, routing, weights, dispatcher, with_row_weights, scales))


def begin_combine(y, plan) -> Tuple[_Begun, torch.Tensor]:
    return _Begun(routes_of(plan).core), combine(y, None, None, plan)


def next_chunk(begun: _Begun) -> Optional[Tuple[int, int]]:
    return next(begun.chunks, None)


def finish(begun: _Begun) -> None:
    begun.core.dispatcher.check()


def drop(begun: _Begun) -> None:
    pass


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
