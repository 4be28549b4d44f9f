"""Tensors of PyTorch as the library sees them."""
import ctypes
import operator
from typing import Optional

import torch

import crossdock

_CODES = {
    torch.float64: int(crossdock.DType.F64),
    torch.float32: int(crossdock.DType.F32),
    torch.bfloat16: int(crossdock.DType.BF16),
    torch.float16: int(crossdock.DType.F16),
    torch.int64: int(crossdock.DType.I64),
    torch.int32: int(crossdock.DType.I32),
    torch.uint8: int(crossdock.DType.U8),
    torch.bool: int(crossdock.DType.BOOL),
}
_REFUSED = 0  # a dtype that the library refuses: the error is then the same on every rank


def view_of(tensor: torch.Tensor) -> crossdock.Tensor:
    """The memory of a contiguous tensor, which must outlive the call."""
    device = tensor.get_device() if tensor.is_cuda else None
    return crossdock.Tensor(tensor.data_ptr(), _CODES.get(tensor.dtype, _REFUSED), tuple(tensor.shape), device)


def weights_dtype(tokens: torch.dtype) -> torch.dtype:
    """The dtype in which a plan keeps weights, and returns their gradients."""
    return torch.float64 if tokens == torch.float64 else torch.float32


def usable_weights(weights: torch.Tensor, tokens: torch.dtype) -> torch.Tensor:
    """Weights in a dtype that plans accept beside tokens of this dtype. Only fp64 tokens keep fp64 weights."""
    if (weights.dtype == torch.float64) != (tokens == torch.float64):
        weights = weights.to(weights_dtype(tokens))
    return weights.contiguous()


class Output:
    """Memory of torch for a result of a collective call.

    A rank that cannot allocate must not raise before the call: the others would wait for it. It passes memory that the
    library refuses on every rank, and raises torch's error after the call.
    """

    __slots__ = ("tensor", "view", "error")

    def __init__(self, like: torch.Tensor, shape, dtype: Optional[torch.dtype] = None):
        self.error: Optional[BaseException] = None
        try:
            self.tensor = like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
            self.view = view_of(self.tensor)
        except (RuntimeError, MemoryError) as error:
            self.error = error
            self.tensor = None
            self.view = crossdock.Tensor(0, _REFUSED, tuple(shape), None)


class _OnDevice:
    """Device memory as torch.as_tensor takes it."""

    def __init__(self, pointer: int, length: int):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (length,),
            "typestr": "<i8",
            "strides": None,
            "version": 3,
        }


def rows_per_expert(plan: crossdock.Plan) -> torch.Tensor:
    """[E_local] int64 on the plan's device: rows of each local expert, pad rows included."""
    size = plan.num_local_experts
    if plan.device is not None:
        memory = _OnDevice(plan.segment_starts_ptr, size + 1)
        return torch.as_tensor(memory, device=torch.device("cuda", plan.device)).diff()
    if size == 0:
        return torch.empty(0, dtype=torch.int64)
    starts = (ctypes.c_int64 * (size + 1)).from_address(plan.segment_starts_ptr)[:]
    counts = (ctypes.c_int64 * size)(*map(operator.sub, starts[1:], starts))
    return torch.frombuffer(counts, dtype=torch.int64)
