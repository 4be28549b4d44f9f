"""Rows in fp8 with scales, half the bytes of bf16."""
import ctypes
from ctypes import byref
from typing import Any, NamedTuple, Optional, Tuple

from ._abi_layer import DequantiseRowsArgs, QuantiseRowsArgs
from ._dispatcher import choice
from ._dtype import DType, to_dtype
from ._library import lib
from ._tensor import Array, ArrayLike, Marshal, fields_at, fields_of, is_numpy, ml_dtype

SCALES = {"pow2": 0, "exact": 1}
SCALE_TYPES = {128: DType.F32, 32: DType.E8M0}  # by the size of a group

_X = QuantiseRowsArgs.x.offset
_VALUES = QuantiseRowsArgs.values.offset
_SCALES = QuantiseRowsArgs.scales.offset
_FP8 = DequantiseRowsArgs.values.offset
_FP8_SCALES = DequantiseRowsArgs.scales.offset
_OUT = DequantiseRowsArgs.out.offset


class QuantisedRows(NamedTuple):
    """Rows in fp8, the first two arguments of a dispatch."""

    values: Any  #: [T, D] fp8 e4m3
    scales: Any  #: [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0


def scale_type(group: int) -> DType:
    if group not in SCALE_TYPES:
        raise ValueError(f"group must be 128 (fp32 scales) or 32 (e8m0 scales), got {group!r}")
    return SCALE_TYPES[group]


def quantise_rows(
    x: ArrayLike,
    *,
    group: int = 128,
    scale: str = "pow2",
    amax_floor: float = 0.0,
    values: Optional[ArrayLike] = None,
    scales: Optional[ArrayLike] = None,
    stream: Optional[int] = None,
) -> QuantisedRows:
    """Rounds x [T, D] (fp32, bf16 or fp16) to fp8 e4m3, with a scale for each group of values of a row. Not collective.

    group: 128 with fp32 scales, or 32 with e8m0 scales (MXFP8)
    scale: "pow2", the smallest power of two that is at least amax / 448, with amax the largest magnitude of the group;
        or "exact", amax / 448, with groups of 128
    amax_floor: amax is at least this; DeepEP's is 1e-4, with "exact"
    values, scales: outputs to write to; required on a GPU
    stream: a cudaStream_t, for arrays on a GPU

    New outputs are numpy arrays if x is one, else crossdock.Arrays. Types that numpy does not have are those of
    ml_dtypes; without ml_dtypes such an output is a crossdock.Array.
    """
    type_of_scales = scale_type(group)
    args = QuantiseRowsArgs(amax_floor=amax_floor, scale=choice("scale", scale, SCALES), stream=stream or 0)
    with Marshal(stream or 0) as marshal:
        marshal.put(args, _X, x)
        if values is None or scales is None:
            num_rows, width = _host_shape(fields_at(args, _X))
            like_numpy = is_numpy(x)
            if values is None:
                values = _host_array(DType.F8E4M3, (num_rows, width), like_numpy)
            if scales is None:
                scales = _host_array(type_of_scales, (num_rows, -(-width // group)), like_numpy)
        marshal.put_output(args, _VALUES, values)
        marshal.put_output(args, _SCALES, scales)
    marshal.call_alone(lib.quantise_rows, byref(args))
    return QuantisedRows(values, scales)


def dequantise_rows(
    values: ArrayLike,
    scales: ArrayLike,
    dtype: Any = DType.BF16,
    *,
    out: Optional[ArrayLike] = None,
    stream: Optional[int] = None,
) -> Any:
    """Multiplies values [R, D] (fp8 e4m3) by the scales of their groups and rounds once. Not collective.

    dtype: of the result: bf16, fp16 or fp32
    out: [R, D] the result to write to; required on a GPU. Otherwise as quantise_rows.
    """
    args = DequantiseRowsArgs(stream=stream or 0)
    with Marshal(stream or 0) as marshal:
        marshal.put(args, _FP8, values)
        marshal.put(args, _FP8_SCALES, scales)
        if out is None:
            out = _host_array(to_dtype(dtype), _host_shape(fields_at(args, _FP8)), is_numpy(values) or is_numpy(scales))
        marshal.put_output(args, _OUT, out)
    marshal.call_alone(lib.dequantise_rows, byref(args))
    return out


def _host_shape(fields: Any) -> Tuple[int, int]:
    """The shape of new outputs for the tensor with these fields."""
    if fields[5] != 2:
        raise ValueError(f"rows must have 2 dimensions, got {fields[5]}")
    if fields[7]:
        raise ValueError("pass the outputs, because the rows are on a GPU")
    return fields[1], fields[2]


def _host_array(dtype: DType, shape: Tuple[int, int], like_numpy: bool) -> Any:
    if like_numpy:
        import numpy

        kind = {DType.F32: "float32", DType.F16: "float16"}.get(dtype) or ml_dtype(dtype, None)
        if kind is not None:
            return numpy.empty(shape, kind)
    memory = (ctypes.c_uint8 * max(shape[0] * shape[1] * dtype.itemsize, 1))()
    return Array(fields_of(ctypes.addressof(memory), dtype, shape, None), None, memory)
