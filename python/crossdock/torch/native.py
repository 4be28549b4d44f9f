"""Compiled versions of the calls, from a module next to the library.

A function returns None to leave the call to Python: for tensors that are not plain (on a GPU, not contiguous, of a subclass),
results that torch cannot allocate, versions of torch before 2.10, which have no DLPack exchange functions, Pythons without the
stable ABI, and packages that were built without Python's headers.
"""
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any, Callable, Optional

import torch

from crossdock._errors import fail
from crossdock._library import lib


def _load() -> Optional[Any]:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    folder = os.path.dirname(lib.path)  # "": a system library
    path = os.path.join(folder, "_torch_calls.abi3.so")
    is_wanted = os.environ.get("CROSSDOCK_TORCH_NATIVE", "1") != "0"
    has_abi = ".abi3.so" in importlib.machinery.EXTENSION_SUFFIXES and sys.version_info >= (3, 10)
    if not is_wanted or exchange is None or not has_abi or not folder or not os.path.isfile(path):
        return None
    loader = importlib.machinery.ExtensionFileLoader("_torch_calls", path)
    spec = importlib.util.spec_from_loader("_torch_calls", loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)  # opens the file
        loader.exec_module(module)
    except ImportError:
        return None
    types = torch.Tensor, torch.nn.Parameter
    is_usable = module.prepare(exchange, *types, fail, {"dtype": torch.int64}, {"dtype": torch.float32})
    return module if is_usable else None


def _function(name: str) -> Callable[..., Any]:
    return getattr(_module, name) if _module is not None else lambda *_: None


_module = _load()
IS_LOADED = _module is not None

send = _function("send")
dispatch_backward = _function("dispatch_backward")
combine = _function("combine")
combine_unweighted = _function("combine_unweighted")
combine_backward = _function("combine_backward")
collect_routes = _function("collect_routes")
