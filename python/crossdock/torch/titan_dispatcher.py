"""A token dispatcher with the interface of torchtitan's."""
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch

from . import ops
from .core import Core, shared_core
from .dispatcher import Handle
from .groups import group_of, group_of_one

_numbers = itertools.count(1)
_owners: "weakref.WeakValueDictionary[int, TitanTokenDispatcher]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class TitanMetadata:
    """What `combine` needs from `dispatch`."""

    handle: Handle


class TitanTokenDispatcher:
    """Dispatch and combine as torchtitan's RoutedExperts calls them. Does not import torchtitan.

    `wire_meshes` connects the ranks of the expert mesh, which is collective; `ep_mesh=None` is one rank. Everything
    about a call is in its metadata, so any number of micro-batches may be in flight. `options` are those of
    `crossdock.torch.Dispatcher`, for example `alignment` and `max_rows`. Without `width`, tokens may have any width.
    """

    def __init__(self, *, num_experts: int, top_k: int, **options: Any):
        self.num_experts = num_experts
        self.top_k = top_k
        self.options = options
        self.ep_mesh: Any = None
        self._cores: Dict[int, Core] = {}  # by width
        self._number = next(_numbers)
        _owners[self._number] = self

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Uses the ranks of `ep_mesh`, a DeviceMesh of one dimension or a ProcessGroup, from now on."""
        self.ep_mesh = ep_mesh
        self._cores.clear()
        if ep_mesh is not None:
            group_of(ep_mesh)

    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: Optional[torch.Tensor] = None,  # noqa: N803
    ) -> Tuple[torch.Tensor, torch.Tensor, TitanMetadata]:
        """-> rows [R, D] by local expert, rows per local expert [E_local] int64, and metadata for `combine`.

        The counts in the last argument are not needed: the routes determine them.
        """
        del num_local_tokens_per_expert_E
        key = _key_of(self._number, x_TD.shape[1])
        rows, _, counts, plan = ops.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK, key, False)
        return rows, counts, TitanMetadata(Handle(plan, topk_expert_ids_TK, topk_scores_TK))

    def combine(
        self, routed_output_RD: torch.Tensor, metadata: TitanMetadata, x_TD: torch.Tensor  # noqa: N803
    ) -> torch.Tensor:
        """-> out [T, D], the weighted sum, in the dtype of x."""
        handle = metadata.handle
        return ops.combine(routed_output_RD.to(x_TD.dtype), handle.weights, handle.routing, handle.plan)


def _key_of(number: int, width: int) -> int:
    """The number that identifies the dispatcher to the operators; the dispatcher is made when first needed."""
    owner = _owners[number]
    core = owner._cores.get(width)
    if core is None:
        ranks = group_of_one() if owner.ep_mesh is None else group_of(owner.ep_mesh)
        options = {"width": width, **owner.options}
        core = owner._cores[width] = shared_core(ranks, num_experts=owner.num_experts, top_k=owner.top_k, **options)
    return core.key


# A compiler makes the dispatcher while tracing and treats its number as a constant. This is what
# torch.compiler.assume_constant_result sets, which first imports the compiler: most of the time that importing
# crossdock.torch would take.
_key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
