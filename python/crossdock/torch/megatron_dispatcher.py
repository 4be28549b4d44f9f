"""A token dispatcher with the interface of Megatron-LM's."""
from typing import Any, Dict, List, Optional, Tuple

import torch
from megatron.core import utils
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from . import ops
from .core import Core, shared_core
from .groups import group


class MegatronTokenDispatcher(MoETokenDispatcher):
    """Replaces MoEAlltoAllTokenDispatcher in a MoELayer.

    All ranks of the tp_ep group exchange rows directly. With expert tensor parallelism every expert stands for one
    virtual expert per rank that holds a shard of it: tokens go to all of them, and combine sums their results, so no
    gather or reduce-scatter remains.

    Routes come from the map, never from the probabilities. Between the steps of a forward pass, `self` keeps the state
    for the next step; the state for backward is in the autograd graph, which may be cut between any two steps.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: List[int], config: Any, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.num_experts = config.num_moe_experts
        self._check_placement()
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity  # Megatron's inference switches it
        # A CUDA graph that ends after dispatch_preprocess returns these.
        self.cudagraph_attrs = ["routing_map"]
        self.routing_map: Optional[torch.Tensor] = None
        self.hidden_shape: Optional[torch.Size] = None
        self._plan: Optional[torch.Tensor] = None
        self._tokens_per_expert: Optional[torch.Tensor] = None
        self._num_tokens = 0
        self._cores: Dict[Tuple[int, int], Core] = {}

    # ---- Steps ----

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Remembers shape and routes. hidden [S/TP, B, H] or [N, H] -> [N, H]; probs as they are."""
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Sends tokens and probabilities: [N, H], [N, E] -> rows [M, H], row probs [M] in the dtype of probs."""
        core = self._core(hidden_states.shape[1])
        rows, row_probs, self._tokens_per_expert, self._plan = ops.dispatch(
            hidden_states, self._virtual(self.routing_map.bool()), self._virtual(probs), core.key, True
        )
        self._num_tokens = hidden_states.shape[0]
        return rows, row_probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows are in place. -> rows [M, H] by local expert, rows per expert [EL] on the CPU, row probs [M]."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        counts, self._tokens_per_expert = self._tokens_per_expert, None
        return hidden_states, counts.cpu(), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Does nothing: combine reads rows where the experts wrote them."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Sums the rows of each token: [M, H] -> [N, H]. The experts have applied the probabilities."""
        plan, self._plan = self._plan, None
        return ops.combine_unweighted(hidden_states, plan, self._num_tokens)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restores the shape of the input and adds the shared experts."""
        if self.shared_experts is None:
            return hidden_states.view(self.hidden_shape)
        self.shared_experts.linear_fc2_forward(hidden_states)
        self.shared_experts.post_forward_comm()
        return hidden_states.view(self.hidden_shape) + self.shared_experts.get_output()

    # ---- For the layer and for graphs ----

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Computes the shared experts between the steps, in their own stream (moe_shared_expert_overlap)."""
        super().set_shared_experts(shared_experts)
        if shared_experts.use_shared_expert_gate:
            self.cudagraph_attrs.append("shared_experts.gate_score")
        self.cudagraph_attrs.append("shared_experts.cached_fc1_input")

    def get_expert_zero_copy_buffers(self) -> Tuple[None, None]:
        """None: experts write to torch's memory."""
        return None, None

    # ---- Inside ----

    def _check_placement(self) -> None:
        """Checks that Crossdock and Megatron place the experts on the same ranks."""
        if self.num_local_experts * self.ep_size != self.num_experts:
            raise ValueError(
                f"num_moe_experts ({self.num_experts}) must be num_local_experts ({self.num_local_experts}) times the "
                f"expert parallel size ({self.ep_size})"
            )
        ep_rank = utils.get_pg_rank(self.ep_group)
        first = ep_rank * self.num_local_experts
        expected = list(range(first, first + self.num_local_experts))
        if list(self.local_expert_indices) != expected:
            raise ValueError(
                f"local_expert_indices of expert parallel rank {ep_rank} must be {expected}, got "
                f"{list(self.local_expert_indices)}"
            )
        rank = utils.get_pg_rank(self.tp_ep_group)
        if rank != ep_rank * self.tp_size + self.tp_rank:
            raise ValueError(
                f"ranks of the tp_ep group must be ordered by expert parallel rank, then by expert tensor parallel rank: "
                f"rank {rank} has {ep_rank} and {self.tp_rank}"
            )

    def _core(self, width: int) -> Core:
        """The dispatcher for tokens of this width, made at the first call with it, which is collective."""
        experts = self.num_experts * self.tp_size
        most = experts if self.drop_and_pad else self.config.moe_router_topk * self.tp_size
        core = self._cores.get((width, most))
        if core is None:
            core = shared_core(
                group(self.tp_ep_group),
                num_experts=experts,
                top_k=self.config.moe_router_topk * self.tp_size,
                width=width,
                alignment=self._alignment(),
                max_routes_per_token=most,
            )
            self._cores[(width, most)] = core
        return core

    def _alignment(self) -> int:
        padded = getattr(self.config, "moe_router_padding_for_quantization", False)
        return get_align_size_for_quantization(self.config) if padded else 1

    def _virtual(self, by_expert: torch.Tensor) -> torch.Tensor:
        """[N, E] -> [N, EP * TP * EL]: one column for every rank of tp_ep and every expert that it has a part of."""
        if self.tp_size == 1:
            return by_expert
        columns = by_expert.reshape(-1, self.ep_size, 1, self.num_local_experts)
        columns = columns.expand(-1, -1, self.tp_size, -1)
        return columns.reshape(by_expert.shape[0], self.num_experts * self.tp_size)
