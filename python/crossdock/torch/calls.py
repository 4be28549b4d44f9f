"""The library's calls with PyTorch tensors: no autograd, torch's memory in and out."""
import ctypes
import functools
import itertools
import weakref
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, Union

import torch

import crossdock
from crossdock._direct_calls import NOT_GIVEN, DirectCalls
from crossdock._library import lib
from crossdock._owner import Shared
from crossdock._tensor import Marshal, Memory

from . import groups, native
from .tensors import contiguous, empty, rows_on_device, tensor_of, usable_weights, view_of, weights_dtype

_FEW_VALUES = 16384


class Core(Shared):
    """A dispatcher of the library with its group, known to the operators by a number."""

    def __init__(self, group: crossdock.Group, config: dict):
        self.group = group
        self.lock = groups.lock_of(group)  # held during calls
        self.config = config
        self.dispatcher = crossdock.Dispatcher(group, **config)
        self.calls = DirectCalls(self.dispatcher)
        self.rank = group.rank
        self.width: int = config["width"]
        self.max_rows: Optional[int] = config.get("max_rows")
        self.local_experts = _local_experts(group, config)
        self.num_local_experts = len(self.local_experts)
        self.new_counts = ctypes.c_int64 * self.num_local_experts
        self.captured: List["Routes"] = []  # plans that replays of CUDA graphs use
        self.key = key = next(_keys)
        _cores[key] = weakref.ref(self, lambda _: _cores.pop(key, None))

    def use_stream_of(self, tensor: torch.Tensor) -> None:
        """Queues the next calls in torch's current stream."""
        if tensor.is_cuda:
            self.dispatcher.set_stream(torch.cuda.current_stream(tensor.device).cuda_stream)

    def refuse(self, error: Exception, function: Any = lib.plan_create, *plan: Optional[int]) -> NoReturn:
        """For an argument that cannot be used: makes the call that the other ranks make, which fails on all of them."""
        with Marshal() as marshal:
            raise error
        num_missing = len(function.argtypes) - 1 - len(plan)
        with self.lock:
            marshal.call(self.rank, function, self.dispatcher._handle, *plan, *(None,) * num_missing)
        raise error

    def plan(self, routing: torch.Tensor, weights: torch.Tensor) -> Tuple["Routes", torch.Tensor]:
        """The plan of these routes, and its rows per local expert, pad rows included."""
        counts = None if routing.is_cuda else self.new_counts()
        is_map = routing.dtype is torch.bool
        handle, info = self.calls.plan(view_of(routing), view_of(weights), is_map, counts)
        routes = Routes(self, handle, info.num_tokens, info.capacity_rows, info.weights.shape[1], info)
        return routes, rows_on_device(routes) if counts is None else tensor_of(counts)

    def empty_rows(self, like: torch.Tensor, routes: "Routes") -> Tuple[Optional[torch.Tensor], Memory]:
        """Memory for rows [R, D], as a tensor and as the argument of a call. None: the library provides it.

        On a GPU it is torch's memory, because torch knows the streams that use it. On the CPU it is the library's memory,
        unless there are few rows: other ranks write there directly, combine reads there without a copy, and it is
        reused."""
        num_rows = routes.capacity_rows
        if like.is_cuda or num_rows * self.width <= _FEW_VALUES:
            return empty(like, (num_rows, self.width))
        return None, NOT_GIVEN

    def send(self, routes: "Routes", x: torch.Tensor, row_weights: Optional[Memory] = None) -> torch.Tensor:
        """x [T, D] -> rows [R, D]."""
        rows, memory = self.empty_rows(x, routes)
        sent = self.calls.dispatch(routes, view_of(x), memory, row_weights)
        return torch.from_dlpack(sent) if rows is None else rows

    def move(
        self, function: Any, routes: "Routes", source: torch.Tensor, width: int, native_call: Callable
    ) -> torch.Tensor:
        """A call with one input tensor and one output [T, width]. `native_call`: the compiled version of `function`."""
        with self.lock:
            target = native_call(self.dispatcher._handle, self.rank, routes._handle, source, routes.num_tokens, width)
            if target is not None:
                return target
            source = contiguous(source)
            self.use_stream_of(source)
            target, memory = empty(source, (routes.num_tokens, width))
            self.calls.move(function, routes, view_of(source), memory)
        return target


def _local_experts(group: crossdock.Group, config: dict) -> List[int]:
    placement = config.get("placement")
    if placement is not None:
        return [expert for expert, rank in enumerate(placement) if rank == group.rank]
    each, more = divmod(config["num_experts"], group.size)
    first = group.rank * each + min(group.rank, more)
    return list(range(first, first + each + (1 if group.rank < more else 0)))


_keys = itertools.count(1)
_cores: Dict[int, "weakref.ref[Core]"] = {}
_shared: "weakref.WeakKeyDictionary[crossdock.Group, Any]" = weakref.WeakKeyDictionary()
_routes: Dict[int, "weakref.ref[Routes]"] = {}


class Routes(crossdock.Plan):
    """A plan with its dispatcher. Lives as long as a tensor that stands for it (see `plan_tensor`) or a graph."""

    __slots__ = ("core", "key", "num_tokens", "capacity_rows", "top_k")

    def __init__(
        self, core: Core, handle: Optional[int], num_tokens: int, capacity_rows: int, top_k: int, info: Any = None
    ):
        self._handle = handle
        self._info = info
        self.num_tokens, self.capacity_rows, self.top_k = num_tokens, capacity_rows, top_k
        self._dispatcher = core.dispatcher
        self.core = core
        self.key = next(_keys)
        _routes[self.key] = weakref.ref(self, functools.partial(_routes.pop, self.key))  # no Python code: see Owner
        self._own(lib.plan_destroy, handle)


def shared_core(group: crossdock.Group, **config: Any) -> Core:
    """The dispatcher that all layers of a model with this configuration share; the layers call it in order."""
    cores = _shared.get(group)
    if cores is None:
        cores = _shared.setdefault(group, weakref.WeakValueDictionary())
    key = repr(sorted(config.items()))
    core = cores.get(key)
    if core is None:
        core = cores[key] = Core(group, {"nonfinite": "propagate", **config})
    return core


def core_of(key: int) -> Core:
    found = _cores.get(key)
    core = found() if found is not None else None
    if core is None:
        raise RuntimeError("this crossdock.torch.Dispatcher is closed, or was not kept as long as its calls are used")
    return core


# ---- Plans as tensors ----
#
# Operators pass tensors only, and autograd, checkpointing and compiled graphs decide how long these live. So a plan is
# an int64 tensor [1] on the CPU whose memory owns it: it is freed with the last tensor that shares the memory.


class _PlanMemory(ctypes.c_int64 * 1):
    __slots__ = ("routes",)


def plan_tensor(routes: Routes) -> torch.Tensor:
    memory = _PlanMemory(routes.key)
    memory.routes = routes
    return tensor_of(memory)


def routes_of(plan: "Plan") -> Routes:
    if type(plan) is Routes:
        return plan
    found = _routes.get(plan.item())
    routes = found() if found is not None else None
    if routes is None:
        raise RuntimeError("the plan of this call no longer exists: its handle was copied, and the original was freed")
    return routes


# ---- Calls ----


# Callers that have the routes themselves may pass them as `plan`.

Plan = Union[torch.Tensor, Routes]


def send(
    x: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor, dispatcher: int, with_row_weights: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, Routes]:
    """x [T, D] -> rows [R, D], row_weights [R] or None, rows per expert [E_local], the plan and its routes."""
    core = core_of(dispatcher)
    rows = row_weights = memory = None
    with core.lock:
        sent = native.send(
            core.dispatcher._handle, core.rank, x, routing, weights, with_row_weights, core.num_local_experts, _FEW_VALUES
        )
        if sent is not None:
            rows, row_weights, per_expert, *plan = sent
            routes = Routes(core, *plan)
        else:
            x = contiguous(x)
            core.use_stream_of(x)
            routes, per_expert = core.plan(contiguous(routing), usable_weights(weights, x.dtype))
        if rows is None:
            if with_row_weights:
                row_weights, memory = empty(x, (routes.capacity_rows,), weights_dtype(x.dtype))
            rows = core.send(routes, x, memory)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        core.captured.append(routes)
    if row_weights is not None and row_weights.dtype != weights.dtype:
        row_weights = row_weights.to(weights.dtype)
    return rows, row_weights, per_expert, plan_tensor(routes), routes


def dispatch(
    x: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor, dispatcher: int, with_row_weights: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """x [T, D] -> rows [R, D], row_weights [R] or None, rows per expert [E_local] and the plan."""
    return send(x, routing, weights, dispatcher, with_row_weights)[:4]


def dispatch_scaled(
    x: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor,
    dispatcher: int,
    with_row_weights: bool,
    scales: torch.Tensor,
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """As dispatch, for x in fp8 with scales; also returns those of the rows."""
    core, row_weights = core_of(dispatcher), None
    memory: Any = False
    with core.lock:
        core.use_stream_of(x)
        routes, per_expert = core.plan(contiguous(routing), usable_weights(weights, x.dtype))
        num_rows = routes.capacity_rows
        if with_row_weights:
            row_weights, memory = empty(x, (num_rows,), weights_dtype(x.dtype))
        rows, of_rows = empty(x, (num_rows, core.width))
        row_scales, of_scales = empty(scales, (num_rows, scales.shape[1]))
        core.dispatcher.dispatch(
            routes, view_of(x), view_of(scales), row_weights=memory, rows=of_rows, row_scales=of_scales
        )
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        core.captured.append(routes)
    if row_weights is not None and row_weights.dtype != weights.dtype:
        row_weights = row_weights.to(weights.dtype)
    return rows, row_weights, per_expert, plan_tensor(routes), row_scales


def dispatch_backward(grad_rows: torch.Tensor, plan: Plan, num_tokens: int) -> torch.Tensor:
    """grad_rows [R, D] -> grad_x [T, D]."""
    routes = routes_of(plan)
    return routes.core.move(lib.dispatch_backward, routes, grad_rows, routes.core.width, native.dispatch_backward)


def combine(y: torch.Tensor, weights: torch.Tensor, routing: torch.Tensor, plan: Plan) -> torch.Tensor:
    """y [R, D] -> out [T, D], the weighted sum. The plan has the weights; `weights` is there for autograd."""
    routes = routes_of(plan)
    return routes.core.move(lib.combine, routes, y, routes.core.width, native.combine)


def combine_unweighted(y: torch.Tensor, plan: Plan, num_tokens: int) -> torch.Tensor:
    """y [R, D] -> out [T, D], the sum."""
    routes = routes_of(plan)
    return routes.core.move(lib.combine_unweighted, routes, y, routes.core.width, native.combine_unweighted)


def combine_backward(
    grad_out: torch.Tensor, y: torch.Tensor, routing: torch.Tensor, plan: Plan
) -> Tuple[torch.Tensor, torch.Tensor]:
    """grad_out [T, D] -> the gradients of y [R, D] and of the weights, shaped like `routing`."""
    routes = routes_of(plan)
    core = routes.core
    with core.lock:
        quick = native.combine_backward(
            core.dispatcher._handle, core.rank, routes._handle, grad_out, y, routes.top_k, _FEW_VALUES
        )
        if quick is not None:
            return quick[0], _like_routing(quick[1], routing)
        grad_out, y = contiguous(grad_out), contiguous(y)
        core.use_stream_of(y)
        grad_y, memory = core.empty_rows(y, routes)
        by_slot, slot_memory = empty(y, (routes.num_tokens, routes.top_k), weights_dtype(y.dtype))
        made = core.calls.combine_backward(routes, view_of(grad_out), view_of(y), memory, slot_memory)
    if grad_y is None:
        grad_y = torch.from_dlpack(made)
    return grad_y, _like_routing(by_slot, routing)


def combine_unweighted_backward(grad_out: torch.Tensor, plan: Plan, num_rows: int) -> torch.Tensor:
    """grad_out [T, D] -> the gradient of y [R, D]: every row gets the gradient of its token."""
    routes = routes_of(plan)
    core, grad_out = routes.core, contiguous(grad_out)
    with core.lock:
        core.use_stream_of(grad_out)
        return core.send(routes, grad_out)


def collect_routes(values: torch.Tensor, routing: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Returns one value per row [R], fp32 or fp64, to its route; 0 where there is none. Shaped like `routing`."""
    routes = routes_of(plan)
    collected = routes.core.move(lib.collect_routes, routes, values, routes.top_k, native.collect_routes)
    return _like_routing(collected, routing)


def _like_routing(by_slot: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """[T, K] unchanged; for a map, whose slots are its set bits in ascending order, scattered to [T, E]."""
    if routing.dtype != torch.bool:
        return by_slot
    if by_slot.numel() == 0:
        return by_slot.new_zeros(routing.shape)
    slot = (routing.cumsum(1) - 1).clamp_(0, by_slot.shape[1] - 1)
    return by_slot.gather(1, slot).masked_fill_(~routing, 0.0)
