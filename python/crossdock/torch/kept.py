"""Objects as tensors.

Operators pass tensors only, and autograd, checkpointing and compiled graphs decide how long these live. So a plan, or a value
that a forward keeps for its backward, is an int64 tensor [1] on the CPU whose memory owns it: it is freed with the last
tensor that shares the memory.
"""
import ctypes
import itertools
import weakref
from typing import Any

import torch

from . import native


class _Memory(ctypes.c_int64 * 1):
    owned: Any


_numbers = itertools.count(1)
_memories: "weakref.WeakValueDictionary[int, _Memory]" = weakref.WeakValueDictionary()


def _tensor_owning(value: Any) -> torch.Tensor:
    number = next(_numbers)
    memory = _memories[number] = _Memory(number)
    memory.owned = value
    return torch.frombuffer(memory, dtype=torch.int64)


def _owned_by(tensor: torch.Tensor) -> Any:
    memory = _memories.get(int(tensor)) if tensor.numel() == 1 else None
    return None if memory is None else memory.owned


tensor_owning = _tensor_owning if native.module is None else native.module.tensor_owning
#: The object, or None if there is none any more. Copies of the tensor name it as long as the tensor lives.
owned_by = _owned_by if native.module is None else native.module.owned_by


class _Value:
    __slots__ = ("value", "origin")

    def __init__(self, value: Any, origin: Any):
        self.value, self.origin = value, origin


def tensor_of(value: Any, origin: Any = None) -> torch.Tensor:
    """A tensor that owns `value` until it is taken, and `origin`."""
    return tensor_owning(_Value(value, origin))


def take(tensor: torch.Tensor) -> Any:
    """The value, which the tensor no longer owns. None if it has been taken, or was freed because `tensor` is a copy."""
    kept = owned_by(tensor)
    if kept is None:
        return None
    value, kept.value = kept.value, None
    return value


def origin_of(tensor: torch.Tensor) -> Any:
    """The origin of the value, or None if `tensor` is a copy."""
    kept = owned_by(tensor)
    return None if kept is None else kept.origin


def like_kept() -> torch.Tensor:
    """Such a tensor without a value, for compilers and for calls that keep nothing."""
    return torch.zeros((1,), dtype=torch.int64, device="cpu")
