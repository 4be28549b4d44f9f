"""The library's layer with all its options as a differentiable operator: `torch.ops.crossdock.whole_layer`."""
import collections
import itertools
import weakref
from typing import Any, Deque, Dict, List, NamedTuple, NoReturn, Optional, Tuple

import torch

import crossdock
from crossdock._library import lib
from crossdock._tensor import Marshal

from . import calls, groups, kept
from .core import Core
from .layer_config import LayerConfig
from .loss_scale import loss_scale
from .registration import define, refuse_gradient, save_nothing
from .report import LayerReport, copy_of, report_of
from .tensors import is_captured

PARAMETERS = ("gate", "gate_bias", "w1", "w2", "b1", "b2", "shared_w1", "shared_w2", "shared_b1", "shared_b2")
_P = len(PARAMETERS)
_OF_EXPERTS = slice(2, _P)
_keys = itertools.count(1)
_states: "Dict[int, weakref.ref[LayerState]]" = {}


class Delayed(NamedTuple):
    """A backward whose gradients of w1, w2, b1, b2 and those of the shared experts are still to be computed."""

    layer: Any  #: of the library, for `calls`
    x: torch.Tensor
    grad_out: torch.Tensor
    values: crossdock.LayerSaved
    parameters: Tuple[Optional[torch.Tensor], ...]  # [8] those of the experts, None where no gradient is wanted


class LayerState:
    """What a MoELayer keeps between calls, known to the operators by a number. Copies have the same configuration and
    loads, and their own report."""

    def __init__(self, core: Core, config: LayerConfig):
        self.core = core
        self.group = core.group
        self.lock = groups.lock_of(core.group)
        self.config = config
        self.ranks = _ranks_of(config, core.group)
        self.num_ranks = core.group.size // config.etp
        self.report: Optional[LayerReport] = None
        self.load: Optional[torch.Tensor] = None  # [E] of the forwards since the last update that had a backward
        self.earlier: Optional[crossdock.LayerSaved] = None  # the step's last forward that had a backward
        self.earlier_counts: Optional[torch.Tensor] = None  # [E + 1] of all such forwards of a layer that runs step by step
        self.delayed: Deque[Delayed] = collections.deque()
        self._layers: Dict[Tuple, Tuple[crossdock.Layer, Any]] = {}
        self.key = key = next(_keys)
        _states[key] = weakref.ref(self, lambda _: _states.pop(key, None))

    def __deepcopy__(self, memo: dict) -> "LayerState":
        twin = LayerState(self.core, self.config)
        twin.load = None if self.load is None else self.load.clone()
        twin._layers = self._layers
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.core.__reduce_ex__(protocol)
        raise TypeError("the state of a MoELayer belongs to its process; save the state_dict")

    def sequence_share(self, total_sequences: int) -> float:
        """The factor on the loss of sequences: each sequence group divides by the number of its own, unless it is told how
        many the counting group has; the mean of the groups' losses is wanted."""
        shared, counting = self.config.sequence_group, self.config.counting_group or self.group
        return 1.0 if shared is None or total_sequences else shared.size / counting.size

    def layer_of(self, dtype: torch.dtype, is_training: bool, total_sequences: int = 0) -> Tuple[crossdock.Layer, Any]:
        """The layer of the library, itself and for `calls`."""
        config = self.config
        share = self.sequence_share(total_sequences) if config.sequence_group is not None else 1.0
        key = (dtype, is_training and not config.is_plain, share, config.score, config.normalise, config.scale)
        found = self._layers.get(key)
        if found is None:
            layer = crossdock.Layer(self.group, dtype=dtype, **config.for_library(is_training, share))
            found = self._layers[key] = layer, calls.new_layer(layer, layer._handle, self.group.rank, self.lock)
        return found

    def refuse(self, error: Exception, is_whole: bool = True) -> NoReturn:
        """Raises the error on all ranks, which make a forward of the library's layer, or else sum the load."""
        with Marshal() as marshal:
            raise error
        with self.lock:
            if is_whole:
                layer, _ = self.layer_of(torch.float32, False)
                marshal.call(self.group.rank, lib.layer_forward, layer._handle, None, None, None)
            else:
                marshal.call(self.group.rank, lib.group_all_reduce, self.group._handle, None, 0)
        raise error

    def loss_factor(self) -> float:
        """The factor on the gradients of the losses."""
        factor = loss_scale()
        if self.config.gradients == "averaged":
            counting = self.config.counting_group or self.group
            replicas = self.config.replicated_over
            factor *= counting.size / (replicas.size if replicas is not None else 1)
        return factor

    def count(self, values: crossdock.LayerSaved, like: torch.Tensor) -> None:
        """Called by the backward of every forward, once, however often checkpointing repeats the forward."""
        if self.config.expert_bias:
            self._add_load(copy_of(values.report_fields()["load"], like))
        if self.config.aux_coeff("global_batch"):
            self.earlier = values

    def count_steps(self, load: torch.Tensor, counts: torch.Tensor) -> None:
        """The same for a layer that runs step by step. load [E] and counts [E + 1], or empty."""
        if self.config.expert_bias:
            self._add_load(load)
        if self.config.aux_coeff("global_batch"):
            self.earlier_counts = counts if self.earlier_counts is None else self.earlier_counts.to(counts.device) + counts

    def start_step(self) -> None:
        """Forgets the forwards of the step before."""
        self.load = self.earlier = self.earlier_counts = None

    def _add_load(self, load: torch.Tensor) -> None:
        self.load = load if self.load is None else self.load.to(load.device) + load


def _ranks_of(config: LayerConfig, group: crossdock.Group) -> List[int]:
    """[E] the rank of each expert, among the group's ranks divided by etp."""
    if config.placement is not None:
        return list(config.placement)
    each, more = divmod(config.num_experts, group.size // config.etp)
    sizes = (each + (rank < more) for rank in range(group.size // config.etp))
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


def state_of(key: int) -> LayerState:
    found = _states.get(key)
    state = found() if found is not None else None
    if state is None:
        raise RuntimeError("this MoELayer was not kept as long as its calls are used")
    return state


def _forward(
    state: LayerState, inputs: Tuple, keep: bool, earlier: Optional[crossdock.LayerSaved]
) -> Tuple[torch.Tensor, Optional[crossdock.LayerSaved]]:
    """Out [T, D] and the values for backward. inputs: see `_layer`; earlier: see LayerState. The lock is held."""
    x, seed, config = inputs[0], inputs[_T - 1], state.config
    mask, _, forced_ids, token_ids = inputs[_KNOWN]
    num_sequences, total_sequences, is_training = inputs[_T + 1 : _T + 4]
    has_report = not config.is_plain or mask is not None or forced_ids is not None
    _, layer = state.layer_of(x.dtype, is_training, total_sequences)
    if seed is not None:
        # Differs between ranks, whose generators may be in step, unless the tokens have ids or are on several ranks.
        is_shared = token_ids is not None or config.replicated_over is not None
        seed = int(seed) if is_shared else (int(seed) + state.group.rank * 0x9E3779B97F4A7C15) % 2**63
    options = (num_sequences, total_sequences or 0, seed or 0, earlier if is_training else None, keep or has_report)
    out, losses, saved = calls.layer_forward(layer, inputs[: _T - 1], *options)
    if has_report:
        has_drops = config.capacity_factor is not None or config.capacity_tokens is not None
        state.report = report_of(saved, losses, x, config.num_experts, config.etp, has_drops, state.ranks, state.num_ranks)
    if keep and is_captured(x):
        state.core.captured.append(saved)
    return out, saved


def _layer(*inputs: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """x [T, D] -> out [T, D] and, if `keep`, values for backward. Parameters as in MoELayer."""
    keep, state = inputs[-1], state_of(inputs[_T])
    with state.lock:
        earlier = state.earlier
        out, saved = _forward(state, inputs, keep, earlier)
    return out, kept.tensor_of(saved, earlier) if keep else None


def _layer_backward(grad_out: torch.Tensor, saved: torch.Tensor, *inputs: Any) -> Tuple[Optional[torch.Tensor], ...]:
    """grad_out [T, D] -> the gradients of x and the parameters; None: not wanted, or left for later."""
    state, x, wanted = state_of(inputs[_T]), inputs[0], inputs[-1]
    num_sequences, total_sequences, is_training = inputs[_T + 1 : _T + 4]
    with state.lock:
        values = kept.take(saved)
        if values is None:  # the graph is used a second time, on all ranks
            _, values = _forward(state, inputs, True, kept.origin_of(saved))
        elif is_training:
            state.count(values, x)
        _, layer = state.layer_of(x.dtype, is_training, total_sequences)
        is_later = state.config.delay_dw
        grads = calls.layer_backward(
            layer, inputs[: 2 + _P], grad_out, values, wanted, state.loss_factor(), is_later
        )
        if is_later and any(wanted[_OF_EXPERTS]):
            of_experts = inputs[1 : 1 + _P][_OF_EXPERTS]
            chosen = (p if want else None for p, want in zip(of_experts, wanted[_OF_EXPERTS]))
            state.delayed.append(Delayed(layer, x, grad_out, values, tuple(chosen)))
    return grads


def delayed_gradients(delayed: Delayed) -> Tuple[Optional[torch.Tensor], ...]:
    """The gradients of the experts' parameters that a backward left for later. Not collective."""
    return calls.layer_backward_dw(*delayed)


# ---- The operator ----

_TENSORS = ", ".join(
    [
        "Tensor x, Tensor gate, Tensor? gate_bias, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2",
        "Tensor? shared_w1, Tensor? shared_w2, Tensor? shared_b1, Tensor? shared_b2, Tensor? expert_bias",
        "Tensor? mask, Tensor? sequence_ids, Tensor? forced_ids, Tensor? token_ids, Tensor? seed",
    ]
)
_NUMBERS = "int layer, SymInt num_sequences, SymInt total_sequences, bool is_training"
_T = _TENSORS.count("Tensor")
_KNOWN = slice(2 + _P, 6 + _P)  # mask, sequence_ids, forced_ids and token_ids


# Operators return tensors only.


def _operator(*inputs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    out, saved = _layer(*inputs)
    return out, kept.like_kept() if saved is None else saved


def _backward_operator(*inputs: Any) -> Tuple[torch.Tensor, ...]:
    likes = (inputs[2] if given is None else given for given in inputs[2 : 3 + _P])
    return tuple(like.new_empty(0) if grad is None else grad for grad, like in zip(_layer_backward(*inputs), likes))


def _fake_layer(x, *_):
    return x.new_empty(x.shape), kept.like_kept()


def _fake_backward(grad_out, saved, *inputs):
    x, *parameters = inputs[: 1 + _P]
    is_later, wanted = state_of(inputs[_T]).config.delay_dw, inputs[-1]
    made = []
    for name, parameter, want in zip(PARAMETERS, parameters, wanted):
        is_given = want and not (is_later and not name.startswith("gate"))
        like = x if parameter is None else parameter
        made.append(like.new_empty(like.shape if is_given else (0,)))
    return (x.new_empty(x.shape), *made)


def _save(ctx: Any, inputs: Tuple, output: Tuple) -> None:
    ctx.save_for_backward(output[1], *inputs[:_T])
    ctx.numbers = inputs[_T:-1]


def _gradient(ctx: Any, grad_out: torch.Tensor, _: Any) -> Tuple:
    saved, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[1 : 1 + _P])
    grad_x, *grads = whole_layer_backward(grad_out, saved, *tensors, *ctx.numbers, wanted)
    is_later = state_of(ctx.numbers[0]).config.delay_dw
    are_made = (want and not (is_later and not name.startswith("gate")) for name, want in zip(PARAMETERS, wanted))
    parameters = (grad if made else None for grad, made in zip(grads, are_made))
    return (grad_x, *parameters, *(None,) * (_T - 1 - _P), *(None,) * 5)


def _refuse(error: Exception, inputs: Tuple) -> NoReturn:
    state_of(next(given for given in inputs if type(given) is int)).refuse(error)


whole_layer = define(
    "whole_layer",
    f"({_TENSORS}, {_NUMBERS}, bool keep) -> (Tensor, Tensor)",
    _layer,
    _fake_layer,
    _save,
    _gradient,
    _operator,
    refuse=_refuse,
)
whole_layer_backward = define(
    "whole_layer_backward",
    f"(Tensor grad_out, Tensor saved, {_TENSORS}, {_NUMBERS}, bool[] wanted) -> ({', '.join(['Tensor'] * (1 + _P))})",
    _layer_backward,
    _fake_backward,
    save_nothing,
    refuse_gradient,
    _backward_operator,
    refuse=_refuse,
)
