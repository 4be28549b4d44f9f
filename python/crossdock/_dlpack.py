"""DLPack: tensors of other libraries without a copy."""
import ctypes
from ctypes import c_char_p, c_void_p
from typing import Any, Optional, Tuple

from ._abi import CTensor
from ._library import lib

CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # DLDeviceType
_NAME = b"dltensor"

_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_destroy = ctypes.cast(lib.destroy_dlpack_capsule, c_void_p)


def capsule_of(managed: Optional[int]) -> Any:
    """A capsule that owns a DLManagedTensor."""
    return _new(managed, _NAME, _destroy)


def read(value: Any, stream: Optional[int]) -> Tuple[CTensor, Any]:
    """The tensor of an object with __dlpack__, and its owner. `stream` is the stream that will use memory on a GPU."""
    if value.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED):
        capsule = value.__dlpack__(stream=stream or 1)  # 1: the default stream
    else:
        capsule = value.__dlpack__()
    tensor = CTensor()
    if lib.tensor_from_dlpack(_pointer(capsule, _NAME), ctypes.byref(tensor)):
        raise ValueError(lib.last_error().decode(errors="replace"))
    return tensor, capsule
