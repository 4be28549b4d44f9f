"""The compiled module, which makes the calls in one step from tensors to tensors.

It lies next to the library. There is none for versions of torch before 2.10, which have no DLPack exchange functions, for Pythons
without the stable ABI, and in packages that were built without Python's headers; plain.py then makes the calls.
"""
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any, Optional, Tuple

import torch

import crossdock
from crossdock._errors import fail
from crossdock._interrupt import caught, raise_caught
from crossdock._library import lib
from crossdock._tensor import Refused, named_refusal

from .tensors import by_map, view_of


def _refuse(name: str, given: Any) -> Exception:
    """The library's next call is refused, because of a tensor that it cannot use, or an error. Returns the reason."""
    if isinstance(given, torch.Tensor):
        view = view_of(given)
        given = view.error if isinstance(view, Refused) else RuntimeError("torch cannot share the memory of the tensor")
    elif not isinstance(given, Exception):
        given = TypeError(f"must be a tensor, got {type(given).__name__}")
    lib.refuse_next_call(named_refusal(name, given))
    return given


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
        loaded = importlib.util.module_from_spec(spec)  # opens the file
        loader.exec_module(loaded)
    except ImportError:
        return None
    helpers = (fail, _refuse, caught, raise_caught, torch.cuda.is_current_stream_capturing, by_map)
    dtypes = ({"dtype": dtype} for dtype in (torch.int64, torch.float32, torch.float64))
    return loaded if loaded.prepare(exchange, *helpers, *dtypes) else None


#: None: the calls are made in Python.
module: Any = _load()


# ---- Calls that take and return a LayerSaved ----


def layer_forward(layer: Any, tensors: Tuple, *options: Any) -> Tuple:
    *numbers, earlier, with_saved = options
    earlier = None if earlier is None else earlier._handle
    out, losses, handle, on_device = module.layer_forward(layer, tensors, *numbers, earlier, with_saved)
    return out, losses, None if handle is None else crossdock.LayerSaved(handle, tensors[1].shape[0], on_device)


def layer_backward(layer: Any, tensors: Tuple, grad_out: torch.Tensor, saved: crossdock.LayerSaved, *options: Any) -> Tuple:
    return module.layer_backward(layer, tensors, grad_out, saved._handle, *options)


def layer_backward_dw(layer: Any, x: torch.Tensor, grad_out: torch.Tensor, saved: Any, parameters: Tuple) -> Tuple:
    return module.layer_backward_dw(layer, x, grad_out, saved._handle, parameters)
