"""Crossdock: expert parallelism for Mixture-of-Experts models.

    group = crossdock.Group.from_environment()       # the ranks that exchange rows: torchrun, srun, ...
    dispatcher = crossdock.Dispatcher(group, num_experts=64, top_k=8, width=2048)
    plan = dispatcher.plan(expert_ids, weights)      # [T, K]: sizes are known from here on
    rows = dispatcher.dispatch(plan, x).rows         # x [T, D] -> rows [R, D], grouped by local expert
    out = dispatcher.combine(plan, experts(rows))    # y [R, D] -> out [T, D]

Takes numpy arrays and anything with DLPack, without copies. Letters: T tokens here, K routes per token, E experts in
total, E_local here, D token width, F expert inner width, R rows received. docs/python.md is the guide.
"""
from ._dispatch_call import Dispatched, Pending, PendingDispatch
from ._dispatcher import CombineGradients, Dispatcher
from ._dtype import DType
from ._errors import Error, ErrorCode
from ._experts import Experts, ExpertsSaved, ExpertWeights
from ._fp8 import QuantisedRows, dequantise_rows, quantise_rows
from ._group import Bootstrap, Group
from ._layer import Layer, LayerForward, LayerGradients, LayerLosses, LayerSaved, LayerWeights, update_expert_bias
from ._library import __version__, find_library
from ._plan import Plan
from ._planner import plan
from ._tensor import Array, Tensor
from ._wait_notice import WaitNotice

__all__ = [
    "Array",
    "Bootstrap",
    "CombineGradients",
    "DType",
    "Dispatched",
    "Dispatcher",
    "Error",
    "ErrorCode",
    "Experts",
    "ExpertsSaved",
    "ExpertWeights",
    "Group",
    "Layer",
    "LayerForward",
    "LayerGradients",
    "LayerLosses",
    "LayerSaved",
    "LayerWeights",
    "Pending",
    "PendingDispatch",
    "Plan",
    "QuantisedRows",
    "Tensor",
    "WaitNotice",
    "__version__",
    "dequantise_rows",
    "find_library",
    "plan",
    "quantise_rows",
    "update_expert_bias",
]
