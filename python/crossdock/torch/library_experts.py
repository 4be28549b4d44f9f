"""The library's experts as a differentiable operator: `torch.ops.crossdock.expert_mlp`."""
import functools
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as functional

import crossdock

from . import kept
from .registration import define, refuse_gradient, save_nothing
from .tensors import empty, view_of, weights_dtype

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


@functools.lru_cache(maxsize=None)
def _experts_of(num_local_experts: int, width: int, inner: int, dtype: torch.dtype, form: Form) -> crossdock.Experts:
    """Shared by all modules, and kept: CUDA graphs may use it."""
    return crossdock.Experts(num_local_experts=num_local_experts, width=width, inner=inner, dtype=dtype, **form._asdict())


def _experts_for(rows: torch.Tensor, w2: torch.Tensor, form: Form) -> crossdock.Experts:
    num_local_experts, width, inner = w2.mT.shape if form.transposed else w2.shape
    return _experts_of(num_local_experts, width, inner, rows.dtype, form)


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


def _views(parameters: Sequence[Optional[torch.Tensor]]) -> crossdock.ExpertWeights:
    return crossdock.ExpertWeights(*(None if p is None else view_of(p) for p in parameters))


def _contiguous(*tensors: Optional[torch.Tensor]) -> List[Optional[torch.Tensor]]:
    return [tensor if tensor is None else tensor.contiguous() for tensor in tensors]


def _forward(rows: torch.Tensor, parameters: Sequence, counts: torch.Tensor, form: Form, keep: bool) -> Tuple[torch.Tensor, Any]:
    y = torch.empty_like(rows)
    _, saved = _experts_for(rows, parameters[1], form).forward(
        _Segments(counts, rows.device),
        _views(parameters),
        view_of(rows),
        y=view_of(y),
        save=keep,
        stream=stream_of(rows),
    )
    if keep and is_captured(rows):
        _captured.append(saved)
    return y, saved


def _experts(
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional[torch.Tensor],
    b2: Optional[torch.Tensor],
    counts: torch.Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    transposed: bool,
    keep: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """rows [R, D], grouped by expert -> y [R, D] and, if `keep`, values for backward. Rows of no expert become zero."""
    rows, *parameters = _contiguous(rows, w1, w2, b1, b2)
    y, saved = _forward(rows, parameters, counts, Form(activation, limit, interleaved, transposed), keep)
    return y, kept.tensor_of(saved) if keep else kept.like_kept()


def _experts_backward(
    grad_y: torch.Tensor,
    rows: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: Optional[torch.Tensor],
    b2: Optional[torch.Tensor],
    counts: torch.Tensor,
    saved: torch.Tensor,
    activation: str,
    limit: float,
    interleaved: bool,
    transposed: bool,
    wanted: List[bool],
) -> Tuple[torch.Tensor, ...]:
    """grad_y [R, D] -> the gradients of rows and of the parameters; gradients that are not wanted are empty."""
    grad_y, rows, *parameters = _contiguous(grad_y, rows, w1, w2, b1, b2)
    form = Form(activation, limit, interleaved, transposed)
    values = kept.take(saved)
    if values is None:  # the graph is used a second time
        values = _forward(rows, parameters, counts, form, True)[1]
    experts = _experts_for(rows, w2, form)
    segments, stream = _Segments(counts, rows.device), stream_of(rows)
    call = (segments, _views(parameters), view_of(rows), view_of(grad_y), values)
    grad_rows = torch.empty_like(rows)
    experts.backward_dx(*call, grad_rows=view_of(grad_rows), stream=stream)
    sums = weights_dtype(rows.dtype)
    made = [
        gradient_memory(rows if p is None else p, want, None if index < 2 else sums)
        for index, (p, want) in enumerate(zip(parameters, wanted))
    ]
    if any(wanted):
        experts.backward_dw(*call, grads=crossdock.ExpertWeights(*(memory for _, memory in made)), stream=stream)
    return (grad_rows, *(grad.to(rows.dtype) for grad, _ in made))


def _fake_backward(grad_y, rows, w1, w2, b1, b2, counts, saved, activation, limit, interleaved, transposed, wanted):
    parameters = (rows.new_empty(p.shape if want else (0,)) for p, want in zip((w1, w2, b1, b2), wanted))
    return (torch.empty_like(rows), *parameters)


def _save(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.form = inputs[6:10]


def _gradient(ctx: Any, grad_y: torch.Tensor, _: Any) -> Tuple:
    if grad_y is None:
        return (None,) * 11
    wanted = list(ctx.needs_input_grad[1:5])
    grad_rows, *grads = expert_mlp_backward(grad_y, *ctx.saved_tensors, *ctx.form, wanted)
    return (grad_rows, *(grad if want else None for grad, want in zip(grads, wanted)), *(None,) * 6)


_PARAMETERS = "Tensor rows, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, Tensor counts"
_FORM = "str activation, float limit, bool interleaved, bool transposed"

expert_mlp = define(
    "expert_mlp",
    f"({_PARAMETERS}, {_FORM}, bool keep) -> (Tensor, Tensor)",
    _experts,
    lambda rows, *_: (torch.empty_like(rows), kept.like_kept()),
    _save,
    _gradient,
)
expert_mlp_backward = define(
    "expert_mlp_backward",
    f"(Tensor grad_y, {_PARAMETERS}, Tensor saved, {_FORM}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _experts_backward,
    _fake_backward,
    save_nothing,
    refuse_gradient,
)


def swiglu_experts(
    rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor, keep: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """expert_mlp without biases."""
    return expert_mlp(rows, w1, w2, None, None, counts, *Form(), keep)
