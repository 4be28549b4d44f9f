"""Expert parallelism of transformers by the library's dispatcher: `ep_implementation="crossdock"`."""
from typing import Any

import torch
from transformers.distributed.expert_parallel import EPImplementation

import crossdock
from crossdock.torch import group, ops
from crossdock.torch.core import core_of

from . import dispatchers
from .experts import compute, examine
from .forms import DTYPES, computing_dtype, parameters_of
from .shared_tokens import SharedTokens, join_parts, take_part
from .tracing import evaluated_while_tracing


class CrossdockEP(EPImplementation):
    """Sends each token to the ranks of its experts. Of the tokens that the ranks of `tp_mesh` share, each rank sends a part.

    The experts compute the rows as the dispatcher grouped them, with the library's products if it can, whatever
    `experts_implementation` is, otherwise with their own forward, one route per row.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.options = dispatchers.options
        self.num_experts = self.num_local_experts * ep_mesh.size()
        self.group = group(ep_mesh.get_group(), **self.options.group_options)
        is_shared = tp_mesh.size() > 1
        self.shared = SharedTokens(tp_mesh.get_group(), self.options.group_options) if is_shared else None

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if self.shared is None:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        key = _key_of(self.shared)
        try:
            x, weights = take_part(hidden_states, top_k_weights, key)
        except crossdock.Error as error:
            if error.code == crossdock.ErrorCode.MISMATCH:  # others wait for the tokens
                core_of(_dispatcher_of(self, top_k_index.shape[1], hidden_states.shape[1])).refuse(error)
            raise
        out = self._exchange(x, self.shared.take(top_k_index), weights)
        return join_parts(out, hidden_states.shape[0], key)

    def _exchange(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parameters = parameters_of(self.experts)
        refusal = examine(self.experts, parameters, x)
        tokens = x if refusal is not None else x.to(computing_dtype(x, parameters[0]))
        dispatcher = _dispatcher_of(self, ids.shape[1], tokens.shape[1])
        rows, _, tokens_per_expert, plan = ops.dispatch(tokens, ids, weights, dispatcher, False)
        if refusal is None:
            y = compute(self.experts, parameters, rows, tokens_per_expert)
        else:
            y = self._by_their_own_forward(rows, tokens_per_expert)
        return ops.combine(y, weights, ids, plan).to(x.dtype)

    def _by_their_own_forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """The experts' own forward, with one route per row. Every parameter takes part, because all ranks reduce its gradient;
        quantised ones have none."""
        trained = (p for p in self.experts.parameters() if p.requires_grad and p.dtype in DTYPES)
        unused = sum(p.flatten()[:0].sum() for p in trained)
        if rows.shape[0] == 0:
            return rows + unused
        ends = tokens_per_expert.cumsum(0)
        ids = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
        here = (ids < self.num_local_experts)[:, None]
        # With max_rows on a GPU there are rows after those of the last expert. Not every forward accepts ids beyond it.
        ids = ids.clamp(max=self.num_local_experts - 1)[:, None]
        return self.experts_forward(rows.masked_fill(~here, 0), ids, here.to(rows.dtype)) + unused


@evaluated_while_tracing
def _key_of(tokens: SharedTokens) -> int:
    return tokens.key


@evaluated_while_tracing
def _dispatcher_of(implementation: CrossdockEP, top_k: int, width: int) -> int:
    options = implementation.options
    return dispatchers.dispatcher_of(
        implementation.group,
        num_experts=implementation.num_experts,
        top_k=top_k,
        width=width,
        max_rows=options.max_rows,
        strategy=options.strategy,
        partial_sums=options.partial_sums,
    )
