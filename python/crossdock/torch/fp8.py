"""Rows in fp8: `quantise_rows`, `dequantise_rows`, and dispatches that send fp8 forward and 16 bits backward."""
from typing import Any, Dict, NamedTuple, NoReturn, Optional, Tuple

import torch

import crossdock
from crossdock._fp8 import scale_type

from . import calls, ops
from .core import core_of
from .registration import define, save_nothing
from .tensors import contiguous, view_of

WIRES = (None, "fp8")
WIRE_ROWS = ("bf16", "fp8")


class QuantisedRows(NamedTuple):
    """Rows in fp8 with their scales."""

    values: torch.Tensor  #: [T, D] float8_e4m3fn
    scales: torch.Tensor  #: [T, ceil(D/128)] float32 or [T, ceil(D/32)] float8_e8m0fnu


def _fp8_dtype(name: str, since: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise RuntimeError(f"torch.{name} needs torch {since} or later, this is {torch.__version__}")
    return dtype


def _scales_dtype(group: int) -> torch.dtype:
    return torch.float32 if scale_type(group) == crossdock.DType.F32 else _fp8_dtype("float8_e8m0fnu", "2.7")


def _stream_of(tensor: torch.Tensor) -> Optional[int]:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def _require_rows(name: str, rows: Any) -> None:
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        found = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise TypeError(f"{name} must be a tensor with 2 dimensions, got {found}")


# ---- Quantise ----


def _fake_quantise(x, group, scale, amax_floor):
    _require_rows("x", x)
    values = torch.empty(x.shape, dtype=_fp8_dtype("float8_e4m3fn", "2.1"), device=x.device)
    num_scales = (x.shape[1] + group - 1) // group
    return values, torch.empty((x.shape[0], num_scales), dtype=_scales_dtype(group), device=x.device)


def _quantise(x, group, scale, amax_floor):
    values, scales = _fake_quantise(x, group, scale, amax_floor)
    x = contiguous(x)
    outputs: Dict[str, Any] = dict(values=view_of(values), scales=view_of(scales), stream=_stream_of(x))
    crossdock.quantise_rows(view_of(x), group=group, scale=scale, amax_floor=amax_floor, **outputs)
    return values, scales


def _no_gradient(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "crossdock: no gradient passes through quantise_rows and dequantise_rows; quantise x.detach(), or let "
        'Dispatcher(wire="fp8") do it, whose backward passes gradients straight through'
    )


_quantise_operator = define(
    "quantise_rows",
    "(Tensor x, int group, str scale, float amax_floor) -> (Tensor, Tensor)",
    _quantise,
    _fake_quantise,
    save_nothing,
    _no_gradient,
)


def quantise_rows(
    x: torch.Tensor, group: int = 128, scale: str = "pow2", amax_floor: float = 0.0
) -> QuantisedRows:
    """Rounds x [T, D] to fp8 e4m3, with a scale for each group of consecutive values of a row. Not collective.

    The bits are the same on CPUs and GPUs, and a row's depend on that row alone; docs/numerics.md has the formulas. No
    gradient passes: backward raises an error if it gets here.

    Args:
        x: fp32, bf16 or fp16. Any strides.
        group: 128 with fp32 scales, or 32 with e8m0 scales (MXFP8).
        scale: "pow2", the smallest power of two that is at least amax / 448, with amax the largest magnitude of the group;
            or "exact", amax / 448, with groups of 128.
        amax_floor: amax is at least this. scale="exact" with 1e-4 is DeepEP's per_token_cast_to_fp8.
    """
    _require_rows("x", x)
    return QuantisedRows(*_quantise_operator(x, group, scale, float(amax_floor)))


# ---- And back ----


def _fake_dequantise(values, scales, dtype):
    return torch.empty(values.shape, dtype=dtype, device=values.device)


def _dequantise(values, scales, dtype):
    values, scales = contiguous(values), contiguous(scales)
    out = _fake_dequantise(values, scales, dtype)
    crossdock.dequantise_rows(view_of(values), view_of(scales), out=view_of(out), stream=_stream_of(values))
    return out


_dequantise_operator = define(
    "dequantise_rows",
    "(Tensor values, Tensor scales, ScalarType dtype) -> Tensor",
    _dequantise,
    _fake_dequantise,
    save_nothing,
    _no_gradient,
)


def dequantise_rows(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """values [R, D] times the scales of their groups, rounded once to bf16, fp16 or fp32. Not collective.

    bf16 holds the products with powers of two exactly.
    """
    _require_rows("values", values)
    _require_rows("scales", scales)
    return _dequantise_operator(values, scales, dtype)


# ---- Dispatch ----


def _rows_dtype(x: torch.Tensor) -> torch.dtype:
    """Of the rows for experts, and of the gradients that backward sends."""
    return torch.float16 if x.dtype == torch.float16 else torch.bfloat16


def _anchor(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1, 1), dtype=_rows_dtype(x), device=x.device).expand(rows.shape)


def _dispatch(x, routing, weights, dispatcher, with_row_weights, keep_fp8):
    try:
        values, scales = _quantise(x, 128, "pow2", 0.0)
    except Exception as error:
        core_of(dispatcher).refuse(error)
    rows, row_weights, counts, plan, row_scales = calls.dispatch_scaled(
        values, routing, weights, dispatcher, with_row_weights, scales
    )
    if row_weights is None:  # operators return tensors only
        row_weights = weights.new_empty(0)
    if keep_fp8:
        return rows, row_weights, counts, plan, row_scales, _anchor(x, rows)
    unused = row_scales.new_empty(0)
    return _dequantise(rows, row_scales, _rows_dtype(x)), row_weights, counts, plan, unused, unused.clone()


def _fake_dispatch(x, routing, weights, dispatcher, with_row_weights, keep_fp8):
    rows, row_weights, counts, plan = ops._fake_dispatch(x, routing, weights, dispatcher, with_row_weights)
    values, scales = _fake_quantise(x, 128, "pow2", 0.0)
    if keep_fp8:
        row_scales = scales.new_empty((rows.shape[0], scales.shape[1]))
        return values.new_empty(rows.shape), row_weights, counts, plan, row_scales, _anchor(x, rows)
    return rows.to(_rows_dtype(x)), row_weights, counts, plan, scales.new_empty(0), scales.new_empty(0)


def _save_dispatch(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    x, keep_fp8 = inputs[0], inputs[5]
    ops._save_dispatch(ctx, inputs[:5], output[:4])
    num_tokens, shape, _, weights_dtype = ctx.like
    ctx.like = (num_tokens, shape, _rows_dtype(x), weights_dtype)
    ctx.keep_fp8 = keep_fp8
    if keep_fp8:
        ctx.mark_non_differentiable(output[0], output[2], output[3], output[4])
    else:
        ctx.mark_non_differentiable(output[2], output[3], output[4], output[5])


def _grad_dispatch(ctx: Any, grad_rows, grad_row_weights, _counts, _plan, _scales, grad_anchor) -> Tuple:
    """Straight through: the gradient of the rows is sent back in 16 bits, as if nothing had been rounded."""
    grad_rows = grad_anchor if ctx.keep_fp8 else grad_rows
    return (*ops._grad_dispatch(ctx, grad_rows, grad_row_weights), None)


def _refuse_dispatch(error: Exception, inputs: Tuple) -> None:
    core_of(inputs[3]).refuse(error)


#: As ops.dispatch; also row_scales and the anchor, which are empty unless keep_fp8.
dispatch = define(
    "dispatch_fp8",
    "(Tensor x, Tensor routing, Tensor weights, int dispatcher, bool with_row_weights, bool keep_fp8)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _fake_dispatch,
    _save_dispatch,
    _grad_dispatch,
    refuse=_refuse_dispatch,
)


def check_wire(wire: Optional[str], wire_rows: str) -> None:
    if wire not in WIRES:
        raise ValueError(f'wire must be None (rows as they are) or "fp8", got {wire!r}')
    if wire_rows not in WIRE_ROWS:
        raise ValueError(f'wire_rows must be "bf16" or "fp8", got {wire_rows!r}')
    if wire is None and wire_rows != "bf16":
        raise ValueError('wire_rows="fp8" needs wire="fp8"')
