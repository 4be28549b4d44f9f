"""The library's experts as a differentiable operator: `torch.ops.crossdock.swiglu_experts`."""
import functools
from typing import Any, List, Optional, Tuple

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


@functools.lru_cache(maxsize=None)
def _experts_of(num_local_experts: int, width: int, inner: int, dtype: torch.dtype) -> crossdock.Experts:
    """Shared by all modules, and kept: CUDA graphs may use it."""
    return crossdock.Experts(num_local_experts=num_local_experts, width=width, inner=inner, dtype=dtype)


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
