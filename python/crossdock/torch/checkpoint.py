"""Checkpoints of models and optimizers that fit any number of ranks, with torch.distributed.checkpoint."""
from typing import Any, Dict, Iterable, Tuple, Union

import torch
from torch import nn

from .expert_tensors import ExpertTensor, Place, is_sharded, like_shard, marked, plain

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]


class Checkpoint:
    """A model and its optimizers, as torch.distributed.checkpoint (DCP) saves and loads them. Needs torch 2.6.

        dcp.save({"app": Checkpoint(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"app": Checkpoint(model, optimizer)}, checkpoint_id=folder)  # on any number of ranks

    The names are those of torch's `get_state_dict`: `app.model.<parameter>`, `app.optimizer.state.<parameter>.<value>`. A
    parameter of experts, and each of its values in an optimizer, is one tensor [E, ...] in the order of the experts: the
    checkpoint does not depend on the ranks that wrote it, and programs without Crossdock can read it.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers = ()):
        self.model = model
        self.optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)

    def state_dict(self) -> Dict[str, Any]:
        """Shares the memory of model and optimizers. Makes the state of an optimizer that has none, as torch's function does."""
        model, optimizer = self._state()
        for name, values in optimizer.get("state", {}).items():
            parameter = model.get(name)
            if isinstance(parameter, ExpertTensor):
                optimizer["state"][name] = {key: _of_experts(f"{name}.{key}", v, parameter.place) for key, v in values.items()}
        return {"model": model, "optimizer": optimizer} if self.optimizers else {"model": model}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Takes the result of `state_dict`, which DCP has filled."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        optimizer = dict(state["optimizer"]) if self.optimizers else {}
        if self.optimizers:
            current = self._state()[1]["state"]
            optimizer["state"] = {
                name: {key: _as_before(value, current.get(name, {}).get(key)) for key, value in values.items()}
                for name, values in optimizer["state"].items()
            }
        set_state_dict(self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=optimizer)

    def _state(self) -> Tuple[Dict[str, Any], Dict[str, Any]]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return get_state_dict(self.model, self.optimizers)  # type: ignore[return-value]


def _of_experts(name: str, value: Any, place: Place) -> Any:
    """An optimizer's value of a parameter of experts: a number, a tensor like the parameter, or another tensor [E_local, ...]."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    local = value.to_local() if is_sharded(value) else value
    if local.shape == place.shape:
        return marked(local, place)
    if is_sharded(value) or local.shape[0] != len(place.ids) or place.whole is None:
        raise ValueError(
            f"{name} must have the shape of its parameter or one entry per expert, {len(place.ids)} on this rank, got shape "
            f"{tuple(value.shape)}; save this optimizer's state with a file for every rank"
        )
    rest = tuple(local.shape[1:])
    return marked(local, Place(place.ids, tuple(local.shape), (place.whole[0], *rest), (0,) * len(rest)))


def _as_before(value: Any, before: Any) -> Any:
    """The opposite of `_of_experts`; `before` is the optimizer's present value."""
    if type(value) is not ExpertTensor:
        return value
    return like_shard(plain(value), before) if is_sharded(before) else plain(value)
