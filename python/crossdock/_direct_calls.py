"""The calls of a dispatcher with memory given by address, for other parts of the package: faster if tensors are already
described. Their structs are made once; every call overwrites everything that an earlier one left in them."""
import ctypes
import struct
from ctypes import byref
from typing import Any, Dict, Optional, Tuple

from ._abi import (
    CombineBackwardArgs,
    CombineBackwardResult,
    COutput,
    CTensor,
    DispatchArgs,
    DispatchResult,
    PlanInfo,
    Routing,
    maker,
)
from ._errors import fail
from ._library import lib
from ._plan import Plan
from ._tensor import TENSOR_FORMAT, Array, Memory, Refused, named_refusal, result

# Consecutive tensors. Format character x: a byte set to 0.
_NO_TENSOR = f"{ctypes.sizeof(CTensor)}x"
_NO_OUTPUT = f"{ctypes.sizeof(COutput)}x"
_OUTPUT = TENSOR_FORMAT + "8x"  # a tensor and its owner
_put_ids = struct.Struct("=" + TENSOR_FORMAT + _NO_TENSOR + TENSOR_FORMAT).pack_into  # Routing: expert_ids, map, weights
_put_map = struct.Struct("=" + _NO_TENSOR + TENSOR_FORMAT + TENSOR_FORMAT).pack_into
_put_x = struct.Struct("=" + TENSOR_FORMAT + _NO_TENSOR + "i").pack_into  # DispatchArgs: x, scales, with_row_weights
_put_rows = struct.Struct("=" + _OUTPUT + _NO_OUTPUT + _OUTPUT).pack_into  # DispatchResult: rows, row_scales, row_weights
_put_inputs = struct.Struct("=" + TENSOR_FORMAT + TENSOR_FORMAT).pack_into
_put_outputs = struct.Struct("=" + _OUTPUT + _OUTPUT).pack_into
_put_move = struct.Struct("=" + TENSOR_FORMAT + _OUTPUT).pack_into

_ROUTES = Routing.expert_ids.offset
_X = DispatchArgs.x.offset
_ROWS = DispatchResult.rows.offset
_GRAD_OUT = CombineBackwardArgs.grad_out.offset
_GRAD_ROWS = CombineBackwardResult.grad_rows.offset
_new_info = maker(PlanInfo)
_create_plan = lib.plan_create_described
_dispatch = lib.dispatch

#: An output that the library provides, or none at all.
NOT_GIVEN = Memory((0,) * 9)


class _Move(ctypes.Structure):
    _fields_ = [("source", CTensor), ("target", COutput)]


class DirectCalls:
    """The calls of one dispatcher, one at a time: the caller must hold a lock. A tensor is a `Memory`, which the caller
    keeps alive, or `Refused`. Outputs are contiguous and have the exact shape."""

    def __init__(self, dispatcher: Any):
        self._dispatcher = dispatcher
        self._routing, self._plan = Routing(), ctypes.c_void_p()
        self._args, self._results = DispatchArgs(), DispatchResult()
        self._inputs, self._grads = CombineBackwardArgs(), CombineBackwardResult()
        self._move = _Move()
        self._routing_ref, self._plan_ref = byref(self._routing), byref(self._plan)
        self._args_ref, self._results_ref = byref(self._args), byref(self._results)
        self._inputs_ref, self._grads_ref = byref(self._inputs), byref(self._grads)
        self._source_ref, self._target_ref = byref(self._move), byref(self._move, _Move.target.offset)

    def plan(
        self, routing: Memory, weights: Memory, is_map: bool, rows_per_expert: Optional[ctypes.Array]
    ) -> Tuple[Optional[int], PlanInfo]:
        """The handle of a new plan, which the caller owns, and its sizes.

        routing: expert ids [T, K] or a map [T, E]
        rows_per_expert: int64 [E_local], receives the rows of each local expert, pad rows included, if the plan is on the host
        """
        (_put_map if is_map else _put_ids)(self._routing, _ROUTES, *routing, *weights)
        info = _new_info()
        handle = self._dispatcher._handle
        given = {"map" if is_map else "expert_ids": routing, "weights": weights}
        self._call(given, _create_plan, handle, self._routing_ref, byref(info), rows_per_expert, self._plan_ref)
        return self._plan.value, info

    def dispatch(self, plan: Plan, x: Memory, rows: Memory, row_weights: Optional[Memory] = None) -> Optional[Array]:
        """x [T, D] -> rows [R, D], row_weights [R] unless None. Returns the rows if they were NOT_GIVEN."""
        _put_x(self._args, _X, *x, row_weights is not None)
        _put_rows(self._results, _ROWS, *rows, *(row_weights or NOT_GIVEN))
        given = {"x": x, "rows": rows, "row_weights": row_weights}
        self._call(given, _dispatch, self._dispatcher._handle, plan._handle, self._args_ref, self._results_ref)
        return self._result(self._results, _ROWS) if rows is NOT_GIVEN else None

    def move(self, function: Any, plan: Plan, source: Memory, target: Memory) -> None:
        """Calls lib.dispatch_backward, combine, combine_unweighted or collect_routes."""
        _put_move(self._move, 0, *source, *target)
        given = {"input": source, "result": target}
        self._call(given, function, self._dispatcher._handle, plan._handle, self._source_ref, self._target_ref)

    def combine_backward(
        self, plan: Plan, grad_out: Memory, y: Memory, grad_rows: Memory, grad_weights: Memory
    ) -> Optional[Array]:
        """grad_out [T, D], y [R, D] -> grad_rows [R, D], grad_weights [T, K]. Returns grad_rows if they were NOT_GIVEN."""
        _put_inputs(self._inputs, _GRAD_OUT, *grad_out, *y)
        _put_outputs(self._grads, _GRAD_ROWS, *grad_rows, *grad_weights)
        given = {"grad_out": grad_out, "y": y, "grad_rows": grad_rows, "grad_weights": grad_weights}
        handle = self._dispatcher._handle
        self._call(given, lib.combine_backward, handle, plan._handle, self._inputs_ref, self._grads_ref)
        return self._result(self._grads, _GRAD_ROWS) if grad_rows is NOT_GIVEN else None

    def _result(self, struct_: ctypes.Structure, offset: int) -> Array:
        return result(struct_, offset, None, None, self._dispatcher._stream)

    def _call(self, given: Dict[str, Optional[Memory]], function: Any, *args: Any) -> None:
        """Calls a collective function. If one of its tensors is Refused, all ranks are told why."""
        refused = next(((name, memory) for name, memory in given.items() if type(memory) is Refused), None)
        if refused is None:
            if function(*args):
                fail(self._dispatcher._rank)
            return
        name, memory = refused
        try:
            lib.refuse_next_call(named_refusal(name, memory.error))
            status = function(*args)
        finally:
            lib.refuse_next_call(None)
        if status:
            fail(self._dispatcher._rank, memory.error)
