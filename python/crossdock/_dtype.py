"""Types of values."""
import enum
from typing import Any


class DType(enum.IntEnum):
    """Element types of tensors. F8E4M3 and E8M0 are for fp8 rows and their scales."""

    F64 = 1
    F32 = 2
    BF16 = 3
    F16 = 4
    F8E4M3 = 5
    E8M0 = 6
    I64 = 7
    I32 = 8
    U8 = 9
    BOOL = 10

    @property
    def itemsize(self) -> int:
        return _SIZES[self]


_SIZES = {1: 8, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 8, 8: 4, 9: 1, 10: 1}
# Codes of numpy's array interface. numpy has no bf16 and fp8: they are opaque bytes.
TYPESTRS = {1: "<f8", 2: "<f4", 3: "<V2", 4: "<f2", 5: "|V1", 6: "|V1", 7: "<i8", 8: "<i4", 9: "|u1", 10: "|b1"}
BY_NAME = {  # names of numpy, ml_dtypes and torch, and those of the command
    "float64": DType.F64,
    "float32": DType.F32,
    "bfloat16": DType.BF16,
    "float16": DType.F16,
    "float8_e4m3fn": DType.F8E4M3,
    "float8_e8m0fnu": DType.E8M0,
    "int64": DType.I64,
    "int32": DType.I32,
    "uint8": DType.U8,
    "bool": DType.BOOL,
    "fp64": DType.F64,
    "fp32": DType.F32,
    "bf16": DType.BF16,
    "fp16": DType.F16,
    "fp8_e4m3": DType.F8E4M3,
}


def to_dtype(given: Any) -> DType:
    """A DType, its name ("bf16"), or a dtype of numpy, ml_dtypes or torch."""
    if isinstance(given, int):
        return DType(given)
    if isinstance(given, str):
        text = given
    else:  # numpy.dtype, numpy.float32, torch.float32
        text = getattr(given, "name", None) or getattr(given, "__name__", None) or str(given)
    found = BY_NAME.get(text.rpartition(".")[2]) or DType.__members__.get(text.upper())
    if found is None:
        names = ", ".join(member.name.lower() for member in DType)
        raise ValueError(f"dtype must be one of {names}, or one of numpy's or torch's, got {given!r}")
    return found
