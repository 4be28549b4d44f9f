"""Crossdock as the token dispatcher of Megatron-LM.

Before the model is built, with moe_token_dispatcher_type = "alltoall":

    import crossdock.megatron
    crossdock.megatron.install()

or afterwards, in place:

    crossdock.megatron.replace(model)
"""
from typing import Any, Iterable, Union

import torch
from megatron.core.transformer.moe import moe_layer, router

from .torch.megatron_dispatcher import MegatronTokenDispatcher

__all__ = ["MegatronTokenDispatcher", "guard_empty_router", "install", "replace", "uninstall"]

_original = moe_layer.MoEAlltoAllTokenDispatcher
_gating = router.router_gating_linear


def install() -> None:
    """Makes MoE layers that are created from now on with the dispatcher type "alltoall" use Crossdock."""
    moe_layer.MoEAlltoAllTokenDispatcher = MegatronTokenDispatcher


def uninstall() -> None:
    """Undoes install() for layers that are made later."""
    moe_layer.MoEAlltoAllTokenDispatcher = _original


def replace(model: Union[Any, Iterable[Any]]) -> int:
    """Replaces the dispatcher of every MoE layer in `model`, a module or a list of them. Returns their number.

    Megatron's dispatcher of any type may be replaced. Call it on every rank.
    """
    modules = [model] if hasattr(model, "modules") else list(model)
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, moe_layer.MoELayer)]
    for layer in layers:
        layer.token_dispatcher = _successor(layer, layer.token_dispatcher)
    return len(layers)


def guard_empty_router() -> None:
    """Makes Megatron's router accept 0 tokens. It otherwise fails on them while the other ranks wait for this one."""
    router.router_gating_linear = _gating_of_any_size


def _gating_of_any_size(inp: torch.Tensor, weight: torch.Tensor, bias: Any, router_dtype: torch.dtype) -> torch.Tensor:
    if inp.numel() > 0:
        return _gating(inp, weight, bias, router_dtype)
    bias = None if bias is None else bias.to(router_dtype)
    return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), bias)


class _Groups:
    """The process groups that a dispatcher was made with."""

    def __init__(self, dispatcher: Any):
        self.ep = dispatcher.ep_group
        self.expt_tp = dispatcher.tp_group
        self.tp_ep = dispatcher.tp_ep_group


def _successor(layer: Any, previous: Any) -> MegatronTokenDispatcher:
    made = MegatronTokenDispatcher(
        layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=_Groups(previous)
    )
    if previous.shared_experts is not None:
        made.set_shared_experts(previous.shared_experts)
    return made
