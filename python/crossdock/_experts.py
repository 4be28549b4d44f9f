"""Experts: a grouped MLP over the rows of a plan."""
import ctypes
from ctypes import byref
from typing import Any, NamedTuple, Optional, Tuple, Union

from ._abi_layer import CExpertWeights, ExpertsBackwardArgs, ExpertsConfig, ExpertsForwardArgs, Segments
from ._dispatcher import choice
from ._dtype import DType, to_dtype
from ._errors import check
from ._library import lib
from ._owner import Owner, Shared
from ._plan import Plan
from ._tensor import ArrayLike, Marshal

ACTIVATIONS = {
    "swiglu": 0,
    "clamped_swiglu": 1,
    "geglu": 2,
    "gelu": 3,
    "gelu_tanh": 4,
    "squared_relu": 5,
    "geglu_tanh": 6,
    "limited_swiglu": 7,
}
GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_tanh", "limited_swiglu")  # of two halves: w1 has 2F rows
WEIGHTS_IN = {"combine": 0, "experts": 1}


class ExpertWeights(NamedTuple):
    """Parameters of all local experts, or arrays for their gradients (fp32, or fp64 for fp64; None: not computed).

    On a GPU the gradients of w1 and w2 may have the dtype of the experts instead, but then cannot be accumulated.
    G is 2F for activations with a gate, else F. The last two dimensions of w1 and w2 are exchanged with `transposed`.
    """

    w1: Any  #: [E_local, G, D]: gate rows, then linear rows (or interleaved)
    w2: Any  #: [E_local, D, F]
    b1: Any = None  #: [E_local, G]
    b2: Any = None  #: [E_local, D]


class ExpertsSaved(Owner):
    """Values of one forward that its backward needs. After a capture in a CUDA graph, keep it as long as the graph."""

    def __init__(self, handle: Optional[int]):
        self._own(lib.experts_saved_destroy, handle)
        self._handle = handle


def experts_config(
    num_local_experts: int,
    width: int,
    inner: int,
    dtype: Any,
    activation: str = "swiglu",
    limit: Optional[float] = None,
    interleaved: bool = False,
    weights_in: str = "combine",
    recompute: bool = False,
    transposed: bool = False,
) -> ExpertsConfig:
    return ExpertsConfig(
        num_local_experts=num_local_experts,
        width=width,
        inner=inner,
        limit=limit or 0,
        dtype=to_dtype(dtype),
        activation=choice("activation", activation, ACTIVATIONS),
        interleaved=interleaved,
        weights_in=choice("weights_in", weights_in, WEIGHTS_IN),
        recompute=recompute,
        transposed=transposed,
    )


def put_expert_weights(marshal: Marshal, struct: ctypes.Structure, offset: int, given: Any, are_outputs: bool) -> None:
    """Writes an ExpertWeights at this offset; None: no tensors."""
    if given is None:
        return
    put = marshal.put_output if are_outputs else marshal.put
    for (name, *_), value in zip(CExpertWeights._fields_, given):
        put(struct, offset + getattr(CExpertWeights, name).offset, value)


class Experts(Shared):
    """A grouped MLP. Not collective.

    Methods take the plan whose rows they compute, and the parameters as an ExpertWeights. All arrays are in host memory
    or, like the plan, on a GPU. Outputs may be passed; otherwise they are numpy arrays, or on a GPU a crossdock.Array.
    On a GPU calls queue their work in `stream`, a cudaStream_t, and do not wait; None: the stream of the plan's
    dispatcher. Backward must use the stream of its forward. A plan of your own needs the attributes segment_starts_ptr,
    segment_counts_ptr and num_local_experts; all outputs and the stream must then be passed.
    """

    def __init__(
        self,
        *,
        num_local_experts: int,
        width: int,
        inner: int,
        dtype: Any = "fp32",
        activation: str = "swiglu",
        limit: Optional[float] = None,
        interleaved: bool = False,
        weights_in: str = "combine",
        recompute: bool = False,
        transposed: bool = False,
    ):
        """num_local_experts, width, inner: E_local, D and F
        dtype: of rows, y, weights and biases: fp64, fp32, bf16 or fp16
        activation: "swiglu", "clamped_swiglu" or "limited_swiglu" (with `limit`, 7), "geglu", "geglu_tanh", "gelu", "gelu_tanh" or
            "squared_relu"
        interleaved: rows of w1 are gate 0, linear 0, gate 1, ...
        weights_in: where the weights of the routes are applied: "combine" or "experts"
        recompute: forward saves nothing; backward recomputes, with the same bits
        transposed: w1 is [E_local, D, G] and w2 [E_local, F, D], and so are their gradients; in host memory only
        """
        config = experts_config(
            num_local_experts, width, inner, dtype, activation, limit, interleaved, weights_in, recompute, transposed
        )
        handle = ctypes.c_void_p()
        check(lib.experts_create(byref(config), byref(handle)))
        self._own(lib.experts_destroy, handle)
        self._handle = handle.value
        self._dtype = DType(config.dtype)

    def forward(
        self,
        plan: Plan,
        weights: ExpertWeights,
        rows: ArrayLike,
        row_weights: Optional[ArrayLike] = None,
        *,
        y: Optional[ArrayLike] = None,
        save: bool = True,
        stream: Optional[int] = None,
    ) -> Tuple[Any, Optional[ExpertsSaved]]:
        """rows [R, D] -> (y [R, D], values for backward). row_weights [R]: with weights_in="experts"."""
        y = self._rows(plan, rows, y)
        stream = _stream(plan, stream)
        marshal = Marshal(stream)
        args = ExpertsForwardArgs(segments=_segments(plan), stream=stream)
        put_expert_weights(marshal, args, ExpertsForwardArgs.weights.offset, weights, False)
        marshal.put(args, ExpertsForwardArgs.rows.offset, rows)
        marshal.put(args, ExpertsForwardArgs.row_weights.offset, row_weights)
        marshal.put_output(args, ExpertsForwardArgs.y.offset, y)
        handle = ctypes.c_void_p()
        marshal.call_alone(lib.experts_forward, self._handle, byref(args), byref(handle) if save else None)
        return y, ExpertsSaved(handle.value) if save else None

    def backward_dx(
        self,
        plan: Plan,
        weights: ExpertWeights,
        rows: ArrayLike,
        grad_y: ArrayLike,
        saved: ExpertsSaved,
        row_weights: Optional[ArrayLike] = None,
        *,
        grad_rows: Optional[ArrayLike] = None,
        grad_row_weights: Union[ArrayLike, bool] = False,
        stream: Optional[int] = None,
    ) -> Tuple[Any, Any]:
        """Gradients of the rows [R, D] and, if requested (True, or an array [R]; on a GPU an array), of their weights.

        grad_y [R, D] is the dispatched gradient of the combined output, not yet multiplied by the row's weight.
        row_weights [R] are the weights of the rows, whoever applied them; None: 1. Prepares `saved` for backward_dw.
        """
        grad_rows = self._rows(plan, rows, grad_rows)
        if isinstance(grad_row_weights, bool):
            grad_row_weights = _vector(plan, rows, self._dtype) if grad_row_weights else None
        marshal = Marshal(_stream(plan, stream))
        args = self._backward_args(marshal, plan, weights, rows, grad_y, row_weights)
        marshal.put_output(args, ExpertsBackwardArgs.grad_rows.offset, grad_rows)
        marshal.put_output(args, ExpertsBackwardArgs.grad_row_weights.offset, grad_row_weights)
        marshal.call_alone(lib.experts_backward_dx, self._handle, byref(args), saved._handle)
        return grad_rows, grad_row_weights

    def backward_dw(
        self,
        plan: Plan,
        weights: ExpertWeights,
        rows: ArrayLike,
        grad_y: ArrayLike,
        saved: ExpertsSaved,
        row_weights: Optional[ArrayLike] = None,
        *,
        grads: ExpertWeights,
        accumulate: bool = False,
        stream: Optional[int] = None,
    ) -> None:
        """Writes the gradients of the parameters to `grads`, or adds them; at any time after backward_dx."""
        marshal = Marshal(_stream(plan, stream))
        args = self._backward_args(marshal, plan, weights, rows, grad_y, row_weights)
        put_expert_weights(marshal, args, ExpertsBackwardArgs.grads.offset, grads, True)
        args.accumulate = accumulate
        marshal.call_alone(lib.experts_backward_dw, self._handle, byref(args), saved._handle)

    @staticmethod
    def _backward_args(marshal, plan, weights, rows, grad_y, row_weights) -> ExpertsBackwardArgs:
        args = ExpertsBackwardArgs(segments=_segments(plan), stream=marshal.stream)
        put_expert_weights(marshal, args, ExpertsBackwardArgs.weights.offset, weights, False)
        marshal.put(args, ExpertsBackwardArgs.rows.offset, rows)
        marshal.put(args, ExpertsBackwardArgs.row_weights.offset, row_weights)
        marshal.put(args, ExpertsBackwardArgs.grad_y.offset, grad_y)
        return args

    def _rows(self, plan: Plan, rows: Any, given: Any) -> Any:
        """The output [R, D] that was passed, or a new one like `rows`."""
        if given is not None:
            return given
        if plan.device is not None:
            return plan._dispatcher.allocate_rows(plan, self._dtype)
        import numpy

        return numpy.empty_like(rows if isinstance(rows, numpy.ndarray) else rows.numpy(), order="C", subok=False)


def _segments(plan: Plan) -> Segments:
    return Segments(plan.segment_starts_ptr, plan.segment_counts_ptr, plan.num_local_experts)


def _stream(plan: Plan, given: Optional[int]) -> int:
    return plan._dispatcher._stream if given is None else given


def _vector(plan: Plan, rows: Any, dtype: DType) -> Any:
    if plan.device is not None:
        raise ValueError("grad_row_weights must be an array [R] for rows on a GPU, got True")
    import numpy

    return numpy.empty(rows.shape[0], numpy.float64 if dtype == DType.F64 else numpy.float32)
