"""Crossdock in PyTorch: dispatch and combine with gradients, on any process group.

    dispatcher = crossdock.torch.Dispatcher(group, num_experts=64, top_k=8, width=2048)
    sent = dispatcher.dispatch(x, expert_ids, weights)     # x [T, D] -> sent.rows [R, D]
    y = experts(sent.rows, sent.tokens_per_expert)         # yours
    out = dispatcher.combine(y, sent.handle)               # [T, D], weighted

Needs torch 1.13 or later; torch 2.4 or later for torch.compile and selective checkpointing.
"""
from typing import Any

from .checkpoint import Checkpoint
from .dispatcher import Dispatched, Dispatcher, Handle
from .expert_tensors import number_experts
from .experts import GroupedExperts
from .fp8 import QuantisedRows, dequantise_rows, quantise_rows
from .gradients import clip_grad_norm_, scale_expert_gradients_
from .groups import close, group
from .layer import MoELayer
from .loss_scale import set_loss_scale
from .ops import save_ops
from .pending import Pending, PendingDispatch
from .report import LayerReport
from .titan_dispatcher import TitanTokenDispatcher

__all__ = [
    "Checkpoint",
    "Dispatched",
    "Dispatcher",
    "GroupedExperts",
    "Handle",
    "LayerReport",
    "MoELayer",
    "Pending",
    "PendingDispatch",
    "QuantisedRows",
    "TitanTokenDispatcher",
    "clip_grad_norm_",
    "close",
    "dequantise_rows",
    "group",
    "number_experts",
    "quantise_rows",
    "save_ops",
    "scale_expert_gradients_",
    "set_loss_scale",
]


def __getattr__(name: str) -> Any:
    if name == "MegatronTokenDispatcher":  # imports megatron.core, so it is not in __all__
        from .megatron_dispatcher import MegatronTokenDispatcher

        return MegatronTokenDispatcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
