"""The configuration of a MoELayer, checked when it is made."""
import difflib
import functools
import math
import numbers
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import crossdock
from crossdock._dispatcher import COPIES, DROP_POLICIES, NONFINITE, PARTIAL_SUMS
from crossdock._experts import ACTIVATIONS, GATED, WEIGHTS_IN
from crossdock._layer import AUX_LOSS_SCOPES, GROUP_SCORES, SCORES

from .groups import group_of_one

_CHOICES: Dict[str, Any] = {
    "score": SCORES,
    "group_score": GROUP_SCORES,
    "aux_loss_scope": AUX_LOSS_SCOPES,
    "activation": ACTIVATIONS,
    "weights_in": WEIGHTS_IN,
    "drop_policy": DROP_POLICIES,
    "nonfinite": NONFINITE,
    "partial_sums": PARTIAL_SUMS,
    "copies": COPIES,
    "gradients": ("averaged", "summed"),
}
_POSITIVE = ("num_experts", "top_k", "width", "inner", "num_groups", "group_top_k", "overlap_chunks", "etp")
_FINITE = ("scale", "aux_loss_coeff", "z_loss_coeff", "jitter", "limit", "bias_update_rate")
_NOT_NEGATIVE = ("aux_loss_coeff", "z_loss_coeff", "jitter", "shared_inner")


@dataclass(frozen=True)
class RouterOptions:
    """Which experts a token goes to, and with which weights."""

    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    group_top_k: int = 1
    group_score: str = "top_share"
    router_bias: bool = False
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    bias_update_centred: bool = False
    aux_loss_coeff: float = 0.0
    aux_loss_scope: str = "batch"
    aux_loss_coeffs: Optional[Mapping[str, float]] = None
    z_loss_coeff: float = 0.0
    jitter: float = 0.0
    force_balance: bool = False


@dataclass(frozen=True)
class ExpertOptions:
    """What an expert computes."""

    activation: str = "swiglu"
    interleaved: bool = False
    limit: float = 7.0
    bias: bool = False
    weights_in: str = "combine"
    recompute: bool = False


@dataclass(frozen=True)
class DispatchOptions(crossdock._dispatcher.DispatchOptions):
    """How rows travel: the options of `Dispatcher`."""

    nonfinite: str = "propagate"


@dataclass(frozen=True)
class LayerConfig(DispatchOptions, ExpertOptions, RouterOptions):
    """All options of a `MoELayer`, which documents them. Must be identical on every rank, except `recompute` and, with
    tokens on the CPU, `overlap_shared`. Groups are `crossdock.Group` objects."""

    num_experts: int = 0
    top_k: int = 0
    width: int = 0
    inner: Optional[int] = None
    shared_inner: int = 0
    overlap_shared: bool = True
    overlap_chunks: int = 1
    etp: int = 1
    delay_dw: bool = False
    report: bool = False
    gradients: str = "averaged"
    counting_group: Any = None
    sequence_group: Any = None
    replicated_over: Any = None
    allow_equal_tokens: bool = True

    def __post_init__(self) -> None:
        for name in _FINITE:
            value = getattr(self, name)
            if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):  # of numpy
                object.__setattr__(self, name, float(value))
        rest = (field for field in fields(self) if field.name not in _PLAIN and field.name not in _DISPATCH)
        is_plain = self.score in ("softmax", "sigmoid") and all(getattr(self, f.name) == f.default for f in rest)
        object.__setattr__(self, "_is_plain", is_plain)

    def part(self, kind: Any) -> Dict[str, Any]:
        """The options of one of the base classes."""
        return {field.name: getattr(self, field.name) for field in fields(kind)}

    def aux_coeff(self, scope: str) -> float:
        """Coefficient of the auxiliary loss of a scope; 0: none."""
        own = self.aux_loss_coeff if scope == self.aux_loss_scope else 0.0
        return own + dict(self.aux_loss_coeffs or {}).get(scope, 0.0)

    @property
    def has_losses(self) -> bool:
        return self.z_loss_coeff != 0 or any(self.aux_coeff(scope) != 0 for scope in AUX_LOSS_SCOPES)

    @property
    def is_normalised(self) -> bool:
        return self.normalise and self.score != "softmax_after_top_k"

    @property
    def is_plain(self) -> bool:
        """Whether all options are those that the first version of MoELayer had."""
        return getattr(self, "_is_plain")

    def for_library(self, is_training: bool, sequence_share: float) -> Dict[str, Any]:
        """Arguments of crossdock.Layer, without group and dtype. Losses and jitter are for training.

        sequence_share: factor on the loss of sequences."""
        router: Dict[str, Any] = {name: getattr(self, name) for name in ("score", "num_groups", "group_top_k")}
        router.update(group_score=self.group_score, normalise=self.normalise, scaling=self.scale)
        router.update(force_balance=self.force_balance)
        if is_training:
            terms = {scope: self.aux_coeff(scope) for scope in AUX_LOSS_SCOPES}
            terms["sequence"] *= sequence_share
            router.update(aux_loss_coeffs=terms, z_loss_coeff=self.z_loss_coeff, jitter=self.jitter)
        experts = self.part(ExpertOptions)
        del experts["bias"]
        names = ("num_experts", "top_k", "width", "inner", "shared_inner", "overlap_chunks", "etp")
        names += ("counting_group", "sequence_group", "replicated_over", "allow_equal_tokens")
        given = {name: getattr(self, name) for name in names}
        dispatch = self.part(DispatchOptions)
        return dict(given, router=router, experts=experts, dispatch=dispatch, serial_shared=not self.overlap_shared)

    def changed(self) -> List[str]:
        """The options that differ from their defaults, as name=value, the sizes first."""
        groups = ("counting_group", "sequence_group", "replicated_over")
        ordered = sorted(fields(self), key=lambda field: field.name not in _PLAIN[:4])
        shown = ((f.name, getattr(self, f.name)) for f in ordered if getattr(self, f.name) != f.default)
        return [f"{name}={'...' if name in groups else repr(value)}" for name, value in shown]

    def check(self, num_ranks: int, has_own_experts: bool = False) -> None:
        """Raises the first error of this configuration, for a group of `num_ranks`."""
        if has_own_experts == (self.inner is not None):
            raise ValueError("pass either inner, the inner width of the experts, or experts of your own")
        for name, values in _CHOICES.items():
            check_choice(name, getattr(self, name), values)
        for name in _POSITIVE:
            if name != "inner" or self.inner is not None:
                _check_integer(name, getattr(self, name), 1)
        _check_integer("shared_inner", self.shared_inner, 0)
        for name in _FINITE:
            _check_number(name, getattr(self, name), name in _NOT_NEGATIVE)
        if not self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter!r}")
        if not self.limit > 0:
            raise ValueError(f"limit must be above 0, got {self.limit!r}")
        for scope, value in dict(self.aux_loss_coeffs or {}).items():
            check_choice("a scope of aux_loss_coeffs", scope, AUX_LOSS_SCOPES)
            _check_number(f"aux_loss_coeffs[{scope!r}]", value, True)
        self._check_sizes(num_ranks)
        self.config(self.num_experts, self.top_k, self.width)
        _check_strategy(self.strategy)
        if has_own_experts:
            self._check_own_experts()

    def _check_sizes(self, num_ranks: int) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(f"num_experts ({self.num_experts}) must be at least top_k ({self.top_k})")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts ({self.num_experts}) must be a multiple of num_groups ({self.num_groups})")
        if self.group_top_k > self.num_groups:
            raise ValueError(f"group_top_k ({self.group_top_k}) must be at most num_groups ({self.num_groups})")
        if self.group_top_k < self.num_groups:
            size = self.num_experts // self.num_groups
            if self.group_score == "top_share" and self.top_k % self.group_top_k:
                text = f"top_k ({self.top_k}) must be a multiple of group_top_k ({self.group_top_k})"
                raise ValueError(text + ' with group_score="top_share"; or use "top_2"')
            if self.top_k > size * self.group_top_k:
                chosen = size * self.group_top_k
                raise ValueError(f"top_k ({self.top_k}) must be at most the experts of group_top_k groups ({chosen})")
        if num_ranks % self.etp:
            raise ValueError(f"etp ({self.etp}) must divide the number of ranks of the group ({num_ranks})")
        if self.inner is not None and self.inner < self.etp:
            raise ValueError(f"inner ({self.inner}) must be at least etp ({self.etp})")
        if self.placement is not None and len(self.placement) != self.num_experts:
            given = len(self.placement)
            raise ValueError(f"placement must have num_experts ({self.num_experts}) entries, got {given}")
        if self.interleaved and self.activation not in GATED:
            raise ValueError(f"interleaved needs one of the activations {', '.join(GATED)}, got {self.activation!r}")
        if self.top_k == 1 and self.normalise and self.score != "softmax_after_top_k" and not self.is_plain:
            raise ValueError("normalise=True with top_k=1 would make every weight 1; pass normalise=False")

    def _check_own_experts(self) -> None:
        default = ExpertOptions()
        given = [name for name in _EXPERTS if getattr(self, name) != getattr(default, name)]
        if given:
            raise ValueError(f"{given[0]} is an option of the library's experts; pass inner instead of your own experts")
        self.check_steps("experts of your own")

    def check_steps(self, reason: str) -> None:
        """Raises an error if only the library's whole layer has an option."""
        for name in ("etp", "delay_dw", "replicated_over", "allow_equal_tokens"):
            if getattr(self, name) != getattr(LayerConfig, name):
                raise ValueError(f"{name} needs the library's whole layer, which {reason} rules out")


def stand_in(options: Dict[str, Any], has_own_experts: bool = False) -> LayerConfig:
    """A valid configuration in place of options with an error, for a layer whose first forward makes the call that the
    layers of the other ranks make."""
    if has_own_experts:  # theirs have none of these
        options = {name: value for name, value in options.items() if name not in _EXPERTS}
    groups = {name: options.get(name) for name in ("counting_group", "sequence_group", "replicated_over")}
    given: Dict[str, Any] = {name: group for name, group in groups.items() if hasattr(group, "all_reduce")}
    for name, value in options.items():
        if name not in OPTIONS:
            name = next(iter(difflib.get_close_matches(name, OPTIONS, 1)), "report")
        if name == "score":
            value = next(iter(difflib.get_close_matches(str(value), SCORES, 1)), value)
            given["report"] = given.get("report", False) or value not in ("softmax", "sigmoid")
        elif name not in _PLAIN and name not in _DISPATCH and value != getattr(LayerConfig, name):
            given["report"] = True
    config = LayerConfig(num_experts=1, top_k=1, width=1, inner=1, normalise=False, **given)
    return replace(config, normalise=config.is_plain and options.get("top_k") == 1 and bool(options.get("normalise")))


_PLAIN = ("num_experts", "top_k", "width", "inner", "score", "normalise", "scale", "gradients")
_EXPERTS = tuple(field.name for field in fields(ExpertOptions) if field.name != "weights_in")
_DISPATCH = tuple(field.name for field in fields(DispatchOptions))
OPTIONS = tuple(field.name for field in fields(LayerConfig))


def close_matches(name: str, known: Sequence[str]) -> str:
    """"; did you mean ...?" or nothing."""
    found = difflib.get_close_matches(str(name), [str(one) for one in known], 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def make_config(kind: str, **options: Any) -> Tuple[LayerConfig, Optional[Exception]]:
    """The configuration, and the error of an option that `kind`, a class, does not have."""
    error: Optional[Exception] = None
    for name in [name for name in options if name not in OPTIONS]:
        error = error or TypeError(f"{kind} has no option {name!r}{close_matches(name, OPTIONS)}")
        del options[name]
    for name in ("placement", "aux_loss_coeffs"):
        if options.get(name) is not None:
            try:
                options[name] = tuple(options[name]) if name == "placement" else dict(options[name])
            except (TypeError, ValueError) as refused:
                error = error or type(refused)(f"{name}: {refused}")
                del options[name]
    return LayerConfig(**options), error


def check_choice(name: str, value: Any, values: Any) -> None:
    """Raises an error unless `value` is one of `values`."""
    try:
        if value in values:
            return
    except TypeError:  # not hashable
        pass
    raise ValueError(f"{name} must be one of {', '.join(map(str, values))}, got {value!r}{close_matches(value, list(values))}")


@functools.lru_cache(maxsize=None)
def _check_strategy(name: str) -> None:
    """Asks the library, once for a name, in a plan of this rank alone without tokens."""
    try:
        with crossdock.Dispatcher(group_of_one(), num_experts=1, top_k=1, width=1, strategy=name) as dispatcher:
            no_ids, no_weights = (crossdock.Tensor(0, dtype, (0, 1)) for dtype in (crossdock.DType.I32, crossdock.DType.F32))
            dispatcher.plan(no_ids, no_weights)
    except crossdock.Error as error:
        text = str(error).split(": ", 1)[-1]
        raise ValueError(text + close_matches(name, re.findall(r"[a-z]+", text.split(";")[0])[3:])) from None


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_number(name: str, value: Any, is_positive: bool) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (is_positive and value < 0):
        raise ValueError(f"{name} must be a finite number{' of at least 0' if is_positive else ''}, got {value!r}")
