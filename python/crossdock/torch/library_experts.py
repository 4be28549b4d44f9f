"""The library's experts as differentiable operators: `torch.ops.crossdock.swiglu_experts` and `grouped_mlp`."""
import functools
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as functional

import crossdock

from . import kept
from .registration import define, refuse_gradient, save_nothing
from .tensors import empty, view_of, weights_dtype

_OPTIONS = ("activation", "interleaved", "limit", "weights_in", "recompute")
_captured: List[Any] = []  # values that replays of CUDA graphs use


class _Segments:
    """Rows per expert, in the form that crossdock.Experts accepts instead of a plan."""

    def __init__(self, counts: torch.Tensor, device: torch.device):
        self.counts = counts.to(device, torch.int64).contiguous()
        self.starts = functional.pad(self.counts.cumsum(0), (1, 0))
        self.segment_counts_ptr = self.counts.data_ptr()
        self.segment_starts_ptr = self.starts.data_ptr()
        self.num_local_experts = self.counts.shape[0]


@functools.lru_cache(maxsize=None)
def _experts_of(num_local_experts: int, width: int, inner: int, dtype: torch.dtype, options: Tuple = ()) -> crossdock.Experts:
    """Shared by all modules, and kept: CUDA graphs may use it."""
    sizes = dict(num_local_experts=num_local_experts, width=width, inner=inner, dtype=dtype)
    return crossdock.Experts(**sizes, **dict(zip(_OPTIONS, options)))


def stream_of(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def gradient_memory(parameter: torch.Tensor, wanted: bool, dtype: Optional[torch.dtype] = None) -> Tuple[Any, Any]:
    """A tensor for a gradient and the argument for the call; empty if the gradient is not wanted.

    Default dtype: on a GPU the parameter's, on the CPU the dtype of the sums.
    """
    if not wanted:
        return parameter.new_empty(0), None
    if dtype is None:
        dtype = parameter.dtype if parameter.is_cuda else weights_dtype(parameter.dtype)
    return empty(parameter, parameter.shape, dtype)


def _forward(
    rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor, keep: bool
) -> Tuple[torch.Tensor, Any]:
    experts = _experts_of(*w2.shape, rows.dtype)
    y = torch.empty_like(rows)
    _, saved = experts.forward(
        _Segments(counts, rows.device),
        crossdock.ExpertWeights(view_of(w1), view_of(w2)),
        view_of(rows),
        y=view_of(y),
        save=keep,
        stream=stream_of(rows),
    )
    if keep and is_captured(rows):
        _captured.append(saved)
    return y, saved


def _experts(
    rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor, keep: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """rows [R, D], grouped by expert -> y [R, D] and, if `keep`, values for backward. Rows of no expert become zero."""
    y, saved = _forward(rows.contiguous(), w1.contiguous(), w2.contiguous(), counts, keep)
    return y, kept.tensor_of(saved) if keep else kept.like_kept()


def _experts_backward(
    grad_y: torch.Tensor,
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    counts: torch.Tensor,
    saved: torch.Tensor,
    wanted: List[bool],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_y [R, D] -> the gradients of rows, w1 and w2; gradients that are not wanted are empty."""
    grad_y, rows, w1, w2 = grad_y.contiguous(), rows.contiguous(), w1.contiguous(), w2.contiguous()
    values = kept.take(saved)
    if values is None:  # the graph is used a second time
        values = _forward(rows, w1, w2, counts, True)[1]
    experts = _experts_of(*w2.shape, rows.dtype)
    segments, stream = _Segments(counts, rows.device), stream_of(rows)
    call = (segments, crossdock.ExpertWeights(view_of(w1), view_of(w2)), view_of(rows), view_of(grad_y), values)
    grad_rows = torch.empty_like(rows)
    experts.backward_dx(*call, grad_rows=view_of(grad_rows), stream=stream)
    (grad_w1, memory_w1), (grad_w2, memory_w2) = map(gradient_memory, (w1, w2), wanted)
    if any(wanted):
        experts.backward_dw(*call, grads=crossdock.ExpertWeights(memory_w1, memory_w2), stream=stream)
    return grad_rows, grad_w1.to(w1.dtype), grad_w2.to(w2.dtype)


def _fake_backward(grad_y, rows, w1, w2, counts, saved, wanted):
    parameters = (p.new_empty(p.shape if want else (0,)) for p, want in zip((w1, w2), wanted))
    return (torch.empty_like(rows), *parameters)


def _save(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], output[1])


def _gradient(ctx: Any, grad_y: torch.Tensor, _: Any) -> Tuple:
    if grad_y is None:
        return (None,) * 5
    wanted = list(ctx.needs_input_grad[1:3])
    grad_rows, *grads = swiglu_experts_backward(grad_y, *ctx.saved_tensors, wanted)
    return (grad_rows, *(grad if want else None for grad, want in zip(grads, wanted)), None, None)


swiglu_experts = define(
    "swiglu_experts",
    "(Tensor rows, Tensor w1, Tensor w2, Tensor counts, bool keep) -> (Tensor, Tensor)",
    _experts,
    lambda rows, w1, w2, counts, keep: (torch.empty_like(rows), kept.like_kept()),
    _save,
    _gradient,
)
swiglu_experts_backward = define(
    "swiglu_experts_backward",
    "(Tensor grad_y, Tensor rows, Tensor w1, Tensor w2, Tensor counts, Tensor saved, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
    _experts_backward,
    _fake_backward,
    save_nothing,
    refuse_gradient,
)


# ---- With all options ----


class _MlpCall:
    """The inputs of a call, contiguous."""

    def __init__(self, rows, row_weights, w1, w2, b1, b2, counts, options: Tuple):
        given = (rows, row_weights, w1, w2, b1, b2)
        self.tensors = [None if tensor is None else tensor.contiguous() for tensor in given]
        self.views = [None if tensor is None else view_of(tensor) for tensor in self.tensors]
        self.rows, self.segments = self.tensors[0], _Segments(counts, rows.device)
        self.weights = crossdock.ExpertWeights(*self.views[2:])
        self.experts = _experts_of(*w2.shape, rows.dtype, options)
        self.stream = stream_of(rows)
        in_experts = options[3] == "experts"
        self.row_weights = self.views[1] if in_experts else None

    def forward(self, keep: bool) -> Tuple[torch.Tensor, Any]:
        y = torch.empty_like(self.rows)
        inputs = (self.segments, self.weights, self.views[0], self.row_weights)
        _, saved = self.experts.forward(*inputs, y=view_of(y), save=keep, stream=self.stream)
        if keep and is_captured(self.rows):
            _captured.append(saved)
        return y, saved


def _mlp(
    rows: torch.Tensor,
    row_weights: Optional[torch.Tensor],
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional[torch.Tensor],
    b2: Optional[torch.Tensor],
    counts: torch.Tensor,
    activation: str,
    interleaved: bool,
    limit: float,
    weights_in: str,
    recompute: bool,
    keep: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """rows [R, D], row_weights [R] -> y [R, D] and, if `keep`, values for backward."""
    options = (activation, interleaved, limit, weights_in, recompute)
    y, saved = _MlpCall(rows, row_weights, w1, w2, b1, b2, counts, options).forward(keep)
    return y, kept.tensor_of(saved) if keep else kept.like_kept()


def _mlp_backward(
    grad_y: torch.Tensor,
    saved: torch.Tensor,
    rows: torch.Tensor,
    row_weights: Optional[torch.Tensor],
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional[torch.Tensor],
    b2: Optional[torch.Tensor],
    counts: torch.Tensor,
    activation: str,
    interleaved: bool,
    limit: float,
    weights_in: str,
    recompute: bool,
    wanted: List[bool],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_y [R, D] -> the gradients of rows, row_weights, w1, w2, b1 and b2; those not wanted are empty."""
    options = (activation, interleaved, limit, weights_in, recompute)
    call = _MlpCall(rows, row_weights, w1, w2, b1, b2, counts, options)
    grad_y, values = grad_y.contiguous(), kept.take(saved)
    if values is None:  # the graph is used a second time
        values = call.forward(True)[1]
    inputs = (call.segments, call.weights, call.views[0], view_of(grad_y), values, call.row_weights)
    grad_rows = torch.empty_like(call.rows)
    sums = weights_dtype(rows.dtype)
    grad_row_weights, memory = gradient_memory(rows.new_empty(rows.shape[0]), wanted[0], sums)
    of_weights = False if memory is None else memory
    call.experts.backward_dx(*inputs, grad_rows=view_of(grad_rows), grad_row_weights=of_weights, stream=call.stream)
    likes = [rows if parameter is None else parameter for parameter in (w1, w2, b1, b2)]
    made = [gradient_memory(*one) for one in zip(likes, wanted[1:], (None, None, sums, sums))]
    if any(wanted[1:]):
        outputs = crossdock.ExpertWeights(*(memory for _, memory in made))
        call.experts.backward_dw(*inputs, grads=outputs, stream=call.stream)
    return (grad_rows, grad_row_weights, *(grad.to(like.dtype) for (grad, _), like in zip(made, likes)))


def _fake_mlp_backward(grad_y, saved, rows, row_weights, w1, w2, b1, b2, counts, *options):
    wanted = options[-1]
    of_rows = rows.new_empty((rows.shape[0] if wanted[0] else 0,), dtype=weights_dtype(rows.dtype) if wanted[0] else rows.dtype)
    likes = (rows if parameter is None else parameter for parameter in (w1, w2, b1, b2))
    parameters = (p.new_empty(p.shape if want else (0,)) for p, want in zip(likes, wanted[1:]))
    return (torch.empty_like(rows), of_rows, *parameters)


def _save_mlp(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.options = inputs[7:12]


def _mlp_gradient(ctx: Any, grad_y: torch.Tensor, _: Any) -> Tuple:
    if grad_y is None:
        return (None,) * 13
    saved, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    is_weighted = needs[1] and ctx.options[3] == "experts"
    wanted = [is_weighted, *needs[2:6]]
    grad_rows, *grads = grouped_mlp_backward(grad_y, saved, *tensors, *ctx.options, wanted)
    return (grad_rows, *(grad if want else None for grad, want in zip(grads, wanted)), *(None,) * 7)


_MLP = (
    "Tensor rows, Tensor? row_weights, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, Tensor counts, str activation,"
    " bool interleaved, float limit, str weights_in, bool recompute"
)
grouped_mlp = define(
    "grouped_mlp",
    f"({_MLP}, bool keep) -> (Tensor, Tensor)",
    _mlp,
    lambda rows, *_: (torch.empty_like(rows), kept.like_kept()),
    _save_mlp,
    _mlp_gradient,
)
grouped_mlp_backward = define(
    "grouped_mlp_backward",
    f"(Tensor grad_y, Tensor saved, {_MLP}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _mlp_backward,
    _fake_mlp_backward,
    save_nothing,
    refuse_gradient,
)
