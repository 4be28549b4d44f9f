"""Dispatchers: carry tokens to the ranks of their experts, and results back."""
import ctypes
import difflib
from ctypes import byref
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from ._abi import (
    CombineBackwardArgs,
    CombineBackwardResult,
    COutput,
    CTensor,
    DeviceOptions,
    DispatchConfig,
    DispatchResult,
    Routing,
    int_array,
    maker,
)
from ._dispatch_call import Dispatched, DispatchCall, Pending, PendingDispatch
from ._dtype import to_dtype
from ._errors import check, fail
from ._group import Group
from ._library import lib
from ._owner import Shared
from ._plan import Plan
from ._tensor import Array, ArrayLike, Marshal, handle_in, result

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class DispatchKeywords(TypedDict, total=False):
        """The keyword arguments of Dispatcher that are DispatchOptions."""

        alignment: int
        max_rows: Optional[int]
        placement: Optional[Sequence[int]]
        strategy: str
        capacity_factor: Optional[float]
        capacity_tokens: Optional[int]
        pad_to_capacity: bool
        drop_policy: str
        nonfinite: str
        partial_sums: Union[bool, str]
        keep_empty_segments: bool
        max_routes_per_token: Optional[int]
        copies: str


DROP_POLICIES = {"position": 0, "weight": 1}
NONFINITE = {"reject": 0, "propagate": 1}
PARTIAL_SUMS = {False: 0, True: 1, "fp32": 1, "rows": 2}
COPIES = {"auto": 0, "per_route": 1, "per_rank": 2}


class CombineGradients(NamedTuple):
    """Results of combine_backward."""

    grad_rows: Any  #: [R, D] = weight * grad_out of the row's token; 0 in pad rows
    grad_weights: Any  #: [T, K] = <y row, grad_out>; 0 in slots without a kept route


class _Move(ctypes.Structure):
    """The tensors of a call with one input and one output."""

    _fields_ = [("source", CTensor), ("target", COutput)]


_TARGET = _Move.target.offset
_EXPERT_IDS = Routing.expert_ids.offset
_MAP = Routing.map.offset
_WEIGHTS = Routing.weights.offset
_MASK = Routing.mask.offset
_GRAD_OUT = CombineBackwardArgs.grad_out.offset
_Y = CombineBackwardArgs.y.offset
_GRAD_ROWS = CombineBackwardResult.grad_rows.offset
_GRAD_WEIGHTS = CombineBackwardResult.grad_weights.offset
_new_routing = maker(Routing)
_new_combine_backward_args = maker(CombineBackwardArgs)
_new_combine_backward_result = maker(CombineBackwardResult)


def choice(name: str, value: str, values: dict) -> int:
    if value not in values:
        raise ValueError(f"{name} must be one of {', '.join(values)}, got {value!r}")
    return values[value]


def partial_sums_value(value: Union[bool, str]) -> int:
    if value not in PARTIAL_SUMS:
        raise ValueError(f'partial_sums must be False, True, "fp32" or "rows", got {value!r}')
    return PARTIAL_SUMS[value]


@dataclass(frozen=True)
class DispatchOptions:
    """The options of a Dispatcher, which documents them, in one place: everything but E, K and D."""

    alignment: int = 1
    max_rows: Optional[int] = None
    placement: Optional[Sequence[int]] = None
    strategy: str = "auto"
    capacity_factor: Optional[float] = None
    capacity_tokens: Optional[int] = None
    pad_to_capacity: bool = False
    drop_policy: str = "position"
    nonfinite: str = "reject"
    partial_sums: Union[bool, str] = False
    keep_empty_segments: bool = False
    max_routes_per_token: Optional[int] = None
    copies: str = "auto"

    @staticmethod
    def of(**options: Any) -> "DispatchOptions":
        known = [field.name for field in fields(DispatchOptions)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise TypeError(f"Dispatcher has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        return DispatchOptions(**options)

    def config(self, num_experts: int, top_k: int, width: int) -> DispatchConfig:
        """For the library, which makes its own checks in the first call: here are those that it cannot make."""
        for name in ("max_rows", "capacity_factor", "capacity_tokens", "max_routes_per_token"):
            if getattr(self, name) == 0:  # to the library, 0 means none
                raise ValueError(f"{name} must be positive, got 0; None: no {'limit' if name.startswith('max') else 'capacity'}")
        if not isinstance(self.strategy, str):
            raise ValueError(f"strategy must be a string, got {self.strategy!r}")
        places = None
        if self.placement is not None:
            ranks = list(self.placement)
            if len(ranks) != num_experts:
                raise ValueError(f"placement must have num_experts ({num_experts}) entries, got {len(ranks)}")
            places = int_array("placement", ranks, ctypes.c_int32)
        return DispatchConfig(
            num_experts=num_experts,
            top_k=top_k,
            width=width,
            alignment=self.alignment,
            max_rows=self.max_rows or 0,
            placement=places,
            strategy=self.strategy.encode(),
            capacity_factor=self.capacity_factor or 0,
            capacity_tokens=self.capacity_tokens or 0,
            pad_to_capacity=self.pad_to_capacity,
            drop_policy=choice("drop_policy", self.drop_policy, DROP_POLICIES),
            nonfinite=choice("nonfinite", self.nonfinite, NONFINITE),
            partial_sums=partial_sums_value(self.partial_sums),
            keep_empty_segments=self.keep_empty_segments,
            max_routes_per_token=self.max_routes_per_token or 0,
            copies=choice("copies", self.copies, COPIES),
        )

    def changed(self) -> List[str]:
        """Those that differ from their defaults, as name=value."""
        shown = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return [f"{name}={value!r}" for name, value, default in shown if value != default]


def dispatch_config(*, num_experts: int, top_k: int, width: int, **options: Any) -> DispatchConfig:
    return DispatchOptions.of(**options).config(num_experts, top_k, width)


class Dispatcher(Shared):
    """Carries tokens to the ranks of their experts, and results back.

    All calls are collective, except set_stream, check, allocate_rows and close. They release the GIL. An invalid
    argument on one rank is the same Error on every rank, and the group stays usable.

    Inputs are numpy arrays, objects with __dlpack__ (torch, jax, cupy), crossdock.Array or crossdock.Tensor. They are not
    copied, except numpy arrays that are not contiguous. An output may be passed, with the exact shape and dtype, and is
    then returned; otherwise it is in the library's memory, without a copy: a numpy array if the input is one, else a
    crossdock.Array. An output must not overlap an input or another output.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_experts: int,
        top_k: int,
        width: int,
        **options: "Unpack[DispatchKeywords]",
    ):
        """Not collective. The configuration must be identical on every rank; the first plan checks it.

        num_experts, top_k, width: E, K and D
        alignment: of segment starts, in rows: 1 (default), 8, 16, 32, 64, 128 or 256
        max_rows: limit on R; with it, no call waits for a GPU
        placement: [E] expert to rank; None: contiguous, as even as possible
        strategy: "auto", "direct", "hierarchical", "alltoall" or "allgather"
        capacity_factor: at most ceil((T * K / E) * factor) rows per expert and source rank; None: no capacity
        capacity_tokens: with pad_to_capacity: the largest T of any rank and step
        pad_to_capacity: every segment has exactly that many rows per source
        drop_policy: which routes beyond the capacity are kept: the first ("position") or the heaviest ("weight")
        nonfinite: what to do with non-finite weights: "reject" or "propagate"
        partial_sums: combine sums per rank before sending: less traffic, different bits. The sums are sent in fp32 ("fp32" or True)
            or rounded to the dtype of the rows ("rows")
        keep_empty_segments: each local expert has at least one row, for kernels that fail without rows
        max_routes_per_token: dense maps: the largest number of bits set for a token; None: no bound
        copies: copies of a token that dispatch sends between GPUs of one node: "per_route", one per row; "per_rank", one
            per rank, copied there to the token's other rows; "auto": per rank if the ranks are on several GPUs
        """
        self.num_experts, self.top_k, self.width = num_experts, top_k, width
        self.group, self._rank = group, group.rank
        self._given = DispatchOptions.of(**options)
        config = self._given.config(num_experts, top_k, width)
        handle = ctypes.c_void_p()
        check(lib.dispatcher_create(group._handle, byref(config), byref(handle)))
        self._own(lib.dispatcher_destroy, handle)
        self._handle: Optional[int] = handle.value
        self._stream = 0
        self._options: Any = None  # passed to the last set_stream

    # ---- Not collective ----

    def __repr__(self) -> str:
        sizes = [f"num_experts={self.num_experts}, top_k={self.top_k}, width={self.width}"]
        return f"Dispatcher({', '.join([*sizes, *self._given.changed()])}, rank {self._rank} of {self.group.size})"

    @property
    def strategy(self) -> str:
        """The strategy in use; if "auto" was requested, the one it chose."""
        name = ctypes.c_char_p()
        check(lib.dispatcher_strategy(self._handle, byref(name)))
        return (name.value or b"").decode()

    def set_stream(
        self, stream: Optional[int], *, max_sms: int = 0, max_begun_sms: int = 0, nccl_comm: int = 0
    ) -> None:
        """Queues later calls with tensors on a GPU in `stream`, a cudaStream_t (None or 0: the default stream).

        A new stream waits for the dispatcher's work in the previous one, which must still exist. max_sms limits the SMs of
        a call, max_begun_sms those of a begun call (0: max_sms). nccl_comm is an ncclComm_t with the group's ranks, for
        rows between nodes; set it before the first plan.
        """
        options = (stream or 0, max_sms, max_begun_sms, nccl_comm)
        if options == self._options:
            return
        given = DeviceOptions(
            stream=options[0], nccl_comm=nccl_comm, max_sms=max_sms, max_begun_sms=max_begun_sms
        )
        check(lib.set_device_options(self._handle, byref(given)))
        self._options = options
        self._stream = options[0]

    def check(self) -> None:
        """Raises the failure that poisoned the group, or one that a GPU has reported since the last call. Does not wait
        for the GPU."""
        check(lib.dispatcher_check(self._handle))

    def allocate_rows(self, plan: Plan, dtype: Any) -> Array:
        """Memory for rows [R, D] of this plan that combine and dispatch_backward can read without a copy."""
        output = COutput()
        check(lib.allocate_rows(self._handle, plan._handle, to_dtype(dtype), byref(output)))
        return result(output, 0, None, None, self._stream)

    def close(self) -> None:
        """Frees the dispatcher. Does nothing the second time."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._disown()
            lib.dispatcher_destroy(handle)

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # ---- Collective ----

    def plan(
        self,
        expert_ids: Optional[ArrayLike] = None,
        weights: Optional[ArrayLike] = None,
        mask: Optional[ArrayLike] = None,
        *,
        map: Optional[ArrayLike] = None,
    ) -> Plan:
        """All ranks agree on the number of rows each receives and on the final row of every route.

        expert_ids: [T, K] int32 or int64: an expert, or -1 for no route; distinct per token
        map: [T, E] bool, instead of expert_ids
        weights: [T, K], or [T, E] with a map; fp64, fp32, bf16 or fp16
        mask: [T] bool: true = padding, the token has no routes
        """
        marshal = Marshal(self._stream)
        routing = _new_routing()
        marshal.put(routing, _EXPERT_IDS, expert_ids)
        marshal.put(routing, _WEIGHTS, weights)
        marshal.put(routing, _MASK, mask)
        marshal.put(routing, _MAP, map)
        handle = ctypes.c_void_p()
        marshal.call(self._rank, lib.plan_create, self._handle, byref(routing), byref(handle))
        return Plan(handle.value, self)

    def dispatch(
        self,
        plan: Plan,
        x: ArrayLike,
        scales: Optional[ArrayLike] = None,
        *,
        row_weights: Any = False,
        rows: Optional[ArrayLike] = None,
        row_scales: Optional[ArrayLike] = None,
        num_chunks: int = 1,
        on_chunk: Optional[Callable[[Dispatched, int, int], None]] = None,
    ) -> Dispatched:
        """x [T, D] -> rows [R, D].

        x: fp64 (CPU only), fp32, bf16, fp16 or fp8 e4m3
        scales: with fp8: [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0
        row_weights: True: dispatch the weights too; or an array [R] that receives them
        rows, row_scales: outputs to write to
        num_chunks: at most this many chunks of whole local experts
        on_chunk: called as on_chunk(arrived, first_expert, last_expert) after each chunk, in expert order: the rows of
            these local experts and all row weights are complete. Must be passed on all ranks or on none, and must not
            use the group. If it raises, the call fails on all ranks; this rank raises its exception.
        """
        call = DispatchCall(self, plan, x, scales, row_weights, rows, row_scales, num_chunks, on_chunk)
        call.call(lib.dispatch, self._handle)
        return call.finish(self._stream)

    def dispatch_backward(
        self, plan: Plan, grad_rows: ArrayLike, *, grad_x: Optional[ArrayLike] = None
    ) -> Any:
        """Backward of dispatch: grad_rows [R, D] -> grad_x [T, D], the unweighted sum."""
        return self._move(lib.dispatch_backward, plan, grad_rows, grad_x)

    def combine(
        self, plan: Plan, y: ArrayLike, *, weighted: bool = True, out: Optional[ArrayLike] = None
    ) -> Any:
        """y [R, D] -> out [T, D]: the sum over each token's routes, weighted by the plan's weights.

        With weighted=False all weights are 1, for experts that applied the weights themselves.
        """
        return self._move(lib.combine if weighted else lib.combine_unweighted, plan, y, out)

    def combine_backward(
        self,
        plan: Plan,
        grad_out: ArrayLike,
        y: ArrayLike,
        *,
        grad_rows: Optional[ArrayLike] = None,
        grad_weights: Optional[ArrayLike] = None,
    ) -> CombineGradients:
        """Backward of combine: grad_out [T, D] and y [R, D], as in combine -> grad_rows [R, D], grad_weights [T, K]."""
        args, results, routes = _new_combine_backward_args(), _new_combine_backward_result(), None
        with Marshal(self._stream) as marshal:
            routes = handle_in("plan", plan, Plan)
            marshal.put(args, _GRAD_OUT, grad_out)
            marshal.put(args, _Y, y)
            marshal.put_output(results, _GRAD_ROWS, grad_rows)
            marshal.put_output(results, _GRAD_WEIGHTS, grad_weights)
        marshal.call(self._rank, lib.combine_backward, self._handle, routes, byref(args), byref(results))
        return CombineGradients(
            result(results, _GRAD_ROWS, grad_rows, grad_out, self._stream),
            result(results, _GRAD_WEIGHTS, grad_weights, grad_out, self._stream),
        )

    def collect_routes(self, plan: Plan, rows: ArrayLike, *, routes: Optional[ArrayLike] = None) -> Any:
        """Returns one value per row to its route: rows [R] fp32 or fp64 -> routes [T, K]; 0 in slots without a kept
        route. For example, the gradients of weights that the experts applied."""
        return self._move(lib.collect_routes, plan, rows, routes)

    # ---- In two halves, to overlap a call with computation ----

    def begin_dispatch(
        self,
        plan: Plan,
        x: ArrayLike,
        scales: Optional[ArrayLike] = None,
        *,
        row_weights: Any = False,
        rows: Optional[ArrayLike] = None,
        row_scales: Optional[ArrayLike] = None,
        num_chunks: int = 1,
    ) -> PendingDispatch:
        """Begins a dispatch. On a GPU it is queued in a separate stream; on the CPU it is complete. Its arrays must not
        be used before pending.finish() returns the results, except rows that pending.chunks() has yielded."""
        call = DispatchCall(self, plan, x, scales, row_weights, rows, row_scales, num_chunks, None)
        handle = ctypes.c_void_p()

        def finish() -> Dispatched:
            call.results = DispatchResult()
            self._finish(lib.finish_dispatch, handle, call.results)
            return call.finish(self._stream)

        def next_chunk() -> Optional[Tuple[Dispatched, int, int]]:
            results = DispatchResult()
            first, last = ctypes.c_int64(), ctypes.c_int64()
            if lib.next_chunk(self._handle, handle, byref(results), byref(first), byref(last)):
                fail(self._rank)
            return None if first.value < 0 else (call.arrived(results), first.value, last.value)

        begun = PendingDispatch(handle, finish, next_chunk)  # before the call: it owns what the call makes
        call.call(lib.begin_dispatch, self._handle, byref(handle))
        return begun

    def begin_combine(self, plan: Plan, y: ArrayLike, *, out: Optional[ArrayLike] = None) -> Pending:
        """Begins a weighted combine, as begin_dispatch does."""
        tensors, routes, handle = _Move(), None, ctypes.c_void_p()
        with Marshal(self._stream) as marshal:
            routes = handle_in("plan", plan, Plan)
            marshal.put(tensors, 0, y)
            marshal.put_output(tensors, _TARGET, out)
            marshal.keep_values(plan, y, out)

        def finish(_keep: Any = marshal) -> Any:
            output = COutput()
            self._finish(lib.finish_combine, handle, output)
            return result(output, 0, out, y, self._stream)

        begun = Pending(handle, finish)  # before the call: it owns what the call makes
        args = (byref(tensors), byref(tensors, _TARGET), byref(handle))
        marshal.call(self._rank, lib.begin_combine, self._handle, routes, *args)
        return begun

    def _finish(self, function: Any, handle: ctypes.c_void_p, results: ctypes.Structure) -> None:
        """Calls lib.finish_dispatch or finish_combine, which frees the pending call unless this dispatcher is closed."""
        dispatcher, pending, output = self._handle, handle.value, byref(results)
        if dispatcher is not None:
            handle.value = None  # no signal handler runs before the call: the handle is freed exactly once
        if function(dispatcher, pending, output):
            fail(self._rank)

    def _move(self, function: Any, plan: Plan, source: ArrayLike, target: Optional[ArrayLike]) -> Any:
        tensors, routes, stream = _Move(), None, self._stream
        with Marshal(stream) as marshal:
            routes = handle_in("plan", plan, Plan)
            marshal.put(tensors, 0, source)
            marshal.put_output(tensors, _TARGET, target)
        marshal.call(self._rank, function, self._handle, routes, byref(tensors), byref(tensors, _TARGET))
        return result(tensors, _TARGET, target, source, stream)
