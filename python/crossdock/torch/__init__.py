"""Crossdock in PyTorch: dispatch and combine with gradients, on any process group.

    dispatcher = crossdock.torch.Dispatcher(group, num_experts=64, top_k=8, width=2048)
    sent = dispatcher.dispatch(x, expert_ids, weights)     # x [T, D] -> sent.rows [R, D]
    y = experts(sent.rows, sent.tokens_per_expert)         # yours
    out = dispatcher.combine(y, sent.handle)               # [T, D], weighted

Needs torch 1.13 or later; torch 2.4 or later for torch.compile and selective checkpointing.
"""
from typing import Any

from .dispatcher import Dispatched, Dispatcher, Handle
from .experts import GroupedExperts
from .groups import close, group
from .layer import MoELayer
from .loss_scale import set_loss_scale
from .ops import save_ops
from .report import LayerReport
from .titan_dispatcher import TitanTokenDispatcher

__all__ = [
    "Dispatched",
    "Dispatcher",
    "GroupedExperts",
    "Handle",
    "LayerReport",
    "MoELayer",
    "TitanTokenDispatcher",
    "close",
    "group",
    "save_ops",
    "set_loss_scale",
]


def __getattr__(name: str) -> Any:
    if name == "MegatronTokenDispatcher":  # imports megatron.core, so it is not in __all__
        from .megatron_dispatcher import MegatronTokenDispatcher

        return MegatronTokenDispatcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
