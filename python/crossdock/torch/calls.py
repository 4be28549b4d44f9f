"""The library's calls with tensors of PyTorch: no autograd, memory of torch in and out."""
import ctypes
import itertools
import weakref
from typing import Any, List, Optional, Sequence, Tuple

import torch

import crossdock

from . import groups
from .tensors import Output, rows_per_expert, usable_weights, view_of, weights_dtype


_FEW_VALUES = 16384


class Core:
    """A dispatcher of the library with its group, known to the operators by a number."""

    def __init__(self, group: crossdock.Group, config: dict):
        self.group = group
        self.lock = groups.lock_of(group)
        self.config = config
        self.dispatcher = crossdock.Dispatcher(group, **config)
        self.max_rows: Optional[int] = config.get("max_rows")
        self.num_local_experts = _num_local_experts(group, config)
        self.captured: List["Routes"] = []  # replays of CUDA graphs use these plans
        self.key = next(_keys)
        _cores[self.key] = self

    def __deepcopy__(self, memo: dict) -> "Core":
        return self  # copies of a model share it

    def call(self, tensor: torch.Tensor) -> "Call":
        """Around one collective operation, in torch's current stream."""
        return Call(self, tensor)


class Call:
    """Holds the group during one operation, and allocates its results."""

    __slots__ = ("library", "_lock", "_tensor", "_outputs")

    def __init__(self, core: Core, tensor: torch.Tensor):
        self.library = core.dispatcher
        self._lock = core.lock
        self._tensor = tensor
        self._outputs: List[Output] = []

    def empty(self, like: torch.Tensor, shape: Sequence[int], dtype: Optional[torch.dtype] = None) -> Output:
        output = Output(like, shape, dtype)
        self._outputs.append(output)
        return output

    def rows(self, like: torch.Tensor, num_rows: int) -> Optional[Output]:
        """Memory for rows [R, D]. None: the library is to provide it.

        On a GPU it is memory of torch, which knows the streams that use it. On the CPU it is memory of the library:
        other ranks write there directly, combine reads there without a copy, and it is used again. Few rows are not
        worth it."""
        width = like.shape[-1]
        if like.is_cuda or num_rows * width < _FEW_VALUES:
            return self.empty(like, (num_rows, width))
        return None

    def dispatch(self, plan: crossdock.Plan, x: torch.Tensor, row_weights: Optional[Output] = None) -> torch.Tensor:
        """x [T, D] -> rows [R, D]."""
        rows = self.rows(x, plan.capacity_rows)
        sent = self.library.dispatch(
            plan,
            view_of(x),
            rows=None if rows is None else rows.view,
            row_weights=False if row_weights is None else row_weights.view,
        )
        return torch.from_dlpack(sent.rows) if rows is None else rows.tensor

    def __enter__(self) -> "Call":
        self._lock.acquire()
        if self._tensor.is_cuda:
            try:
                self.library.set_stream(torch.cuda.current_stream(self._tensor.device).cuda_stream)
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._lock.release()
        if isinstance(error, crossdock.Error):
            for output in self._outputs:
                if output.error is not None:
                    raise output.error from error


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
        raise RuntimeError("this crossdock.torch.Dispatcher no longer exists: keep it as long as its calls are used")
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
    with core.call(x) as call:
        if routing.dtype == torch.bool:
            plan = call.library.plan(map=view_of(routing), weights=view_of(given))
        else:
            plan = call.library.plan(view_of(routing), view_of(given))
        sent = call.empty(x, (plan.capacity_rows,), weights_dtype(x.dtype)) if with_row_weights else None
        rows = call.dispatch(plan, x, sent)
    routes = Routes(core, plan)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        core.captured.append(routes)
    row_weights = None if sent is None else sent.tensor.to(weights.dtype)
    return rows, row_weights, rows_per_expert(plan), plan_tensor(routes)


def dispatch_backward(grad_rows: torch.Tensor, plan: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """grad_rows [R, D] -> grad_x [T, D]."""
    routes = routes_of(plan)
    grad_rows = grad_rows.contiguous()
    with routes.core.call(grad_rows) as call:
        grad_x = call.empty(grad_rows, (num_tokens, grad_rows.shape[-1]))
        call.library.dispatch_backward(routes.plan, view_of(grad_rows), grad_x=grad_x.view)
    return grad_x.tensor


def combine(y: torch.Tensor, weights: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """y [R, D] -> out [T, D], the weighted sum. The plan has the weights; `weights` is there for autograd."""
    return _combine(y, plan, routing.shape[0], True)


def combine_unweighted(y: torch.Tensor, plan: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """y [R, D] -> out [T, D], the sum."""
    return _combine(y, plan, num_tokens, False)


def _combine(y: torch.Tensor, plan: torch.Tensor, num_tokens: int, weighted: bool) -> torch.Tensor:
    routes = routes_of(plan)
    y = y.contiguous()
    with routes.core.call(y) as call:
        out = call.empty(y, (num_tokens, y.shape[-1]))
        call.library.combine(routes.plan, view_of(y), weighted=weighted, out=out.view)
    return out.tensor


def combine_backward(
    grad_out: torch.Tensor, y: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """grad_out [T, D] -> the gradients of y [R, D] and of the weights, shaped like `routing`."""
    routes = routes_of(plan)
    grad_out, y = grad_out.contiguous(), y.contiguous()
    with routes.core.call(y) as call:
        rows = call.rows(y, y.shape[0])
        by_slot = call.empty(y, (routes.plan.num_tokens, routes.plan.top_k), weights_dtype(y.dtype))
        result = call.library.combine_backward(
            routes.plan,
            view_of(grad_out),
            view_of(y),
            grad_rows=None if rows is None else rows.view,
            grad_weights=by_slot.view,
        )
    grad_y = torch.from_dlpack(result.grad_rows) if rows is None else rows.tensor
    return grad_y, _like_routing(by_slot.tensor, routing)


def combine_unweighted_backward(grad_out: torch.Tensor, plan: torch.Tensor, num_rows: int) -> torch.Tensor:
    """grad_out [T, D] -> the gradient of y [R, D]: every row gets the gradient of its token."""
    routes = routes_of(plan)
    grad_out = grad_out.contiguous()
    with routes.core.call(grad_out) as call:
        return call.dispatch(routes.plan, grad_out)


def collect_routes(values: torch.Tensor, routing: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """One value per row [R], fp32 or fp64, back to its route; 0 where there is none. Shaped like `routing`."""
    routes = routes_of(plan)
    values = values.contiguous()
    with routes.core.call(values) as call:
        by_slot = call.empty(values, (routes.plan.num_tokens, routes.plan.top_k))
        call.library.collect_routes(routes.plan, view_of(values), routes=by_slot.view)
    return _like_routing(by_slot.tensor, routing)


def _like_routing(by_slot: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """[T, K] as it is; for a map, whose slots are its set bits in ascending order, spread to [T, E]."""
    if routing.dtype != torch.bool:
        return by_slot
    if by_slot.numel() == 0:
        return by_slot.new_zeros(routing.shape)
    slot = (routing.cumsum(1) - 1).clamp_(0, by_slot.shape[1] - 1)
    return by_slot.gather(1, slot).masked_fill_(~routing, 0.0)
