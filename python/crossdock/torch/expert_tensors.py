"""The tensors of experts in a state_dict, if other ranks have other experts: torch.distributed.checkpoint refuses them."""
import copy
from typing import Any, NoReturn

import torch

_Disabled = getattr(torch._C, "DisableTorchFunctionSubclass", None) or torch._C.DisableTorchFunction  # before torch 2.0

# The copies that programs make of a state_dict before they save it, torch's own asynchronous checkpoints among them.
_COPIES = {
    getattr(torch.Tensor, name)
    for name in ("bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "new_empty")
} | {torch.clone, torch.detach, torch.Tensor.pin_memory, torch.Tensor.to}


class ExpertTensor(torch.Tensor):
    """The parameters of some of a layer's experts.

    Every rank has other experts under the same name. torch.distributed.checkpoint would take them for replicas, save those of one
    rank, and give them to all. So the methods by which it asks a tensor for its parts raise an error. Copies keep them;
    computations and pickles return plain tensors.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Disabled():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if function in _COPIES else result

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return marked(copy.deepcopy(plain(self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __create_write_items__(self, name: str, _: Any) -> NoReturn:
        _refuse()

    def __create_chunk_list__(self) -> NoReturn:
        _refuse()


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as an ExpertTensor, which shares its memory. Other tensors, such as DTensor, unchanged."""
    return tensor.as_subclass(ExpertTensor) if type(tensor) is torch.Tensor else tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The opposite of `marked`."""
    with _Disabled():
        return tensor.as_subclass(torch.Tensor) if type(tensor) is ExpertTensor else tensor


def _refuse() -> NoReturn:
    raise RuntimeError(
        "torch.distributed.checkpoint cannot save or load this state_dict: every rank has other experts under the same "
        "names, so all ranks would get those of one. Give every expert's tensors a name with the expert's number "
        "(docs/pytorch.md, Checkpoints), or torch.save the state_dict of every rank"
    )
