"""DLPack: tensors of other libraries without a copy."""
import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, Optional, Tuple

from ._dtype import DType
from ._library import lib

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_NAME = b"dltensor"


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", c_void_p), ("deleter", _Deleter)]


_DTYPES = {  # (DLDataTypeCode, bits)
    (2, 64): DType.F64,
    (2, 32): DType.F32,
    (4, 16): DType.BF16,
    (2, 16): DType.F16,
    (10, 8): DType.F8E4M3,
    (14, 8): DType.E8M0,
    (0, 64): DType.I64,
    (0, 32): DType.I32,
    (1, 8): DType.U8,
    (6, 8): DType.BOOL,
}

_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_destroy = ctypes.cast(lib.destroy_dlpack_capsule, c_void_p)


def capsule_of(managed: Optional[int]) -> Any:
    """A capsule that owns a DLManagedTensor."""
    return _new(managed, _NAME, _destroy)


def read(value: Any, stream: Optional[int]) -> Tuple[int, DType, Tuple[int, ...], Optional[int], Any]:
    """Address, dtype, shape, CUDA device (None: host) and owner of an object with __dlpack__.

    `stream` is the stream that will use memory on a GPU.
    """
    kind = value.__dlpack_device__()[0]
    if kind in (CUDA, CUDA_MANAGED):
        capsule = value.__dlpack__(stream=stream or 1)  # 1: the default stream
    else:
        capsule = value.__dlpack__()
    tensor = _DLManagedTensor.from_address(_pointer(capsule, _NAME)).dl_tensor
    ndim = tensor.ndim
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(f"dtype must be one of crossdock.DType, got code {tensor.code} with {tensor.bits} bits of DLPack")
    if tensor.strides and not _is_contiguous(shape, tensor.strides):
        raise ValueError(f"tensors must be contiguous, got shape {shape} with strides {tuple(tensor.strides[:ndim])}")
    if kind not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise TypeError(f"tensors must be in memory of the CPU (1) or of CUDA (2), got DLPack device type {kind}")
    device = tensor.device_id if kind in (CUDA, CUDA_MANAGED) else None
    return (tensor.data or 0) + tensor.byte_offset, dtype, shape, device, capsule


def _is_contiguous(shape, strides) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for i in reversed(range(len(shape))):
        if shape[i] != 1 and strides[i] != expected:
            return False
        expected *= shape[i]
    return True
