"""The library's calls with tensors of PyTorch: no autograd, memory of torch in and out."""
import ctypes
import itertools
import weakref
from typing import Any, List, Optional, Tuple

import torch

import crossdock

from . import groups
from .tensors import empty, rows_per_expert, usable_weights, view_of, weights_dtype

_FEW_VALUES = 16384


class Core:
    """A dispatcher of the library with its group, known to the operators by a number."""

    def __init__(self, group: crossdock.Group, config: dict):
        self.group = group
        self.lock = groups.lock_of(group)  # held during calls
        self.config = config
        self.dispatcher = crossdock.Dispatcher(group, **config)
        self.width: int = config["width"]
        self.max_rows: Optional[int] = config.get("max_rows")
        self.num_local_experts = _num_local_experts(group, config)
        self.captured: List["Routes"] = []  # replays of CUDA graphs use these plans
        self.key = next(_keys)
        _cores[self.key] = self

    def __deepcopy__(self, memo: dict) -> "Core":
        return self  # copies of a model share it

    def use_stream_of(self, tensor: torch.Tensor) -> None:
        """Queues the next calls in torch's current stream."""
        if tensor.is_cuda:
            self.dispatcher.set_stream(torch.cuda.current_stream(tensor.device).cuda_stream)

    def empty_rows(self, like: torch.Tensor, plan: crossdock.Plan) -> Tuple[Optional[torch.Tensor], Any]:
        """Memory for rows [R, D] and what a call takes for it. None: the library is to provide it.

        On a GPU it is memory of torch, which knows the streams that use it. On the CPU it is memory of the library:
        other ranks write there directly, combine reads there without a copy, and it is used again. Few rows are not
        worth it."""
        num_rows = plan.capacity_rows
        if like.is_cuda or num_rows * self.width < _FEW_VALUES:
            return empty(like, (num_rows, self.width))
        return None, None

    def send(self, plan: crossdock.Plan, x: torch.Tensor, row_weights: Any = False) -> torch.Tensor:
        """x [T, D] -> rows [R, D]."""
        rows, memory = self.empty_rows(x, plan)
        sent = self.dispatcher.dispatch(plan, view_of(x), rows=memory, row_weights=row_weights)
        return torch.from_dlpack(sent.rows) if rows is None else rows


def _num_local_experts(group: crossdock.Group, config: dict) -> int:
    placement = config.get("placement")
    if placement is not None:
        return sum(1 for rank in placement if rank == group.rank)
    each, more = divmod(config["num_experts"], group.size)
    return each + (1 if group.rank < more else 0)


class Routes:
    """A plan with its dispatcher. Lives as long as a tensor that stands for it (see `plan_tensor`)."""

    __slots__ = ("core", "plan", "__weakref__")

    def __init__(self, core: Core, plan: crossdock.Plan):
        self.core = core
        self.plan = plan


_keys = itertools.count(1)
_cores: "weakref.WeakValueDictionary[int, Core]" = weakref.WeakValueDictionary()
_shared: "weakref.WeakKeyDictionary[crossdock.Group, Any]" = weakref.WeakKeyDictionary()
_routes: "weakref.WeakValueDictionary[int, Routes]" = weakref.WeakValueDictionary()


def shared_core(group: crossdock.Group, **config: Any) -> Core:
    """The dispatcher that all layers of a model with this configuration share; calls come in the layers' order."""
    cores = _shared.get(group)
    if cores is None:
        cores = _shared.setdefault(group, weakref.WeakValueDictionary())
    key = repr(sorted(config.items()))
    core = cores.get(key)
    if core is None:
        core = cores[key] = Core(group, {"nonfinite": "propagate", **config})
    return core


def core_of(key: int) -> Core:
    core = _cores.get(key)
    if core is None:
        raise RuntimeError("this crossdock.torch.Dispatcher is closed, or was not kept as long as its calls are used")
    return core


# ---- Plans as tensors ----
#
# Operators pass tensors only, and autograd, checkpointing and compiled graphs decide how long these live. So a plan is
# an int64 tensor [1] on the CPU whose memory owns it: it is freed with the last tensor that shares the memory.


class _PlanMemory(ctypes.c_int64 * 1):
    routes: Routes


def plan_tensor(routes: Routes) -> torch.Tensor:
    key = next(_keys)
    _routes[key] = routes
    memory = _PlanMemory(key)
    memory.routes = routes
    return torch.frombuffer(memory, dtype=torch.int64)


def routes_of(plan: torch.Tensor) -> Routes:
    routes = _routes.get(plan.item())
    if routes is None:
        raise RuntimeError("the plan of this call no longer exists: its handle was copied, and the original was freed")
    return routes


# ---- Calls ----


def dispatch(
    x: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor, dispatcher: int, with_row_weights: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]:
    """x [T, D] -> rows [R, D], row_weights [R] or None, rows per expert [E_local] and the plan."""
    core = core_of(dispatcher)
    x, routing, given = x.contiguous(), routing.contiguous(), usable_weights(weights, x.dtype)
    row_weights, memory = None, False
    with core.lock:
        core.use_stream_of(x)
        if routing.dtype == torch.bool:
            plan = core.dispatcher.plan(map=view_of(routing), weights=view_of(given))
        else:
            plan = core.dispatcher.plan(view_of(routing), view_of(given))
        if with_row_weights:
            row_weights, memory = empty(x, (plan.capacity_rows,), weights_dtype(x.dtype))
        rows = core.send(plan, x, memory)
    routes = Routes(core, plan)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        core.captured.append(routes)
    if row_weights is not None and row_weights.dtype != weights.dtype:
        row_weights = row_weights.to(weights.dtype)
    return rows, row_weights, rows_per_expert(plan), plan_tensor(routes)


def dispatch_backward(grad_rows: torch.Tensor, plan: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """grad_rows [R, D] -> grad_x [T, D]."""
    routes = routes_of(plan)
    core, grad_rows = routes.core, grad_rows.contiguous()
    with core.lock:
        core.use_stream_of(grad_rows)
        grad_x, memory = empty(grad_rows, (routes.plan.num_tokens, core.width))
        core.dispatcher.dispatch_backward(routes.plan, view_of(grad_rows), grad_x=memory)
    return grad_x


def combine(y: torch.Tensor, weights: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """y [R, D] -> out [T, D], the weighted sum. The plan has the weights; `weights` is there for autograd."""
    return _combine(y, plan, True)


def combine_unweighted(y: torch.Tensor, plan: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """y [R, D] -> out [T, D], the sum."""
    return _combine(y, plan, False)


def _combine(y: torch.Tensor, plan: torch.Tensor, weighted: bool) -> torch.Tensor:
    routes = routes_of(plan)
    core, y = routes.core, y.contiguous()
    with core.lock:
        core.use_stream_of(y)
        out, memory = empty(y, (routes.plan.num_tokens, core.width))
        core.dispatcher.combine(routes.plan, view_of(y), weighted=weighted, out=memory)
    return out


def combine_backward(
    grad_out: torch.Tensor, y: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """grad_out [T, D] -> the gradients of y [R, D] and of the weights, shaped like `routing`."""
    routes = routes_of(plan)
    core, grad_out, y = routes.core, grad_out.contiguous(), y.contiguous()
    with core.lock:
        core.use_stream_of(y)
        grad_y, memory = core.empty_rows(y, routes.plan)
        shape = (routes.plan.num_tokens, routes.plan.top_k)
        by_slot, slot_memory = empty(y, shape, weights_dtype(y.dtype))
        result = core.dispatcher.combine_backward(
            routes.plan, view_of(grad_out), view_of(y), grad_rows=memory, grad_weights=slot_memory
        )
    if grad_y is None:
        grad_y = torch.from_dlpack(result.grad_rows)
    return grad_y, _like_routing(by_slot, routing)


def combine_unweighted_backward(grad_out: torch.Tensor, plan: torch.Tensor, num_rows: int) -> torch.Tensor:
    """grad_out [T, D] -> the gradient of y [R, D]: every row gets the gradient of its token."""
    routes = routes_of(plan)
    core, grad_out = routes.core, grad_out.contiguous()
    with core.lock:
        core.use_stream_of(grad_out)
        return core.send(routes.plan, grad_out)


def collect_routes(values: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """One value per row [R], fp32 or fp64, back to its route; 0 where there is none. Shaped like `routing`."""
    routes = routes_of(plan)
    core, values = routes.core, values.contiguous()
    with core.lock:
        core.use_stream_of(values)
        by_slot, memory = empty(values, (routes.plan.num_tokens, routes.plan.top_k))
        core.dispatcher.collect_routes(routes.plan, view_of(values), routes=memory)
    return _like_routing(by_slot, routing)


def _like_routing(by_slot: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """[T, K] as it is; for a map, whose slots are its set bits in ascending order, spread to [T, E]."""
    if routing.dtype != torch.bool:
        return by_slot
    if by_slot.numel() == 0:
        return by_slot.new_zeros(routing.shape)
    slot = (routing.cumsum(1) - 1).clamp_(0, by_slot.shape[1] - 1)
    return by_slot.gather(1, slot).masked_fill_(~routing, 0.0)
