"""Layers: router, dispatch, experts and combine, forward and backward."""
import ctypes
from ctypes import byref
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ._abi import COutput, CTensor, DeviceOptions, int_array
from ._abi_layer import (
    CLayerGradients,
    CLayerWeights,
    LayerBackwardArgs,
    LayerConfig,
    LayerForwardArgs,
    LayerForwardResult,
    RouterConfig,
)
from ._abi_layer import LayerReport as CLayerReport
from ._dispatcher import choice, dispatch_config
from ._errors import Error, ErrorCode, check
from ._experts import ExpertWeights, experts_config, put_expert_weights
from ._group import Group
from ._library import lib
from ._owner import Owner, Shared
from ._tensor import ArrayLike, Fields, Marshal, fields_at, handle_in, result, view

SCORES = {"softmax": 0, "softmax_after_top_k": 1, "sigmoid": 2, "sqrt_softplus": 3}
GROUP_SCORES = {"top_share": 0, "top_2": 1}
AUX_LOSS_SCOPES = {"batch": 0, "sequence": 1, "global_batch": 2}
NORMALISE = {None: 0, True: 1, False: -1}


class LayerWeights(NamedTuple):
    """Parameters of a layer."""

    gate: Any  #: [E, D] fp64 for fp64 tokens, else fp32, bf16 or fp16
    experts: ExpertWeights  #: of this rank's experts, ascending
    shared: Optional[ExpertWeights] = None  #: with shared_inner: E_local = 1
    gate_bias: Any = None  #: [E] same dtype as gate
    expert_bias: Any = None  #: [E] fp32 (fp64 for fp64): for the selection only


class LayerGradients(NamedTuple):
    """Arrays for the gradients, in fp32 (fp64 for fp64); None: not computed.

    On a GPU the gradients of w1 and w2 may have the dtype of the experts instead, but then cannot be accumulated.
    """

    gate: Any = None  #: [E, D]; summed over this rank's tokens only
    experts: Optional[ExpertWeights] = None
    shared: Optional[ExpertWeights] = None  #: summed over this rank's tokens only
    gate_bias: Any = None  #: [E]; summed over this rank's tokens only


class LayerSaved(Owner):
    """The routing, plan and values of one forward that its backward needs.

    For tokens on a GPU the methods wait for the stream of the forward, which must still exist. After a capture in a CUDA
    graph, keep it as long as the graph.
    """

    def __init__(self, handle: Optional[int], num_experts: int, losses: Any):
        self._own(lib.layer_saved_destroy, handle)
        self._handle = handle
        self._num_experts = num_experts
        self._losses = losses  # fields of a tensor on a GPU

    @property
    def device_losses(self) -> Any:
        """For tokens on a GPU: [5] fp64 there: aux, z, and the terms of aux: batch, sequence, global batch. Does not
        wait: use it in the stream of the layer. None for tokens in host memory."""
        return view(self._losses, self) if self._losses[5] else None

    @property
    def device_loss_fields(self) -> Fields:
        """`device_losses` by its address, for other parts of the package."""
        return self._losses

    def losses(self) -> "LayerLosses":
        """This rank's share of the losses; the shares of the counting group sum to its losses."""
        values = (ctypes.c_double * 5)()
        check(lib.layer_saved_losses(self._handle, values))
        aux, z, *terms = values
        return LayerLosses(aux, z, (terms[0], terms[1], terms[2]))

    def report_fields(self) -> Dict[str, Fields]:
        """The tensors of `report` by name, for other parts of the package. Valid as long as this object."""
        given = CLayerReport()
        check(lib.layer_saved_report(self._handle, byref(given)))
        return {name: fields_at(given, getattr(CLayerReport, name).offset) for name in LayerReport._fields}

    def report(self) -> "LayerReport":
        """What the forward decided, on the device of its tokens. Does not wait: use it in the stream of the layer."""
        return LayerReport(**{name: view(fields, self) for name, fields in self.report_fields().items()})

    def load(self) -> List[int]:
        """[E] number of routes to each expert before any drop, summed over the group."""
        counts = (ctypes.c_int64 * max(self._num_experts, 1))()
        check(lib.layer_saved_load(self._handle, counts))
        return counts[: self._num_experts]

    def dropped(self) -> List[int]:
        """[E] number of this rank's routes to each expert that capacity dropped."""
        counts = (ctypes.c_int64 * max(self._num_experts, 1))()
        check(lib.layer_saved_dropped(self._handle, counts))
        return counts[: self._num_experts]


class LayerLosses(NamedTuple):
    """Losses of the router."""

    aux: float
    z: float
    aux_terms: Tuple[float, float, float]  #: terms of aux: batch, sequence, global batch


class LayerReport(NamedTuple):
    """What a forward decided: views of its memory."""

    expert_ids: Any  #: [T, K] int32: the routes, best first; -1: none
    weights: Any  #: [T, K] fp32 (fp64 for fp64): their weights
    kept_weights: Any  #: [T, K * etp]: each etp times; 0 if capacity dropped the route
    load: Any  #: [E] int64: routes before any drop, summed over the group
    rows_per_expert: Any  #: [E_local] int64: rows of this rank's experts


class LayerForward(NamedTuple):
    """Results of a forward. For tokens on a GPU all losses are 0: see LayerSaved.device_losses."""

    out: Any  #: [T, D]
    aux_loss: float  #: this rank's share; the shares of the counting group sum to its loss
    z_loss: float  #: as aux_loss
    saved: Optional[LayerSaved]  #: for the backward
    aux_losses: Tuple[float, float, float] = (0.0, 0.0, 0.0)  #: terms of aux_loss: batch, sequence, global batch


def _router_config(
    num_experts: int,
    top_k: int,
    width: int,
    score: str = "softmax",
    normalise: Optional[bool] = None,
    scaling: float = 1.0,
    num_groups: int = 1,
    group_top_k: int = 1,
    group_score: str = "top_share",
    aux_loss_coeff: float = 0.0,
    aux_loss_scope: str = "batch",
    aux_loss_coeffs: Optional[Mapping[str, float]] = None,
    z_loss_coeff: float = 0.0,
    jitter: float = 0.0,
    force_balance: bool = False,
) -> RouterConfig:
    terms = dict(aux_loss_coeffs or {})
    for name in terms:
        choice("aux_loss_coeffs", name, AUX_LOSS_SCOPES)
    return RouterConfig(
        num_experts=num_experts,
        top_k=top_k,
        width=width,
        num_groups=num_groups,
        group_top_k=group_top_k,
        scaling=scaling,
        aux_loss_coeff=aux_loss_coeff,
        z_loss_coeff=z_loss_coeff,
        jitter=jitter,
        score=choice("score", score, SCORES),
        group_score=choice("group_score", group_score, GROUP_SCORES),
        normalise=NORMALISE[normalise],
        aux_loss_scope=choice("aux_loss_scope", aux_loss_scope, AUX_LOSS_SCOPES),
        force_balance=force_balance,
        aux_batch_coeff=terms.get("batch", 0.0),
        aux_sequence_coeff=terms.get("sequence", 0.0),
        aux_global_batch_coeff=terms.get("global_batch", 0.0),
    )


def _handle_of(name: str, group: Optional[Group]) -> Optional[int]:
    if group is None:
        return None
    if group.closed:  # to the library, its null handle would mean no group
        raise Error(f"the {name} has been closed", ErrorCode.INVALID_ARGUMENT)
    return group._handle


class Layer(Shared):
    """Router, dispatch, experts and combine. forward and backward are collective.

    Arrays are taken and returned as by Dispatcher. If x is on a GPU, so are all arrays of the call; it is queued in the
    stream of set_stream and does not wait if dispatch["max_rows"] is set.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_experts: int,
        top_k: int,
        width: int,
        inner: int,
        dtype: Any = "fp32",
        router: Optional[Mapping[str, Any]] = None,
        experts: Optional[Mapping[str, Any]] = None,
        dispatch: Optional[Mapping[str, Any]] = None,
        shared_inner: int = 0,
        overlap_chunks: int = 1,
        serial_shared: bool = False,
        counting_group: Optional[Group] = None,
        etp: int = 1,
        sequence_group: Optional[Group] = None,
        replicated_over: Optional[Group] = None,
        allow_equal_tokens: bool = False,
    ):
        """Not collective. The configuration must be identical on every rank, except experts["recompute"] and, with
        arrays in host memory, serial_shared; the first forward checks it.

        num_experts, top_k, width, inner: E, K, D and F
        router: score ("softmax", "softmax_after_top_k", "sigmoid", "sqrt_softplus"), normalise (None: yes for sigmoid and
            sqrt_softplus), scaling, num_groups, group_top_k, group_score ("top_share", "top_2"), aux_loss_coeff,
            aux_loss_scope ("batch", "sequence", "global_batch"), aux_loss_coeffs (several losses at once, by scope),
            z_loss_coeff, jitter, force_balance
        experts: activation, limit, interleaved, weights_in, recompute; see Experts
        dispatch: alignment, placement, strategy, capacity_factor, ...; see Dispatcher
        shared_inner: F of the shared experts, one dense MLP; 0: none
        overlap_chunks: above 1: experts compute on chunks that have arrived while others are in transit
        serial_shared: the shared experts do not compute during the dispatch
        counting_group: ranks over which the losses are counted; None: `group`
        etp: expert tensor parallelism: ranks that share each expert, consecutive in the group; `inner` is F of a whole expert
        sequence_group: ranks that share sequences, if they differ from those of counting_group
        replicated_over: ranks that hold the same tokens: each dispatches a slice and gets all results
        allow_equal_tokens: accept tokens that are bit-identical on several ranks, as distinct tokens
        """
        config = LayerConfig(
            router=ctypes.pointer(_router_config(num_experts, top_k, width, **(router or {}))),
            experts=ctypes.pointer(experts_config(0, 0, inner, dtype, **(experts or {}))),
            dispatch=ctypes.pointer(
                dispatch_config(num_experts=num_experts, top_k=top_k, width=width, **(dispatch or {}))
            ),
            counting_group=_handle_of("counting_group", counting_group),
            shared_inner=shared_inner,
            overlap_chunks=overlap_chunks,
            serial_shared=serial_shared,
            etp=etp,
            sequence_group=_handle_of("sequence_group", sequence_group),
            replicated_over=_handle_of("replicated_over", replicated_over),
            allow_equal_tokens=allow_equal_tokens,
        )
        handle = ctypes.c_void_p()
        check(lib.layer_create(group._handle, byref(config), byref(handle)))
        self._own(lib.layer_destroy, handle)
        self.group = group
        self._other_groups = (counting_group, sequence_group, replicated_over)  # must outlive the layer
        self.num_experts = num_experts
        self._stream = 0
        self._options: Any = None  # passed to the last set_stream
        self._handle: Optional[int] = handle.value

    @property
    def num_local_experts(self) -> int:
        """E_local of this rank: the first dimension of its experts' weights."""
        number = ctypes.c_int64()
        check(lib.layer_num_local_experts(self._handle, byref(number)))
        return number.value

    def set_stream(
        self, stream: Optional[int], *, max_sms: int = 0, max_begun_sms: int = 0, nccl_comm: int = 0
    ) -> None:
        """Queues later calls with tensors on a GPU in `stream`, as Dispatcher.set_stream does."""
        options = (stream or 0, max_sms, max_begun_sms, nccl_comm)
        if options == self._options:
            return
        given = DeviceOptions(
            stream=options[0], nccl_comm=nccl_comm, max_sms=max_sms, max_begun_sms=max_begun_sms
        )
        check(lib.layer_set_device_options(self._handle, byref(given)))
        self._options = options
        self._stream = options[0]

    def close(self) -> None:
        """Frees the layer. Does nothing the second time."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._disown()
            lib.layer_destroy(handle)

    def forward(
        self,
        x: ArrayLike,
        weights: LayerWeights,
        *,
        mask: Optional[ArrayLike] = None,
        sequence_ids: Optional[ArrayLike] = None,
        forced_ids: Optional[ArrayLike] = None,
        token_ids: Optional[ArrayLike] = None,
        num_sequences: int = 1,
        total_sequences: Optional[int] = None,
        jitter_seed: int = 0,
        decision: Optional[LayerSaved] = None,
        earlier: Optional[LayerSaved] = None,
        out: Optional[ArrayLike] = None,
        save: bool = True,
    ) -> LayerForward:
        """x [T, D] -> out [T, D].

        mask: [T] bool: true = padding
        sequence_ids: [T] int32, with aux_loss_scope="sequence"
        forced_ids: [T, K] int32 or int64: routes to use; -1: none
        token_ids: [T] int64: identifies each token for the jitter
        decision: an earlier forward of these tokens, whose routes and plan are used again (recomputation)
        earlier: with aux_loss_scope="global_batch": the previous forward of this step
        """
        args, results, handle = LayerForwardArgs(), LayerForwardResult(), ctypes.c_void_p()
        at_out = LayerForwardResult.out.offset
        with Marshal(self._stream) as marshal:
            if decision is not None:  # first: the ranks compare which one the call uses
                args.decision = handle_in("decision", decision, LayerSaved)
            if earlier is not None:
                args.earlier = handle_in("earlier", earlier, LayerSaved)
            args.num_sequences = num_sequences
            args.total_sequences = total_sequences or 0
            args.jitter_seed = jitter_seed
            _put_weights(marshal, args, LayerForwardArgs.weights.offset, weights)
            for name, value in (
                ("x", x),
                ("mask", mask),
                ("sequence_ids", sequence_ids),
                ("forced_ids", forced_ids),
                ("token_ids", token_ids),
            ):
                marshal.put(args, getattr(LayerForwardArgs, name).offset, value)
            marshal.put_output(results, at_out, out)
        saved = byref(handle) if save else None
        marshal.call(self.group.rank, lib.layer_forward, self._handle, byref(args), byref(results), saved)
        losses = fields_at(results, LayerForwardResult.device_losses.offset)
        return LayerForward(
            result(results, at_out, out, x, self._stream),
            results.aux_loss,
            results.z_loss,
            LayerSaved(handle.value, self.num_experts, losses) if save else None,
            (results.aux_batch_loss, results.aux_sequence_loss, results.aux_global_batch_loss),
        )

    def backward(
        self,
        x: ArrayLike,
        weights: LayerWeights,
        grad_out: ArrayLike,
        saved: LayerSaved,
        grads: LayerGradients,
        *,
        grad_losses: Optional[float] = None,
        accumulate: bool = False,
        delay_dw: bool = False,
        grad_x: Optional[ArrayLike] = None,
    ) -> Any:
        """grad_out [T, D] -> grad_x [T, D]; writes the gradients of the parameters to `grads`, or adds them
        (accumulate). x and weights as in forward. Each forward has one backward.

        grad_losses: factor on the gradients of the losses (1)
        delay_dw: leaves the gradients of experts and shared experts to backward_dw
        """
        args, output, values = LayerBackwardArgs(), COutput(), None
        with Marshal(self._stream) as marshal:
            values = handle_in("saved", saved, LayerSaved)
            _put_backward(marshal, args, x, weights, grad_out, grads, accumulate)
            if grad_losses is not None:
                args.grad_losses = _pointer_to("grad_losses", grad_losses)
            args.delay_dw = delay_dw
            marshal.put_output(output, 0, grad_x)
        marshal.call(self.group.rank, lib.layer_backward, self._handle, byref(args), values, byref(output))
        return result(output, 0, grad_x, x, self._stream)

    def backward_dw(
        self,
        x: ArrayLike,
        weights: LayerWeights,
        grad_out: ArrayLike,
        saved: LayerSaved,
        grads: LayerGradients,
        *,
        accumulate: bool = False,
    ) -> None:
        """Computes the gradients that a backward with delay_dw postponed, with the same arguments. Not collective."""
        marshal, args = Marshal(self._stream), LayerBackwardArgs(delay_dw=1)
        _put_backward(marshal, args, x, weights, grad_out, grads, accumulate)
        marshal.call_alone(lib.layer_backward_dw, self._handle, byref(args), handle_in("saved", saved, LayerSaved))


def update_expert_bias(bias: ArrayLike, load: Sequence[int], rate: float, *, centred: bool = False) -> None:
    """bias[e] += rate * sign(mean load - load[e]), for bias [E] in fp32 or fp64, in place.

    With `centred`, the mean of the update is subtracted from it. `load` [E] must be summed over all ranks that share the bias.
    """
    marshal = Marshal()
    tensor = CTensor()
    marshal.put_output(tensor, 0, bias)
    if marshal.refusal is None and len(load) != tensor.shape[0]:
        raise ValueError(f"load must have one entry per value of bias ({tensor.shape[0]}), got {len(load)}")
    counts = int_array("load", load, ctypes.c_int64)
    marshal.call_alone(lib.update_expert_bias, byref(tensor), counts, rate, centred)


def _pointer_to(name: str, value: float) -> Any:
    try:
        return ctypes.pointer(ctypes.c_double(value))
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _put_weights(marshal: Marshal, struct: ctypes.Structure, offset: int, weights: LayerWeights) -> None:
    for name in ("gate", "gate_bias", "expert_bias"):
        marshal.put(struct, offset + getattr(CLayerWeights, name).offset, getattr(weights, name))
    put_expert_weights(marshal, struct, offset + CLayerWeights.experts.offset, weights.experts, False)
    put_expert_weights(marshal, struct, offset + CLayerWeights.shared.offset, weights.shared, False)


def _put_gradients(marshal: Marshal, struct: ctypes.Structure, offset: int, grads: LayerGradients) -> None:
    for name in ("gate", "gate_bias"):
        marshal.put_output(struct, offset + getattr(CLayerGradients, name).offset, getattr(grads, name))
    put_expert_weights(marshal, struct, offset + CLayerGradients.experts.offset, grads.experts, True)
    put_expert_weights(marshal, struct, offset + CLayerGradients.shared.offset, grads.shared, True)


def _put_backward(marshal, args, x, weights, grad_out, grads, accumulate) -> None:
    args.accumulate = accumulate
    _put_weights(marshal, args, LayerBackwardArgs.weights.offset, weights)
    _put_gradients(marshal, args, LayerBackwardArgs.grads.offset, grads)
    marshal.put(args, LayerBackwardArgs.x.offset, x)
    marshal.put(args, LayerBackwardArgs.grad_out.offset, grad_out)
