"""The router with all its options in PyTorch's own operations, for layers that run step by step."""
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as functional

from crossdock._layer import AUX_LOSS_SCOPES

from . import kept
from .layer_config import LayerConfig
from .registration import define, refuse_gradient, save_nothing
from .tensors import view_of, weights_dtype
from .whole_layer import CountsInSteps, LayerState, state_of


class Tokens(NamedTuple):
    """What a forward knows of its tokens, flattened."""

    mask: Optional[torch.Tensor] = None  #: [T] bool: True = padding
    sequence_ids: Optional[torch.Tensor] = None  #: [T] int32
    forced_ids: Optional[torch.Tensor] = None  #: [T, K]
    token_ids: Optional[torch.Tensor] = None  #: [T] int64
    num_sequences: Any = 1
    total_sequences: Any = 0


def best_experts(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """scores [T, E] -> expert ids [T, K], best first. As in the library's router, NaN is worse than any number, and equal
    scores go to the lower id.

    In fp32 on the CPU a topk of distinct keys decides as a stable sort does, in a fifth to two thirds of the time, if no
    score is negative. Non-negative fp64 values order like their bit patterns, and the low 29 bits of a converted fp32
    value are zero, so they can hold the id. NaN becomes -1, whose bit pattern is a negative integer.
    """
    last = scores.shape[-1] - 1
    scores = scores.nan_to_num(nan=-1.0)
    if scores.dtype != torch.float32 or not scores.is_cpu:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()
    keys = scores.double().view(torch.int64) | torch.arange(last, -1, -1, device=scores.device)
    return keys.topk(min(top_k, last + 1), dim=-1).indices


def _best_of_any(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """best_experts for scores that may be negative or infinite."""
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].contiguous()


def scores_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """logits [T, E] -> scores [T, E]."""
    if score == "softmax":
        return logits.softmax(dim=-1)
    if score == "sigmoid":
        return logits.sigmoid()
    return functional.softplus(logits).sqrt() if score == "sqrt_softplus" else logits


def choose(config: LayerConfig, logits: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """logits [T, E] -> expert ids [T, K]."""
    scores = scores_of(logits, config.score)
    if config.force_balance:
        slots = torch.arange(scores.shape[0] * config.top_k, device=scores.device)
        return (slots % config.num_experts).view(-1, config.top_k)
    if bias is None and config.group_top_k == config.num_groups and config.score != "softmax_after_top_k":
        return best_experts(scores, config.top_k)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if config.group_top_k < config.num_groups:
        groups = scores.unflatten(-1, (config.num_groups, -1))
        best = 2 if config.group_score == "top_2" else config.top_k // config.group_top_k
        value = groups.topk(min(best, groups.shape[-1]), dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(value, dtype=torch.bool)
        chosen = chosen.scatter(-1, _best_of_any(value, config.group_top_k), True)
        scores = torch.where(chosen[..., None], groups, -torch.inf).flatten(-2)
    return _best_of_any(scores, config.top_k)


def weights_of(config: LayerConfig, logits: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """logits [T, E], expert ids [T, K] -> weights [T, K]; 0 where there is no expert."""
    is_route = expert_ids >= 0
    picked = scores_of(logits, config.score).gather(-1, expert_ids.clamp(min=0).long())
    if config.score == "softmax_after_top_k":
        weights = torch.where(is_route, picked, -torch.inf).softmax(dim=-1)
        weights = torch.where(is_route, weights, 0.0)
    else:
        weights = torch.where(is_route, picked, 0.0)
    if config.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * config.scale


# ---- Jitter ----

_ADDED, *_FACTORS = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # as int64


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """splitmix64 of 64 bits in int64, as src/router/choice.hpp has it."""
    bits = bits + _ADDED
    for shift, factor in zip((30, 27), _FACTORS):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """bits >> shift of the unsigned value."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)


def _jitter_factors(tokens: torch.Tensor, token_ids: Optional[torch.Tensor], seed: torch.Tensor, layer: int) -> torch.Tensor:
    """[T, D] the library's factors on the tokens [T, D], in [1 - jitter, 1 + jitter). They follow from seed [1], token id and
    column."""
    state, device = state_of(layer), tokens.device
    own_seed = torch.tensor(state.seed_of_rank(int(seed), token_ids is not None), device=device)
    ids = torch.arange(tokens.shape[0], device=device) if token_ids is None else token_ids
    keys = _mix(_mix(own_seed) ^ ids)
    bits = _shifted(_mix(keys[:, None] + torch.arange(tokens.shape[1], device=device)), 40)  # 24 bits
    return 1 + state.config.jitter * (bits.to(weights_dtype(tokens.dtype)) * 2.0**-23 - 1)


jitter_factors = define(
    "jitter_factors",
    "(Tensor tokens, Tensor? token_ids, Tensor seed, int layer) -> Tensor",
    _jitter_factors,
    lambda tokens, *_: tokens.new_empty(tokens.shape, dtype=weights_dtype(tokens.dtype)),
    save_nothing,
    refuse_gradient,
)


# ---- Arguments ----


def _checked_ids(ids: torch.Tensor, layer: int, name: str, least: int, end: int) -> torch.Tensor:
    """ids [T] or [T, K] of the CPU in [least, end), or an error on all ranks. Call it before the load is summed."""
    wrong = ids.new_zeros(0, 1) if ids.is_cuda else ((ids < least) | (ids >= end)).nonzero()
    if wrong.shape[0] > 0:
        place = wrong[0].tolist()
        known = f"[{least}, {end})" if least == 0 else f"[0, {end}) or {least}"
        error = ValueError(f"{name}[{', '.join(map(str, place))}] must be in {known}, got {ids[tuple(place)].item()}")
        state_of(layer).refuse(error, is_whole=False)
    return ids.clone()


checked_ids = define(
    "checked_ids",
    "(Tensor ids, int layer, str name, int least, SymInt end) -> Tensor",
    _checked_ids,
    lambda ids, *_: ids.new_empty(ids.shape),
    save_nothing,
    refuse_gradient,
)


# ---- Losses ----


def _sum_over_group(counts: torch.Tensor, layer: int, which: str) -> torch.Tensor:
    """counts [N] int64, summed over a group of the layer: "layer", "counting" or "sequences"; "step": plus those of the
    step's earlier forwards, without any call."""
    state = state_of(layer)
    config = state.config
    if which == "step":
        return state.step.sum_steps(counts)
    counting = config.counting_group or state.group
    group = {"layer": state.group, "sequences": config.sequence_group or counting}.get(which, counting)
    host = counts.detach().to("cpu", torch.int64).clone()
    with state.lock:
        group.all_reduce(view_of(host))
    return host.to(counts.device)


sum_over_group = define(
    "sum_over_group",
    "(Tensor counts, int layer, str which) -> Tensor",
    _sum_over_group,
    lambda counts, layer, which: counts.new_empty(counts.shape, dtype=torch.int64),
    save_nothing,
    refuse_gradient,
)


def losses_of(
    state: LayerState, logits: torch.Tensor, expert_ids: torch.Tensor, tokens: Tokens
) -> Tuple[torch.Tensor, torch.Tensor]:
    """[5] fp64 as LayerReport.losses, with gradients to the logits [T, E], and this forward's counts, if the layer has a loss
    over the global batch. Collective if the layer has losses."""
    config = state.config
    valid = torch.ones_like(logits[:, 0], dtype=torch.bool) if tokens.mask is None else ~tokens.mask
    shares = scores_of(logits, "softmax" if config.score == "softmax_after_top_k" else config.score)
    if config.score in ("sigmoid", "sqrt_softplus"):
        shares = shares / shares.sum(dim=-1, keepdim=True)
    terms = {scope: logits.new_zeros((), dtype=torch.float64) for scope in (*AUX_LOSS_SCOPES, "z")}
    routes = torch.zeros_like(logits, dtype=torch.int64)
    routes = routes.scatter_add(1, expert_ids.clamp(min=0).long(), (expert_ids >= 0).long())
    step = routes.new_zeros(0)
    for scope in AUX_LOSS_SCOPES:
        if config.aux_coeff(scope):
            loss, counts = _balance(state, scope, shares, routes, valid, tokens)
            terms[scope] = config.aux_coeff(scope) * loss.double()
            step = counts if scope == "global_batch" else step
    if config.z_loss_coeff:
        total = sum_over_group(valid.sum()[None], state.key, "counting")[0].clamp(min=1)
        squares = torch.where(valid, logits.logsumexp(dim=-1).square(), 0.0)
        terms["z"] = config.z_loss_coeff * squares.sum().double() / total
    aux: List[torch.Tensor] = [terms[scope] for scope in AUX_LOSS_SCOPES]
    return torch.stack([sum(aux[1:], aux[0]), terms["z"], *aux]), step


def _balance(
    state: LayerState,
    scope: str,
    shares: torch.Tensor,
    routes: torch.Tensor,
    valid: torch.Tensor,
    tokens: Tokens,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of an auxiliary loss, without its coefficient, and this forward's counts [B * (E + 1)]."""
    config, num_experts = state.config, shares.shape[1]
    size = tokens.num_sequences if scope == "sequence" else 1
    ids = torch.zeros_like(valid, dtype=torch.int64)
    if scope == "sequence" and tokens.sequence_ids is not None:
        ids = tokens.sequence_ids.long()
    per_token = torch.cat([routes * valid[:, None], valid[:, None].long()], dim=1)
    counts = routes.new_zeros((size, num_experts + 1)).index_add(0, ids, per_token)
    own = total = None
    if scope != "sequence":
        own = sum_over_group(counts.flatten(), state.key, "counting")
        counts = (sum_over_group(own, state.key, "step") if scope == "global_batch" else own).view(counts.shape)
    elif config.counting_group is not None or config.sequence_group is not None:
        counts = sum_over_group(counts.flatten(), state.key, "sequences").view(counts.shape)
    elif not tokens.total_sequences:
        total = sum_over_group((counts[:, -1] > 0).sum()[None], state.key, "layer")[0]
    if scope == "sequence" and tokens.total_sequences:
        total = counts.new_full((), tokens.total_sequences)
    if total is None:
        total = (counts[:, -1] > 0).sum()
    sums = shares.new_zeros((size, num_experts)).index_add(0, ids, torch.where(valid[:, None], shares, 0.0))
    number = counts[:, -1].clamp(min=1).to(shares.dtype)
    each = (sums * counts[:, :-1]).sum(dim=1) * num_experts / (config.top_k * number * number)
    factor = state.sequence_share(tokens.total_sequences) if scope == "sequence" else 1.0
    return factor * each.sum() / total.clamp(min=1), counts.flatten() if own is None else own


def _attach(
    weights: torch.Tensor, loss: torch.Tensor, load: torch.Tensor, step: torch.Tensor, layer: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The weights, through whose backward the loss gets its gradient, and a value for it: the first backward also counts
    the load [E] of the forward, and the counts of its loss over the global batch."""
    made, state = CountsInSteps(load, step), state_of(layer)
    if step.numel() > 0:
        state.step.add_steps(made)
    return weights.clone(), kept.tensor_of(made)


def _attach_backward(
    grad: torch.Tensor, counts: torch.Tensor, loss: torch.Tensor, layer: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    state, uncounted = state_of(layer), kept.take(counts)
    if uncounted is not None:
        state.count_steps(uncounted)
    return grad.clone(), loss.new_full((), state.loss_factor())


def _save_attached(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.layer = inputs[-1]
    ctx.save_for_backward(output[1], inputs[1])


def _attached_gradient(ctx: Any, grad: torch.Tensor, _: Any) -> Tuple:
    return (*attach_losses_backward(grad, *ctx.saved_tensors, ctx.layer), None, None, None)


attach_losses = define(
    "attach_losses",
    "(Tensor weights, Tensor loss, Tensor load, Tensor step, int layer) -> (Tensor, Tensor)",
    _attach,
    lambda weights, *_: (weights.new_empty(weights.shape), kept.like_kept()),
    _save_attached,
    _attached_gradient,
)
attach_losses_backward = define(
    "attach_losses_backward",
    "(Tensor grad, Tensor counts, Tensor loss, int layer) -> (Tensor, Tensor)",
    _attach_backward,
    lambda grad, counts, loss, _: (grad.new_empty(grad.shape), loss.new_empty(())),
    save_nothing,
    refuse_gradient,
)
