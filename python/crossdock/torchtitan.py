"""Crossdock as the token dispatcher of torchtitan, as overrides of its configuration.

    --override.imports crossdock.torchtitan.dispatcher --training.disable_cuda_graphs

With CUDA graphs, torchtitan's default, for models configured for HybridEP:

    --override.imports 'crossdock.torchtitan.graph_dispatcher={"capacity_factor": 1.0}'

With selective activation checkpointing, also this, so that backward does not communicate twice:

    crossdock.torchtitan.selective_checkpointing
"""
import math
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import torch
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    HybridEPTokenDispatcher,
)

from .torch.ops import save_ops
from .torch.titan_dispatcher import TitanMetadata, TitanTokenDispatcher


class TokenDispatcher(BaseEPTokenDispatcher):
    """TitanTokenDispatcher as a component of torchtitan's configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        alignment: int = 1
        """The rows of each expert start at a multiple of this."""
        max_rows: Optional[int] = None
        """Limit on the rows of a rank. On a GPU no call then waits for the host."""
        strategy: str = "auto"
        """How rows move: "auto", "direct", "hierarchical", "alltoall" or "allgather"."""

    def __init__(self, config: Any):
        super().__init__(config)
        self._config = config
        self._dispatcher = TitanTokenDispatcher(
            num_experts=config.num_experts, top_k=config.top_k, **self._options(config, None)
        )

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self._dispatcher.options = self._options(self._config, ep_mesh)
        self._dispatcher.wire_meshes(ep_mesh=ep_mesh)
        super().wire_meshes(ep_mesh=ep_mesh)

    def dispatch(
        self, x_TD: Any, topk_scores_TK: Any, topk_expert_ids_TK: Any, num_local_tokens_per_expert_E: Any  # noqa: N803
    ) -> Tuple[torch.Tensor, torch.Tensor, TitanMetadata]:
        return self._dispatcher.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)

    def combine(self, routed_output_RD: Any, metadata: Any, x_TD: Any) -> torch.Tensor:  # noqa: N803
        return self._dispatcher.combine(routed_output_RD, metadata, x_TD)

    def _options(self, config: Any, ep_mesh: Any) -> dict:
        """The options of crossdock.torch.Dispatcher."""
        return {"alignment": config.alignment, "max_rows": config.max_rows, "strategy": config.strategy}


class GraphTokenDispatcher(TokenDispatcher):
    """For CUDA graphs: fixed row tensors, no wait for the GPU. Configured like HybridEP.

    If there are more rows than the capacity, all ranks get an error; none are dropped."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        strategy: str = "auto"

    def _options(self, config: Any, ep_mesh: Any) -> dict:
        options = {"alignment": config.pad_multiple or 1, "strategy": config.strategy}
        if config.hidden_dim is not None:
            options["width"] = config.hidden_dim
        if config.non_blocking_capacity_factor is not None and config.num_max_tokens_per_rank is not None:
            options["max_rows"] = self._capacity(config, 1 if ep_mesh is None else ep_mesh.size())
        return options

    @staticmethod
    def _capacity(config: Any, ep_size: int) -> int:
        num_local_experts = config.num_experts // ep_size
        routes = config.num_max_tokens_per_rank * ep_size * min(num_local_experts, config.top_k)
        rows = math.ceil(routes * config.non_blocking_capacity_factor)
        alignment = config.pad_multiple or 1
        if alignment > 1:
            rows += num_local_experts * (alignment - 1)  # every segment may need alignment - 1 pad rows
        return rows


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's SelectiveAC that also saves the results of dispatch and combine."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | save_ops()


@override(target=AllToAllTokenDispatcher.Config, description="Crossdock instead of all-to-all")
def dispatcher(config: Any, **options: Any) -> TokenDispatcher.Config:
    """`options` are fields of TokenDispatcher.Config. The padding that quantised experts require is kept."""
    options.setdefault("alignment", getattr(config, "pad_multiple", None) or 1)
    return derive(config, TokenDispatcher.Config, **options)


@override(target=HybridEPTokenDispatcher.Config, description="Crossdock instead of HybridEP, for CUDA graphs")
def graph_dispatcher(config: Any, *, capacity_factor: Optional[float] = None, **options: Any) -> Any:
    """`capacity_factor` 1.0 has room for any routing. Other `options` are fields of GraphTokenDispatcher.Config."""
    if capacity_factor is not None:
        options["non_blocking_capacity_factor"] = capacity_factor
    return derive(config, GraphTokenDispatcher.Config, **options)


@override(target=SelectiveAC.Config, description="Saves the results of Crossdock's operators")
def selective_checkpointing(config: Any) -> SelectiveCheckpointing.Config:
    return derive(config, SelectiveCheckpointing.Config)
