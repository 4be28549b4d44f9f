"""Objects of the library as tensors.

Operators pass tensors only, and autograd, checkpointing and compiled graphs decide how long these live. So a value that a
forward keeps for its backward is an int64 tensor [1] on the CPU whose memory owns the value: it is freed with the last
tensor that shares the memory, or when backward takes it.
"""
import ctypes
import functools
import itertools
import weakref
from typing import Any, Dict, Optional

import torch


class _Memory(ctypes.c_int64 * 1):
    value: Any
    origin: Any


_numbers = itertools.count(1)
_memories: Dict[int, "weakref.ref[_Memory]"] = {}


def tensor_of(value: Any, origin: Any = None) -> torch.Tensor:
    """A tensor that owns `value`, and `origin`, which is not taken with it."""
    number = next(_numbers)
    memory = _Memory(number)
    memory.value, memory.origin = value, origin
    _memories[number] = weakref.ref(memory, functools.partial(_memories.pop, number))  # no Python code: see Owner
    return torch.frombuffer(memory, dtype=torch.int64)


def _memory_of(tensor: torch.Tensor) -> Optional[_Memory]:
    found = _memories.get(int(tensor.item()))
    return None if found is None else found()


def take(tensor: torch.Tensor) -> Any:
    """The value, which the tensor no longer owns. None if it has been taken, or was freed because `tensor` is a copy."""
    memory = _memory_of(tensor)
    if memory is None:
        return None
    value, memory.value = memory.value, None
    return value


def origin_of(tensor: torch.Tensor) -> Any:
    """The origin of the value, or None if `tensor` is a copy."""
    memory = _memory_of(tensor)
    return None if memory is None else memory.origin


def like_kept() -> torch.Tensor:
    """Such a tensor without a value, for compilers and for calls that keep nothing."""
    return torch.zeros((1,), dtype=torch.int64, device="cpu")
