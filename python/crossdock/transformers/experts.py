"""Experts of transformers, computed by the library: `experts_implementation="crossdock"`."""
import warnings
from typing import Any, Optional, Set, Tuple

import torch

from crossdock.torch import ops
from crossdock.torch.library_experts import expert_mlp

from .forms import Parameters, computing_dtype, form_of, parameters_of, refusal_of
from .local_dispatch import dispatch_here

_warned: Set[Tuple[str, str]] = set()


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, D], ids and weights [T, K] -> [T, D]. Ids outside [0, num_experts) are experts of other ranks."""
    parameters = parameters_of(self)
    if examine(self, parameters, hidden_states) is not None:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    num_experts = parameters[0].shape[0]
    tokens = hidden_states.to(computing_dtype(hidden_states, parameters[0]))
    ids = top_k_index.masked_fill((top_k_index < 0) | (top_k_index >= num_experts), -1)
    # At least K experts, as dispatchers need; those that are not here have no routes.
    rows, _, tokens_per_expert, plan = dispatch_here(tokens, ids, top_k_weights, max(num_experts, ids.shape[1]), False)
    y = compute(self, parameters, rows, tokens_per_expert[:num_experts])
    return ops.combine(y, top_k_weights, ids, plan).to(hidden_states.dtype)


def examine(module: Any, parameters: Parameters, tokens: torch.Tensor) -> Optional[str]:
    """Why the library cannot compute the module's experts, which is also a warning, once; None: it can."""
    refusal = refusal_of(module, parameters, tokens)
    if refusal is not None:
        _warn_once(type(module).__name__, refusal)
    return refusal


def compute(module: Any, parameters: Parameters, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """rows [R, D], grouped by expert -> y [R, D], before the weights of the routes."""
    cast = [None if p is None else p.to(rows.dtype) for p in parameters]
    form = form_of(module)
    # Compilers cannot unpack the form.
    options = (form.activation, form.limit, form.interleaved, form.transposed, form.weights_in, form.recompute)
    y = expert_mlp(rows, None, *cast, tokens_per_expert, *options, torch.is_grad_enabled())[0]
    return module.post_expert_norm(y) if module.has_post_expert_norm else y


def register_for_fp8(name: str) -> None:
    """Experts of fp8 checkpoints look in a registry of their own, and raise KeyError for names that it lacks."""
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8ExpertsInterface
    except ImportError:
        return
    own = ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]

    def forward(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        _warn_once(type(self).__name__, "its parameters are quantised, or differ in dtype")
        return own(self, *arguments, **options)

    FP8ExpertsInterface.register(name, forward)


@torch._dynamo.assume_constant_result  # compilers cannot trace a warning
def _warn_once(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"crossdock does not compute {name}: {reason}; transformers' own function does", stacklevel=3)
