"""The library's experts as a differentiable operator: `torch.ops.crossdock.expert_mlp`."""
import functools
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as functional

import crossdock

from . import kept
from .registration import define, refuse_gradient, save_nothing
from .tensors import gradient_memory, is_captured, stream_of, view_of, weights_dtype

_captured: List[Any] = []  # values that replays of CUDA graphs use


class _Segments:
    """Rows per expert, in the form that crossdock.Experts accepts instead of a plan."""

    def __init__(self, counts: torch.Tensor, device: torch.device):
        self.counts = counts.to(device, torch.int64).contiguous()
        self.starts = functional.pad(self.counts.cumsum(0), (1, 0))
        self.segment_counts_ptr = self.counts.data_ptr()
        self.segment_starts_ptr = self.starts.data_ptr()
        self.num_local_experts = self.counts.shape[0]


class Form(NamedTuple):
    """What the experts compute, and how their parameters are stored; see `crossdock.Experts`."""

    activation: str = "swiglu"
    limit: float = 7.0
    interleaved: bool = False
    transposed: bool = False
    weights_in: str = "combine"
    recompute: bool = False


@functools.lru_cache(maxsize=None)
def _experts_of(num_local_experts: int, width: int, inner: int, dtype: torch.dtype, form: Form) -> crossdock.Experts:
    """Shared by all modules, and kept: CUDA graphs may use it."""
    return crossdock.Experts(num_local_experts=num_local_experts, width=width, inner=inner, dtype=dtype, **form._asdict())


def _views(parameters: Sequence[Optional[torch.Tensor]]) -> crossdock.ExpertWeights:
    return crossdock.ExpertWeights(*(None if p is None else view_of(p) for p in parameters))


def _contiguous(*tensors: Optional[torch.Tensor]) -> List[Optional[torch.Tensor]]:
    return [tensor if tensor is None else tensor.contiguous() for tensor in tensors]


class _Call:
    """The inputs of a call, contiguous."""

    def __init__(self, rows, row_weights, w1, w2, b1, b2, counts, form: Form):
        self.rows, row_weights, *self.parameters = _contiguous(rows, row_weights, w1, w2, b1, b2)
        self.segments = _Segments(counts, rows.device)
        self.weights = _views(self.parameters)
        num_local_experts, width, inner = w2.mT.shape if form.transposed else w2.shape
        self.experts = _experts_of(num_local_experts, width, inner, rows.dtype, form)
        self.row_weights = view_of(row_weights) if row_weights is not None and form.weights_in == "experts" else None
        self.stream = stream_of(rows)

    def forward(self, keep: bool) -> Tuple[torch.Tensor, Any]:
        y = torch.empty_like(self.rows)
        inputs = (self.segments, self.weights, view_of(self.rows), self.row_weights)
        _, saved = self.experts.forward(*inputs, y=view_of(y), save=keep, stream=self.stream)
        if keep and is_captured(self.rows):
            _captured.append(saved)
        return y, saved


def _experts(
    rows: torch.Tensor,
    row_weights: Optional[torch.Tensor],
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional[torch.Tensor],
    b2: Optional[torch.Tensor],
    counts: torch.Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    transposed: bool,
    weights_in: str,
    recompute: bool,
    keep: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """rows [R, D], grouped by expert, row_weights [R] -> y [R, D] and, if `keep`, values for backward.

    Rows of no expert become zero.
    """
    form = Form(activation, limit, interleaved, transposed, weights_in, recompute)
    y, saved = _Call(rows, row_weights, w1, w2, b1, b2, counts, form).forward(keep)
    return y, kept.tensor_of(saved) if keep else kept.like_kept()


def _experts_backward(
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
    limit: float,
    interleaved: bool,
    transposed: bool,
    weights_in: str,
    recompute: bool,
    wanted: List[bool],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_y [R, D] -> the gradients of rows, row_weights, w1, w2, b1 and b2; those not wanted are empty."""
    form = Form(activation, limit, interleaved, transposed, weights_in, recompute)
    call = _Call(rows, row_weights, w1, w2, b1, b2, counts, form)
    grad_y, values = grad_y.contiguous(), kept.take(saved)
    if values is None:  # the graph is used a second time
        values = call.forward(True)[1]
    inputs = (call.segments, call.weights, view_of(call.rows), view_of(grad_y), values, call.row_weights)
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


def _fake_backward(grad_y, saved, rows, row_weights, w1, w2, b1, b2, counts, *options):
    wanted = options[-1]
    of_rows = rows.new_empty((rows.shape[0] if wanted[0] else 0,), dtype=weights_dtype(rows.dtype) if wanted[0] else rows.dtype)
    likes = (rows if parameter is None else parameter for parameter in (w1, w2, b1, b2))
    parameters = (p.new_empty(p.shape if want else (0,)) for p, want in zip(likes, wanted[1:]))
    return (torch.empty_like(rows), of_rows, *parameters)


def _save(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:7])
    ctx.form = Form(*inputs[7:13])


def _gradient(ctx: Any, grad_y: torch.Tensor, _: Any) -> Tuple:
    if grad_y is None:
        return (None,) * 14
    needs = ctx.needs_input_grad
    wanted = [needs[1] and ctx.form.weights_in == "experts", *needs[2:6]]
    grad_rows, *grads = expert_mlp_backward(grad_y, *ctx.saved_tensors, *ctx.form, wanted)
    return (grad_rows, *(grad if want else None for grad, want in zip(grads, wanted)), *(None,) * 8)


_INPUTS = (
    "Tensor rows, Tensor? row_weights, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, Tensor counts, str activation,"
    " float limit, bool interleaved, bool transposed, str weights_in, bool recompute"
)
expert_mlp = define(
    "expert_mlp",
    f"({_INPUTS}, bool keep) -> (Tensor, Tensor)",
    _experts,
    lambda rows, *_: (torch.empty_like(rows), kept.like_kept()),
    _save,
    _gradient,
)
expert_mlp_backward = define(
    "expert_mlp_backward",
    f"(Tensor grad_y, Tensor saved, {_INPUTS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _experts_backward,
    _fake_backward,
    save_nothing,
    refuse_gradient,
)
