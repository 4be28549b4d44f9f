"""Functions whose results compilers take as constants."""
import ctypes
import functools
from typing import Any, Callable

import torch


def evaluated_while_tracing(function: Callable) -> Callable:
    """function(thing, *numbers) that torch.compile calls while it traces, instead of tracing it.

    torch can do this for functions of numbers only, so `thing` is passed by its address. The compiled code is guarded by it.
    """

    @torch._dynamo.assume_constant_result
    def call_at(address: int, *numbers: int) -> Any:
        return function(ctypes.cast(address, ctypes.py_object).value, *numbers)

    @functools.wraps(function)
    def call(thing: Any, *numbers: int) -> Any:
        return call_at(id(thing), *numbers) if torch.compiler.is_compiling() else function(thing, *numbers)

    return call
