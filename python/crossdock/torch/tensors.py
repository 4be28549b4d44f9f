"""Tensors of PyTorch as the library sees them."""
from typing import Any, Optional, Sequence, Tuple

import torch

import crossdock
from crossdock._tensor import Refused

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
for _name, _dtype in (("float8_e4m3fn", crossdock.DType.F8E4M3), ("float8_e8m0fnu", crossdock.DType.E8M0)):
    if hasattr(torch, _name):
        _CODES[getattr(torch, _name)] = int(_dtype)


def view_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor, as an argument of the library's calls.

    A rank must not raise before a collective call: the others would wait for it. So a tensor that the library cannot
    use becomes an argument that it refuses on every rank, and the reason is the cause of the error on this one.
    """
    try:
        code, shape = _CODES[tensor.dtype], tensor.shape
        if not tensor.is_contiguous():
            return Refused(RuntimeError(f"torch cannot make the tensor contiguous: shape {tuple(shape)} of {tensor.dtype}"))
        if tensor.is_cpu or tensor.is_cuda:
            device = tensor.get_device() if tensor.is_cuda else None
            return crossdock.Tensor(tensor.data_ptr(), code, shape, device, tensor)
    except KeyError:
        pass
    except (RuntimeError, ValueError) as error:  # without memory of its own, or without dimensions
        return Refused(error)
    return Refused(TypeError(f"tensors of dtype {tensor.dtype} on {tensor.device.type} are not supported"))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous; or unchanged if torch cannot make it so (too little memory, sparse): view_of refuses it."""
    try:
        return tensor.contiguous()
    except (RuntimeError, MemoryError):
        return tensor


def empty(
    like: torch.Tensor, shape: Sequence[int], dtype: Optional[torch.dtype] = None
) -> Tuple[Optional[torch.Tensor], Any]:
    """Torch's memory for a result of a collective call: the tensor, and the argument for the call.

    If torch cannot allocate it, the call fails on every rank, and torch's error is the cause on this one.
    """
    try:
        # Sizes one by one: torch takes twice as long for a tuple.
        tensor = like.new_empty(*shape) if dtype is None else like.new_empty(*shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        return None, Refused(error)
    return tensor, view_of(tensor)


def weights_dtype(tokens: torch.dtype) -> torch.dtype:
    """The dtype in which a plan keeps weights, and returns their gradients."""
    return torch.float64 if tokens == torch.float64 else torch.float32


def usable_weights(weights: torch.Tensor, tokens: torch.dtype) -> torch.Tensor:
    """Weights in a dtype that plans accept with tokens of this dtype. Only fp64 tokens keep fp64 weights."""
    if (weights.dtype == torch.float64) != (tokens == torch.float64) and weights.is_floating_point():
        weights = weights.to(weights_dtype(tokens))
    return contiguous(weights)


def by_map(by_slot: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """[T, K] unchanged; for a map, whose slots are its set bits in ascending order, scattered to [T, E]."""
    if routing.dtype != torch.bool:
        return by_slot
    if by_slot.numel() == 0:
        return by_slot.new_zeros(routing.shape)
    slot = (routing.cumsum(1) - 1).clamp_(0, by_slot.shape[1] - 1)
    return by_slot.gather(1, slot).masked_fill_(~routing, 0.0)


def gradient_memory(parameter: torch.Tensor, wanted: bool, dtype: Optional[torch.dtype] = None) -> Tuple[Any, Any]:
    """A tensor for a gradient and the argument for the call; empty if the gradient is not wanted.

    Default dtype: on a GPU the parameter's, on the CPU the dtype of the sums.
    """
    if not wanted:
        return parameter.new_empty(0), None
    if dtype is None:
        dtype = parameter.dtype if parameter.is_cuda else weights_dtype(parameter.dtype)
    return empty(parameter, parameter.shape, dtype)


def stream_of(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
