"""A mixture-of-experts layer: router, dispatch, experts, combine."""
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple

import torch
from torch import nn

import crossdock
from crossdock._layer import update_expert_bias

from .calls import dropped
from .dispatcher import Dispatcher
from .experts import GroupedExperts, library_computes
from .groups import group_of
from .layer_config import DispatchOptions, make_config, stand_in
from .registration import HAS_OPERATORS, is_observed, is_transformed, transform_error
from .report import LayerReport
from .routing import (
    Tokens,
    attach_losses,
    best_experts,
    checked_ids,
    choose,
    jitter_factors,
    losses_of,
    sum_over_group,
    weights_of,
)
from .tensors import view_of, weights_dtype
from .whole_layer import LayerState, delayed_gradients, whole_layer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from crossdock._dispatcher import DispatchKeywords

    class LayerOptions(DispatchKeywords, total=False):
        """The keyword arguments of MoELayer that are not spelled out there."""

        num_groups: int
        group_top_k: int
        group_score: str
        router_bias: bool
        expert_bias: bool
        bias_update_rate: float
        bias_update_centred: bool
        aux_loss_coeff: float
        aux_loss_scope: str
        aux_loss_coeffs: Mapping[str, float]
        z_loss_coeff: float
        jitter: float
        force_balance: bool
        activation: str
        interleaved: bool
        limit: float
        bias: bool
        weights_in: str
        recompute: bool
        shared_inner: int
        overlap_shared: bool
        overlap_chunks: int
        etp: int
        delay_dw: bool
        report: bool
        gradients: str
        counting_group: Any
        sequence_group: Any
        replicated_over: Any
        allow_equal_tokens: bool


MOST_EXPERTS, MOST_ROUTES = 1024, 32  # limits of the library's router on a GPU
__all__ = ["MoELayer", "best_experts"]


def _is_unchanged(module: Optional[nn.Module], kind: type) -> bool:
    if module is None or type(module) is not kind:
        return module is None
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return False
    return not getattr(module, "_backward_pre_hooks", None)


def is_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's kind of device."""
    kind = tensor.device.type
    if HAS_OPERATORS:
        return torch.is_autocast_enabled(kind)
    return torch.is_autocast_enabled() if kind == "cuda" else torch.is_autocast_cpu_enabled()


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of autocast, which is on, for the tensor's kind of device."""
    kind = tensor.device.type
    if HAS_OPERATORS:
        return torch.get_autocast_dtype(kind)
    return torch.get_autocast_gpu_dtype() if kind == "cuda" else torch.get_autocast_cpu_dtype()


def new_seed() -> torch.Tensor:
    """[1] for the jitter of a forward, from torch's CPU generator."""
    return torch.randint(2**62, (1,), device="cpu")


def _router_option(name: str) -> Any:
    """An attribute of MoELayer that can be set at any time, on all ranks alike."""

    def change(layer: "MoELayer", value: Any) -> None:
        layer.config = layer._state.config = replace(layer.config, **{name: value})

    return property(lambda layer: getattr(layer.config, name), change)


class MoELayer(nn.Module):
    """x [..., D] -> [..., D]: the tokens of all ranks of a group through the experts of all ranks.

    `expert_parameters()` belong to this rank alone: keep them out of reductions over the group (DDP:
    `torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`; FSDP2: shard them over the
    ranks that have the same experts, or not at all). `router` and `shared` are replicated.

    The constructor never raises an error about its options: the other ranks would wait for this one. The first forward
    raises it on all ranks; `validate()` raises it here.

    With any option of the parts "Choice", "Losses" and "Experts", `score="softmax_after_top_k"` or "sqrt_softplus", a padding
    mask or forced ids, tokens go through the library's own layer, as one operator, on CPUs and GPUs. So do tokens in bf16 and
    fp16 on a GPU without options. If you changed the modules (`route` overridden, hooks or
    parametrizations on `router`, `experts` or `shared`, experts of your own), and in some other cases (docs/pytorch.md),
    the same steps run one by one. Change modules, and pass masks and ids, on all ranks or none.

    Args:
        group: as for `Dispatcher`.
        num_experts, top_k, width: E, K and D.
        inner: F, the inner width of an expert.
        experts: your own experts, called with (rows [R, D], tokens_per_expert [E_local]), and row_weights [R] as third with
            weights_in="experts", instead of GroupedExperts.
        score: "softmax" over all experts, "softmax_after_top_k" over the chosen ones, "sigmoid", or "sqrt_softplus".
        normalise: divide the weights of a token by their sum.
        scale: factor on the weights.

    Choice (below, E experts in `num_groups` groups of consecutive ones):
        num_groups, group_top_k: only experts of the best group_top_k groups are chosen.
        group_score: of a group: "top_share", the sum of its best K / group_top_k scores, or "top_2" of its best two.
        router_bias: the router is a Linear with a bias.
        expert_bias: a buffer [E] that is added to the scores for the choice only; see `update_expert_bias`.
        bias_update_rate, bias_update_centred: its steps, and whether their mean is subtracted.
        force_balance: slot k of token t goes to expert (t * K + k) mod E, for benchmarks.
    Losses, in training only:
        aux_loss_coeff: coefficient of the auxiliary loss, which balances experts.
        aux_loss_scope: whose routes it counts: "batch", "sequence" (each by itself), or "global_batch", those of the step so far;
            call `update_expert_bias` or `start_step` once per step.
        aux_loss_coeffs: several at once, for example {"batch": 1e-2, "sequence": 1e-4}.
        z_loss_coeff: coefficient of the mean of logsumexp(logits)^2.
        jitter: logits are computed from x times random factors in [1 - jitter, 1 + jitter).
        gradients: "averaged" over the ranks of the counting group, as DDP and FSDP2 do it, or "summed".
        counting_group: ranks over which routes are counted; default: `group`.
        sequence_group: ranks that share sequences, if not those of counting_group. The loss is the mean of its groups' losses,
            or with total_sequences, of all sequences.
    Experts:
        activation, interleaved, limit, bias, weights_in, recompute: as for `GroupedExperts`.
        shared_inner: F of the shared experts, one dense MLP for all tokens with the same options; 0: none.
        overlap_shared: the shared experts compute while rows are dispatched.
        overlap_chunks: if above 1, rows are dispatched in as many chunks, and experts compute on those that arrived.
        delay_dw: backward leaves the gradients of experts and shared experts to `backward_dw()`.
        etp: expert tensor parallelism: so many consecutive ranks of the group share each expert.
        replicated_over: ranks that hold the same tokens.
        allow_equal_tokens: accept tokens that are bit-identical on several ranks; here, unlike in `crossdock.Layer`, the default.
        report: fill `report`; every option of this part and the two above does.
    Rows: all options of `Dispatcher`, for example `alignment`, `max_rows` or `capacity_factor`.
    """

    router: nn.Module
    experts: nn.Module
    shared: Optional[GroupedExperts]
    expert_bias: Optional[torch.Tensor]
    score, normalise, scale = map(_router_option, ("score", "normalise", "scale"))

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        top_k: int,
        width: int,
        inner: Optional[int] = None,
        score: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        experts: Optional[nn.Module] = None,
        device: Any = None,
        dtype: Any = None,
        **options: "Unpack[LayerOptions]",
    ):
        super().__init__()
        given: Dict[str, Any] = dict(options, num_experts=num_experts, top_k=top_k, width=width, inner=inner)
        given.update(score=score, normalise=normalise, scale=scale)
        ranks = group_of(group)
        self._error: Optional[Exception] = None
        try:
            for name in ("counting_group", "sequence_group", "replicated_over"):
                if given.get(name) is not None:
                    given[name] = group_of(given[name])
            self.config, self._error = make_config(type(self).__name__, **given)
            if self._error is None:
                self.config.check(ranks.size, experts is not None)
        except Exception as error:
            self._error = error
        if self._error is not None:  # with what a program needs until the first forward
            self.config = stand_in(given, experts is not None)
        config = self.config
        self._has_own_experts = experts is not None
        self.top_k, self.width = config.top_k, config.width
        sizes = dict(num_experts=config.num_experts, top_k=config.top_k, width=config.width)
        dispatch = config.part(DispatchOptions)
        if config.etp > 1:  # only the library's layer moves rows, and the placement names its groups of ranks
            dispatch["placement"] = None
        self.dispatcher = Dispatcher(ranks, **sizes, **dispatch)
        self._state = LayerState(self.dispatcher._open(), config)
        made = dict(device=device, dtype=dtype)
        self.router = nn.Linear(config.width, config.num_experts, bias=config.router_bias, **made)
        self.experts = self._new_experts(ranks, made) if experts is None or self._error is not None else experts
        self.shared = None
        if config.shared_inner:
            self.shared = GroupedExperts(1, config.width, config.shared_inner, **self._expert_options(), **made)
        bias = None
        if config.expert_bias:
            bias = torch.zeros(config.num_experts, device=device, dtype=weights_dtype(self.router.weight.dtype))
        self.register_buffer("expert_bias", bias)

    def _expert_options(self) -> Dict[str, Any]:
        names = ("activation", "interleaved", "limit", "bias", "recompute")
        return {name: getattr(self.config, name) for name in names}

    def _new_experts(self, ranks: crossdock.Group, made: Dict[str, Any]) -> GroupedExperts:
        config, own = self.config, self.local_experts
        assert config.inner is not None
        shard = (ranks.rank % config.etp, config.etp)
        numbers: Dict[str, Any] = {} if ranks.size == 1 else {"expert_ids": own}  # without numbers: all experts
        if ranks.size > 1 and config.etp == 1:  # checkpoints cannot join shards of the inner dimension
            numbers["num_experts"] = config.num_experts
        options = dict(self._expert_options(), weights_in=config.weights_in, shard=shard, **made)
        return GroupedExperts(len(own), config.width, config.inner, **numbers, **options)

    @property
    def local_experts(self) -> List[int]:
        """[E_local] the experts of this rank, ascending; with etp > 1 it has a shard of each."""
        own = self.dispatcher.group.rank // self.config.etp
        return [expert for expert, rank in enumerate(self._state.ranks) if rank == own]

    @property
    def report(self) -> Optional[LayerReport]:
        """What the last forward decided, as tensors that nothing waited for. None before it, and for layers without
        any option that fills it."""
        return self._state.report

    def expert_parameters(self) -> List[nn.Parameter]:
        """The parameters of this rank's experts."""
        return list(self.experts.parameters())

    def validate(self) -> "MoELayer":
        """Raises the error of this rank's options, if there is one, without any other rank. Returns the layer."""
        if self._error is not None:
            raise self._error
        return self

    def extra_repr(self) -> str:
        if self._error is not None:
            return f"invalid: {self._error}"
        group = self.dispatcher.group
        return ", ".join([*self.config.changed(), f"rank {group.rank} of {group.size}"])

    def reset_parameters(self) -> None:
        """Gives all parameters their first values, for example after `to_empty`. Equally seeded ranks get equal routers
        and shared experts, and every expert the values of its number."""
        for module in (self.router, self.experts, self.shared):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def _apply(self, function: Any, *arguments: Any, **options: Any) -> "MoELayer":
        """As nn.Module does it, except that the expert bias stays in fp32 (fp64 for fp64 layers): a rounded bias would
        route differently."""
        bias = self.expert_bias
        super()._apply(function, *arguments, **options)
        changed = self.expert_bias
        if bias is not None and changed is not None and changed.dtype != bias.dtype:
            dtype = weights_dtype(changed.dtype)
            self.expert_bias = bias.to(device=changed.device, dtype=dtype) if not bias.is_meta else changed.to(dtype)
        return self

    # ---- Between forwards ----

    def start_step(self) -> None:
        """Starts a new optimizer step: forgets the routes that the last step's forwards counted. `update_expert_bias`
        does so too."""
        self._state.start_step()

    @torch.no_grad()
    def update_expert_bias(self, rate: Optional[float] = None, *, group: Any = None) -> None:
        """bias[e] += rate * sign(mean load - load[e]), with the routes of all forwards since the last update that had a
        backward. Call it once per optimizer step, on every rank.

        rate: default: bias_update_rate
        group: a process group over which the loads are summed first: the ranks that have the same experts, or else their
            biases drift apart. None: the layer's group has all ranks that train the layer.
        """
        bias, load = self.expert_bias, self._state.load
        load = None if load is None else load.clone()
        self._state.start_step()
        if bias is None:
            raise ValueError("this layer has no expert bias; pass expert_bias=True")
        if load is None:
            load = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        load = load.to(bias.device)
        if group is not None:
            torch.distributed.all_reduce(load, group=group)
        rate = self.config.bias_update_rate if rate is None else rate
        if bias.is_cuda:
            counts = load.double()
            step = rate * (counts.mean() - counts).sign()
            bias += (step - step.mean() if self.config.bias_update_centred else step).to(bias.dtype)
        else:
            update_expert_bias(view_of(bias), load.tolist(), rate, centred=self.config.bias_update_centred)

    @torch.no_grad()
    def backward_dw(self) -> None:
        """With delay_dw: computes the gradients of experts and shared experts for the oldest backward that has left them,
        and adds them to `.grad`. Does nothing if there is none. Not collective."""
        if not self._state.delayed:
            return
        with self._state.lock:
            grads = delayed_gradients(self._state.delayed.popleft())
        for parameter, grad in zip(self._parameters_of_experts(), grads):
            if parameter is not None and grad is not None:
                grad = grad.to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = grad
                else:
                    parameter.grad.add_(grad)

    def _parameters_of_experts(self) -> Tuple[Optional[nn.Parameter], ...]:
        """[8] as the operator takes them."""
        names = ("w1", "w2", "b1", "b2")
        modules = (self.experts, self.shared)
        return tuple(None if module is None else getattr(module, name) for module in modules for name in names)

    # ---- Forward ----

    def _is_own_route(self) -> bool:
        return type(self).route is MoELayer.route and "route" not in self.__dict__

    def _is_changed(self) -> bool:
        """Whether a module is not the one that the library knows."""
        are_known = _is_unchanged(self.router, nn.Linear) and _is_unchanged(self.experts, GroupedExperts)
        return not (are_known and _is_unchanged(self.shared, GroupedExperts) and self._is_own_route())

    def _is_one_operator(self, tokens: torch.Tensor) -> bool:
        """Whether the library's layer without options computes the same as this module."""
        config = self.config
        if not tokens.is_cuda or not config.is_plain or self._is_changed() or is_autocast(tokens):
            return False
        router, experts, top_k = self.router, self.experts, config.top_k
        if (config.normalise and top_k == 1) or not experts.is_plain or router.bias is not None:
            return False
        gate, w1, w2 = router.weight, experts.w1, experts.w2
        if gate.shape[0] > MOST_EXPERTS or top_k > MOST_ROUTES:
            return False
        return gate.dtype == w1.dtype == w2.dtype == tokens.dtype and library_computes(tokens, gate, w1, w2)

    def route(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """x [T, D] -> expert_ids [T, K] and weights [T, K], fp32 (fp64 for fp64 tokens). Equal scores go to the lower
        expert id, and NaN is worse than any number. Override it to route yourself."""
        logits = self.router(x)
        logits = logits.to(weights_dtype(logits.dtype))
        expert_ids = choose(self.config, logits.detach(), self.expert_bias)
        return expert_ids, weights_of(self.config, logits, expert_ids)

    def _check_kind(self, x: torch.Tensor, has_routes: bool) -> None:
        """Refuses tokens that the router cannot multiply, on every rank: the others would wait in dispatch."""
        weight = getattr(self.router, "weight", None)
        if not isinstance(weight, torch.Tensor) or (x.dtype == weight.dtype and x.device == weight.device):
            return
        if not self._is_own_route() or not _is_unchanged(self.router, nn.Linear):
            return  # they may convert x
        if x.device == weight.device and x.is_floating_point() and x.dtype != torch.float64 and is_autocast(x):
            return
        own = getattr(self.experts, "w1", weight)  # the gate may be wider than the experts
        is_wide_gate = not self.config.is_plain and weight.dtype == torch.float32 and x.dtype == own.dtype != torch.float64
        if x.device == weight.device and is_wide_gate:
            return
        wanted, given = (f"{tensor.dtype} on {tensor.device}" for tensor in (weight, x))
        error = f"x must have the dtype and device of the layer, {wanted}, got {given}; convert x or the layer, or use autocast"
        self._refuse(TypeError(error), has_routes)

    def _refuse(self, error: Exception, has_routes: bool) -> NoReturn:
        """Raises the error on all ranks, in the first call that they make. has_routes: see _is_whole."""
        if self._has_options(has_routes):
            self._state.refuse(error, is_whole=self._is_whole(has_routes))
        self.dispatcher._open().refuse(error)

    def _is_whole(self, has_routes: bool) -> bool:
        """Whether the library's layer with options makes a forward. has_routes: with masks or forced ids."""
        if not self._has_options(has_routes) or self._has_own_experts:
            return False
        # The library does not normalise single weights.
        return not (self.config.top_k == 1 and self.config.is_normalised) and not self._is_changed()

    def _has_options(self, has_routes: bool) -> bool:
        return has_routes or not self.config.is_plain

    def forward(
        self,
        x: torch.Tensor,
        *,
        padding_mask: Optional[torch.Tensor] = None,
        sequence_ids: Optional[torch.Tensor] = None,
        forced_ids: Optional[torch.Tensor] = None,
        token_ids: Optional[torch.Tensor] = None,
        num_sequences: Optional[int] = None,
        total_sequences: int = 0,
    ) -> torch.Tensor:
        """x [..., D] -> [..., D]. Collective.

        Args:
            padding_mask: [...] bool: True = padding, which has no routes, counts nowhere, and gets the result of the shared
                experts, or zero.
            sequence_ids: [...] int: the sequence of each token, for aux_loss_scope="sequence". Default for x [B, L, D]: b.
            forced_ids: [..., K] int: the experts to use instead of a choice, -1: none; weights come from the scores.
            token_ids: [...] int: identifies each token for the jitter; default: 0, 1, ...
            num_sequences: number of sequences in `sequence_ids`.
            total_sequences: that of the counting group; needed on a GPU if its ranks have sequences of their own.
        """
        has_routes = padding_mask is not None or forced_ids is not None
        if self._error is not None:
            self._refuse(self._error, has_routes)
        if not isinstance(x, torch.Tensor) or x.shape[-1:] != (self.width,):
            found = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            self._refuse(TypeError(f"x must be a tensor [..., {self.width}], got {found}"), has_routes)
        if is_transformed((x,)):  # routing cannot be
            self._refuse(transform_error(), has_routes)
        self._check_kind(x, has_routes)
        tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        is_whole = self._is_whole(has_routes)
        if not is_whole:
            self._state.report = None  # until a forward in steps fills it
        if not has_routes and self._is_one_operator(tokens):
            experts = self.experts
            inputs = (tokens, self.router.weight, None, experts.w1, experts.w2, *(None,) * 12)
            out = whole_layer(*inputs, self._state.key, 1, 0, self.training, torch.is_grad_enabled())[0]
            return out if tokens is x else out.reshape(x.shape)
        given = (padding_mask, sequence_ids, forced_ids, token_ids)
        try:
            known = self._tokens(x, given, num_sequences, total_sequences)
        except (TypeError, ValueError) as error:
            self._refuse(error, has_routes)
        forward = self._forward_whole if is_whole else self._forward_in_steps
        return forward(tokens, known).to(x.dtype).reshape(x.shape)

    def _tokens(self, x: torch.Tensor, given: Sequence[Optional[torch.Tensor]], number: Optional[int], total: int) -> Tokens:
        """What the caller knows of the tokens, flattened."""
        names = ("padding_mask", "sequence_ids", "forced_ids", "token_ids")
        dtypes = (torch.bool, torch.int32, None, torch.int64)
        flat: List[Optional[torch.Tensor]] = []
        for name, value, dtype in zip(names, given, dtypes):
            shape = (*x.shape[:-1], self.top_k) if name == "forced_ids" else x.shape[:-1]
            if value is None:
                flat.append(None)
                continue
            if not isinstance(value, torch.Tensor) or value.shape != torch.Size(shape):
                found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise TypeError(f"{name} must be a tensor {list(shape)}, got {found}")
            if name == "padding_mask" and value.dtype != torch.bool:
                raise TypeError(f"padding_mask must be bool, True for padding, got {value.dtype}")
            value = value.reshape(-1, self.top_k) if name == "forced_ids" else value.reshape(-1)
            flat.append(value if dtype is None else value.to(dtype))
        mask, sequence_ids, forced_ids, token_ids = flat
        if sequence_ids is not None and number is None:
            raise ValueError("sequence_ids need num_sequences, their number")
        if sequence_ids is None and x.dim() == 3 and self.training and self.config.aux_coeff("sequence"):
            number = x.shape[0]
            sequence_ids = torch.arange(number, dtype=torch.int32, device=x.device).repeat_interleave(x.shape[1])
        return Tokens(mask, sequence_ids, forced_ids, token_ids, 1 if number is None else number, total)

    def _forward_whole(self, tokens: torch.Tensor, known: Tokens) -> torch.Tensor:
        """tokens [T, D] -> out [T, D], through the library's layer."""
        gate, gate_bias = self.router.weight, self.router.bias
        experts = self._parameters_of_experts()
        if is_autocast(tokens) and tokens.dtype != torch.float64:
            dtype = autocast_dtype(tokens)
            tokens = tokens.to(dtype)
        experts = tuple(None if given is None else given.to(tokens.dtype) for given in experts)
        seed = new_seed() if self.config.jitter and self.training else None
        options = (known.num_sequences, known.total_sequences, self.training, torch.is_grad_enabled())
        given = (known.mask, known.sequence_ids, known.forced_ids, known.token_ids, seed)
        return whole_layer(
            tokens, gate, gate_bias, *experts, self.expert_bias, *given, self._state.key, *options
        )[0]

    def _forward_in_steps(self, tokens: torch.Tensor, known: Tokens) -> torch.Tensor:
        """tokens [T, D] -> out [T, D], with the modules as they are."""
        config = self.config
        has_options = self._has_options(known.mask is not None or known.forced_ids is not None)
        load = losses = tokens
        if has_options:
            expert_ids, weights, load, losses = self._route_with_options(tokens, known)
        else:
            expert_ids, weights = self.route(tokens)
        in_experts = config.weights_in == "experts"
        sent = self.dispatcher.dispatch(tokens, expert_ids, weights, row_weights=in_experts)
        if has_options and not (HAS_OPERATORS and is_observed(tokens)):
            counts = sent.tokens_per_expert
            drops = torch.tensor(dropped(sent.handle.plan), dtype=torch.int64, device=tokens.device)
            given = (expert_ids.int(), weights, load, drops, counts, losses)
            self._state.report = LayerReport(*(value.detach() for value in given), self._state.ranks, self._state.num_ranks)
        extra = (sent.row_weights,) if in_experts else ()
        y = self.experts(sent.rows, sent.tokens_per_expert, *extra)
        out = self.dispatcher.combine(y, sent.handle, weighted=not in_experts)
        if self.shared is not None:
            counts = torch.full((1,), tokens.shape[0], dtype=torch.int64, device=tokens.device)
            out = out + self.shared(tokens, counts)
        return out

    def _route_with_options(
        self, tokens: torch.Tensor, known: Tokens
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [T, D] -> expert_ids [T, K], weights [T, K], whose backward reaches the losses, load [E] and losses [5]."""
        config, state = self.config, self._state
        try:
            config.check_steps("a layer with changed modules")
            if not self._is_own_route() and (config.has_losses or known.forced_ids is not None):
                raise ValueError("losses and forced_ids need the layer's own route, which is overridden")
        except ValueError as error:
            state.refuse(error, is_whole=False)
        logits = None
        if self._is_own_route():
            jittered = tokens
            if config.jitter and self.training:
                factors = jitter_factors(tokens.detach(), known.token_ids, new_seed(), state.key)
                jittered = (tokens * factors).to(tokens.dtype)
            logits = self.router(jittered)
            logits = logits.to(weights_dtype(logits.dtype))
            expert_ids = known.forced_ids
            if expert_ids is None:
                expert_ids = choose(config, logits.detach(), self.expert_bias)
            if known.mask is not None:
                expert_ids = torch.where(known.mask[:, None], -1, expert_ids)
            if known.forced_ids is not None:
                expert_ids = checked_ids(expert_ids, state.key, "forced_ids", -1, config.num_experts)
            weights = weights_of(config, logits, expert_ids)
        else:
            expert_ids, weights = self.route(tokens)
            if known.mask is not None:
                expert_ids = torch.where(known.mask[:, None], -1, expert_ids)
        if known.sequence_ids is not None:
            checked = checked_ids(known.sequence_ids, state.key, "sequence_ids", 0, known.num_sequences)
            known = known._replace(sequence_ids=checked)
        ids = torch.where(expert_ids >= 0, expert_ids, config.num_experts).reshape(-1).long()
        load = torch.zeros(config.num_experts + 1, dtype=torch.int64, device=ids.device)
        load = load.index_add(0, ids, torch.ones_like(ids))[:-1]
        if self.training or not (HAS_OPERATORS and is_observed(tokens)):  # else nothing uses it
            load = sum_over_group(load, state.key, "layer")
        step = load.new_zeros(0)
        losses = torch.zeros(5, dtype=torch.float64, device=ids.device)
        if not self.training:
            return expert_ids, weights, load, losses
        if logits is not None:
            losses, step = losses_of(state, logits, expert_ids, known)
        weights, _ = attach_losses(weights, losses[0] + losses[1], load, step, state.key)
        return expert_ids, weights, load, losses
