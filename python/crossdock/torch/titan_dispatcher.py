"""A token dispatcher with the interface of torchtitan's."""
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import torch

from .dispatcher import Dispatcher, Handle
from .groups import group, group_of_one


@dataclass(frozen=True)
class TitanMetadata:
    """What `combine` needs of `dispatch`."""

    handle: Handle


class TitanTokenDispatcher:
    """Dispatch and combine as torchtitan's RoutedExperts calls them. Does not import torchtitan.

    `wire_meshes` connects the ranks of the expert mesh, which is collective; `ep_mesh=None` is one rank. Everything
    about a call is in its metadata, so any number of micro-batches may be in flight. `options` are those of
    `crossdock.torch.Dispatcher`, for example `alignment` and `max_rows`.
    """

    def __init__(self, *, num_experts: int, top_k: int, **options: Any):
        self.num_experts = num_experts
        self.top_k = top_k
        self.options = options
        self.ep_mesh: Any = None
        self._dispatcher: Optional[Dispatcher] = None
        self._width: Optional[int] = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Uses the ranks of `ep_mesh` from now on."""
        self.ep_mesh = ep_mesh
        self._dispatcher = None
        if ep_mesh is not None:
            group(ep_mesh.get_group())

    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: Optional[torch.Tensor] = None,  # noqa: N803
    ) -> Tuple[torch.Tensor, torch.Tensor, TitanMetadata]:
        """-> rows [R, D] by local expert, rows per local expert [E_local] int64, and metadata for `combine`.

        The counts of the last argument are not needed: the routes have them.
        """
        del num_local_tokens_per_expert_E
        dispatcher = self._ready(x_TD.shape[1])
        sent = dispatcher.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK, row_weights=False)
        return sent.rows, sent.tokens_per_expert, TitanMetadata(sent.handle)

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: TitanMetadata, x_TD: torch.Tensor  # noqa: N803
    ) -> torch.Tensor:
        """-> out [T, D], the weighted sum, in the dtype of x."""
        dispatcher = self._ready(x_TD.shape[1])
        return dispatcher.combine(routed_output_RD.to(x_TD.dtype), metadata.handle)

    def close(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._dispatcher = None

    def _ready(self, width: int) -> Dispatcher:
        if self._dispatcher is None or self._width != width:
            self._dispatcher = self._make(width)
            self._width = width
        return self._dispatcher

    def _make(self, width: int) -> Dispatcher:
        ranks = group_of_one() if self.ep_mesh is None else self.ep_mesh.get_group()
        return Dispatcher(ranks, num_experts=self.num_experts, top_k=self.top_k, width=width, **self.options)
