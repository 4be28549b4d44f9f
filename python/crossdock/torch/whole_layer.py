"""The library's layer with all its options as a differentiable operator: `torch.ops.crossdock.whole_layer`."""
import collections
import itertools
import weakref
from typing import Any, Deque, Dict, List, MutableMapping, NamedTuple, NoReturn, Optional, Tuple

import torch

import crossdock
from crossdock._library import lib
from crossdock._tensor import Marshal

from . import groups, kept
from .calls import Core
from .layer_config import LayerConfig
from .library_experts import gradient_memory, is_captured, stream_of
from .loss_scale import loss_scale
from .registration import define, refuse_gradient, save_nothing
from .report import LayerReport, copy_of, report_of
from .tensors import contiguous, empty, view_of, weights_dtype

PARAMETERS = ("gate", "gate_bias", "w1", "w2", "b1", "b2", "shared_w1", "shared_w2", "shared_b1", "shared_b2")
_P = len(PARAMETERS)
_OF_EXPERTS = slice(2, _P)
_keys = itertools.count(1)
_states: "Dict[int, weakref.ref[LayerState]]" = {}


class Delayed(NamedTuple):
    """A backward whose gradients of w1, w2, b1, b2 and those of the shared experts are still to be computed."""

    layer: crossdock.Layer
    x: torch.Tensor
    grad_out: torch.Tensor
    values: crossdock.LayerSaved
    parameters: Tuple[Optional[torch.Tensor], ...]  # [8] those of the experts, None where no gradient is wanted


class CountsInSteps:
    """What a forward that runs step by step has counted: load [E], and counts [E + 1] for the loss of the global batch,
    or an empty tensor."""

    def __init__(self, load: torch.Tensor, counts: torch.Tensor):
        self.load, self.counts = load, counts


class StepCounts:
    """The forwards of an optimizer step that a loss of the global batch counts: those that had a backward, and those in
    flight, whose graph may still have one."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # By number. The counts of a forward of the library's layer include those of all forwards before it.
        self._in_flight: "MutableMapping[int, crossdock.LayerSaved]" = weakref.WeakValueDictionary()
        self._counted: Tuple[int, Optional[crossdock.LayerSaved]] = (-1, None)  # the last of them
        self._steps_in_flight: "MutableMapping[int, CountsInSteps]" = weakref.WeakValueDictionary()
        self._steps_counted: Optional[torch.Tensor] = None  # [E + 1]

    def last(self) -> Optional[crossdock.LayerSaved]:
        """The last forward so far."""
        number, values = max(self._in_flight.items(), default=(-1, None), key=lambda item: item[0])
        return values if number > self._counted[0] else self._counted[1]

    def add(self, values: crossdock.LayerSaved) -> None:
        self._in_flight[next(self._numbers)] = values

    def count(self, values: crossdock.LayerSaved) -> None:
        """In the backward of the forward with these values. A forward of the step before is forgotten."""
        for number in [number for number, one in self._in_flight.items() if one is values]:
            del self._in_flight[number]
            if number > self._counted[0]:
                self._counted = (number, values)

    def sum_steps(self, counts: torch.Tensor) -> torch.Tensor:
        """counts [E + 1] of a forward, plus those of all before it, for layers that run step by step."""
        others = [made.counts for made in self._steps_in_flight.values()]
        if self._steps_counted is not None:
            others.append(self._steps_counted)
        return sum((other.to(counts.device) for other in others), counts.clone())

    def add_steps(self, made: CountsInSteps) -> None:
        self._steps_in_flight[next(self._numbers)] = made

    def count_steps(self, made: CountsInSteps) -> None:
        """As count, for layers that run step by step."""
        for number in [number for number, one in self._steps_in_flight.items() if one is made]:
            del self._steps_in_flight[number]
            before, counts = self._steps_counted, made.counts
            self._steps_counted = counts if before is None else before.to(counts.device) + counts


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
        # [E] of the forwards since the last update that had a backward: one tensor, to which replays of a CUDA graph add.
        self.load: Optional[torch.Tensor] = None
        self.step = StepCounts()
        self.delayed: Deque[Delayed] = collections.deque()
        self._layers: Dict[Tuple, crossdock.Layer] = {}
        self.key = key = next(_keys)
        _states[key] = weakref.ref(self, lambda _: _states.pop(key, None))

    def __deepcopy__(self, memo: dict) -> "LayerState":
        twin = LayerState(self.core, self.config)
        twin.load = None if self.load is None else self.load.clone()
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.core.__reduce_ex__(protocol)
        raise TypeError("the state of a MoELayer belongs to its process; save the state_dict")

    def sequence_share(self, total_sequences: int) -> float:
        """The factor on the loss of sequences: each sequence group divides by the number of its own, unless it is told how
        many the counting group has; the mean of the groups' losses is wanted."""
        shared, counting = self.config.sequence_group, self.config.counting_group or self.group
        return 1.0 if shared is None or total_sequences else shared.size / counting.size

    def layer_of(self, dtype: torch.dtype, is_training: bool, total_sequences: int = 0) -> crossdock.Layer:
        config, share = self.config, self.sequence_share(total_sequences)
        key = (dtype, is_training, share, config.score, config.normalise, config.scale)
        if key not in self._layers:
            options = config.for_library(is_training, share)
            self._layers[key] = crossdock.Layer(self.group, dtype=dtype, **options)
        return self._layers[key]

    def refuse(self, error: Exception, is_whole: bool = True) -> NoReturn:
        """Raises the error on all ranks, which make a forward of the library's layer, or else sum the load."""
        with Marshal() as marshal:
            raise error
        with self.lock:
            if is_whole:
                layer = self.layer_of(torch.float32, False)
                marshal.call(self.group.rank, lib.layer_forward, layer._handle, None, None, None)
            else:
                marshal.call(self.group.rank, lib.group_all_reduce, self.group._handle, None, 0)
        raise error

    def seed_of_rank(self, seed: int, has_ids: bool) -> int:
        """Differs between ranks, whose generators may be in step, unless the tokens have ids or are on several ranks."""
        is_shared = has_ids or self.config.replicated_over is not None
        return seed if is_shared else (seed + self.group.rank * 0x9E3779B97F4A7C15) % 2**63

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
            self.step.count(values)

    def count_steps(self, made: "CountsInSteps") -> None:
        """The same for a layer that runs step by step."""
        if self.config.expert_bias:
            self._add_load(made.load)
        if self.config.aux_coeff("global_batch"):
            self.step.count_steps(made)

    def start_step(self) -> None:
        """Forgets the forwards of the step before."""
        self.step = StepCounts()
        if self.load is not None:
            self.load.zero_()

    def _add_load(self, load: torch.Tensor) -> None:
        if self.load is None and is_captured(load):
            raise RuntimeError("run a step of a layer with an expert bias before capturing one: its load has no memory yet")
        if self.load is None or self.load.device != load.device:
            self.load = torch.zeros_like(load) if self.load is None else self.load.to(load.device)
        self.load.add_(load)


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


class _Call:
    """The inputs of a call, contiguous. The lock of the group is held while it is used."""

    def __init__(self, state: LayerState, tensors: Tuple, numbers: Tuple):
        self.state = state
        self.given = [None if given is None else contiguous(given) for given in tensors]
        x, *parameters = self.given[: 1 + _P]
        self.tokens = x
        views = self.views = [None if given is None else view_of(given) for given in self.given]
        gate, gate_bias, w1, w2, b1, b2, s1, s2, c1, c2 = views[1 : 1 + _P]
        shared = None if s1 is None else crossdock.ExpertWeights(s1, s2, c1, c2)
        self.weights = crossdock.LayerWeights(gate, crossdock.ExpertWeights(w1, w2, b1, b2), shared, gate_bias, views[1 + _P])
        self.parameters = parameters
        self.num_sequences, self.total_sequences, self.is_training = numbers
        self.layer = state.layer_of(x.dtype, self.is_training, self.total_sequences)
        if x.is_cuda:
            self.layer.set_stream(stream_of(x))

    def forward(self, keep: bool, earlier: Optional[crossdock.LayerSaved]) -> Tuple[torch.Tensor, Any]:
        """Out [T, D] and the values for backward. earlier: the last forward of this step."""
        x, state, config = self.tokens, self.state, self.state.config
        mask, sequence_ids, forced_ids, token_ids = self.views[2 + _P : 6 + _P]
        seed = self.given[6 + _P]
        out, memory = empty(x, x.shape)
        made = self.layer.forward(
            self.views[0],
            self.weights,
            mask=mask,
            sequence_ids=sequence_ids,
            forced_ids=forced_ids,
            token_ids=token_ids,
            num_sequences=self.num_sequences,
            total_sequences=self.total_sequences,
            jitter_seed=0 if seed is None else state.seed_of_rank(int(seed), token_ids is not None),
            earlier=earlier if self.is_training else None,
            out=memory,
        )
        has_drops = config.capacity_factor is not None or config.capacity_tokens is not None
        state.report = report_of(made, x, config.num_experts, config.etp, has_drops, state.ranks, state.num_ranks)
        if is_captured(x):
            state.core.captured += [values for values in (made.saved if keep else None, earlier) if values is not None]
        return out, made.saved


def _layer(*inputs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """x [T, D] -> out [T, D] and, if `keep`, values for backward. Parameters as in MoELayer."""
    *tensors, layer, num_sequences, total_sequences, is_training, keep = inputs
    state = state_of(layer)
    with state.lock:
        call = _Call(state, tuple(tensors), (num_sequences, total_sequences, is_training))
        earlier = state.step.last() if is_training else None
        out, saved = call.forward(keep, earlier)
        if keep and is_training and state.config.aux_coeff("global_batch"):
            state.step.add(saved)
    return out, kept.tensor_of(saved, earlier) if keep else kept.like_kept()


def _layer_backward(grad_out: torch.Tensor, saved: torch.Tensor, *inputs: Any) -> Tuple[torch.Tensor, ...]:
    """grad_out [T, D] -> the gradients of x and the parameters; gradients that are not wanted are empty."""
    *tensors, layer, num_sequences, total_sequences, is_training, wanted = inputs
    state, grad_out = state_of(layer), contiguous(grad_out)
    with state.lock:
        call = _Call(state, tuple(tensors), (num_sequences, total_sequences, is_training))
        x, values = call.tokens, kept.take(saved)
        if values is None:  # the graph is used a second time, on all ranks
            values = call.forward(True, kept.origin_of(saved))[1]
        elif is_training:
            state.count(values, x)
        grads, memories = _gradient_memories(call, wanted)
        later, wanted_later = state.config.delay_dw, any(wanted[_OF_EXPERTS])
        gate, gate_bias, *experts = memories
        outputs = crossdock.LayerGradients(gate, gate_bias=gate_bias)
        if not later:
            outputs = outputs._replace(
                experts=crossdock.ExpertWeights(*experts[:4]), shared=crossdock.ExpertWeights(*experts[4:])
            )
        grad_x, memory = empty(x, x.shape)
        factor = state.loss_factor()
        call.layer.backward(
            call.views[0], call.weights, view_of(grad_out), values, outputs, grad_losses=factor, delay_dw=later, grad_x=memory
        )
        if later and wanted_later:
            chosen = (p if want else None for p, want in zip(call.parameters[_OF_EXPERTS], wanted[_OF_EXPERTS]))
            state.delayed.append(Delayed(call.layer, x, grad_out, values, tuple(chosen)))
    like = (x if p is None else p for p in call.parameters)
    return (grad_x, *(grad.to(p.dtype) for grad, p in zip(grads, like)))


def _gradient_memories(call: _Call, wanted: List[bool]) -> Tuple[List[torch.Tensor], List[Any]]:
    """Tensors for the gradients of the parameters, and the arguments for the call."""
    grads, memories = [], []
    for name, parameter, want in zip(PARAMETERS, call.parameters, wanted):
        is_matrix = name.endswith(("w1", "w2"))
        is_later = call.state.config.delay_dw and not name.startswith("gate")
        like = call.tokens if parameter is None else parameter
        dtype = None if is_matrix else weights_dtype(call.tokens.dtype)
        grad, memory = gradient_memory(like, want and not is_later, dtype)
        grads.append(grad)
        memories.append(memory)
    return grads, memories


def delayed_gradients(delayed: Delayed) -> List[Optional[torch.Tensor]]:
    """The gradients of the experts' parameters that a backward left for later. Not collective."""
    grads, memories = [], []
    for name, parameter in zip(PARAMETERS[_OF_EXPERTS], delayed.parameters):
        if parameter is None:
            grads.append(None)
            memories.append(None)
            continue
        dtype = None if name.endswith(("w1", "w2")) else weights_dtype(delayed.x.dtype)
        grad, memory = gradient_memory(parameter, True, dtype)
        grads.append(grad)
        memories.append(memory)
    outputs = crossdock.LayerGradients(
        experts=crossdock.ExpertWeights(*memories[:4]), shared=crossdock.ExpertWeights(*memories[4:])
    )
    if delayed.x.is_cuda:
        delayed.layer.set_stream(stream_of(delayed.x))
    nothing = crossdock.LayerWeights(None, crossdock.ExpertWeights(None, None))
    delayed.layer.backward_dw(view_of(delayed.x), nothing, view_of(delayed.grad_out), delayed.values, outputs)
    return grads


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
    refuse=_refuse,
)
whole_layer_backward = define(
    "whole_layer_backward",
    f"(Tensor grad_out, Tensor saved, {_TENSORS}, {_NUMBERS}, bool[] wanted) -> ({', '.join(['Tensor'] * (1 + _P))})",
    _layer_backward,
    _fake_backward,
    save_nothing,
    refuse_gradient,
    refuse=_refuse,
)
