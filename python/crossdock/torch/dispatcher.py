"""Dispatcher: carries tokens to the ranks of their experts, and the results back, with gradients."""
from typing import TYPE_CHECKING, Any, List, NamedTuple, NoReturn, Optional, Tuple

import torch

import crossdock
from crossdock._library import lib
from crossdock._owner import Shared

from . import calls, fp8, ops
from .core import Core
from .groups import group_of
from .pending import Pending, PendingDispatch
from .registration import is_transformed, transform_error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from crossdock._dispatcher import DispatchKeywords


class Handle(NamedTuple):
    """One routing, agreed by all ranks, which `combine` needs. You may keep it, pass it on, or drop it at any time."""

    plan: torch.Tensor  #: stands for the plan; int64 [1] on the CPU
    routing: torch.Tensor  #: as passed to `dispatch`
    weights: torch.Tensor  #: as passed to `dispatch`


class Dispatched(NamedTuple):
    """The result of `dispatch`: R rows, grouped by local expert in ascending order."""

    rows: torch.Tensor  #: [R, D] dtype of x; with wire="fp8" as wire_rows says
    row_weights: Optional[torch.Tensor]  #: [R] dtype of weights; 0 in pad rows. None with row_weights=False
    tokens_per_expert: torch.Tensor  #: [E_local] int64, on the device of x: rows of each expert, pad rows included
    handle: Handle
    row_scales: Optional[torch.Tensor] = None  #: [R, ...] dtype of the scales, with rows in fp8 only
    #: [R, D] zeros without memory, with wire_rows="fp8": pass it to your own autograd function, whose backward returns the
    #: gradient of the rows for it; autograd would round a gradient of `rows` to fp8
    anchor: Optional[torch.Tensor] = None

    @property
    def tokens_per_expert_cpu(self) -> torch.Tensor:
        """tokens_per_expert on the CPU. Waits for a GPU."""
        return self.tokens_per_expert.cpu()

    @property
    def ends(self) -> torch.Tensor:
        """[E_local] int32: where the rows of each expert end, as torch._grouped_mm takes them (`offs`)."""
        return self.tokens_per_expert.cumsum(0, dtype=torch.int32)


class Dispatcher(Shared):
    """Moves tokens to the ranks of their experts and back, among the ranks of a process group.

    Every rank of the group makes a Dispatcher with the same arguments and makes the same calls in the same order, even
    without tokens. T may differ between ranks and calls; nothing is padded or dropped unless you ask for it. Calls work
    on CPU and CUDA tensors, in torch's current stream.

    Args:
        group: a ProcessGroup of any backend (default: all ranks), a DeviceMesh of one dimension, or a
            `crossdock.Group`. The first Dispatcher on a process group connects its ranks, which is collective.
        num_experts: E, in total. Each rank has a contiguous part, as even as possible, unless `placement` is given.
        top_k: K, the routes per token.
        width: D, the values of a token.
        alignment: the rows of each expert start at a multiple of this: 1, 8, 16, 32, 64, 128 or 256. Pad rows are zero.
        max_rows: limit on R. On a GPU all row tensors then have exactly this many rows, and no call waits for the GPU.
        placement: [E] the rank of each expert.
        strategy: "auto", "direct", "hierarchical", "alltoall" or "allgather".
        capacity_factor, capacity_tokens, pad_to_capacity, drop_policy: limit the rows per expert and source rank.
        nonfinite: "propagate" infinite and NaN weights (default, for loss scaling), or "reject" them.
        partial_sums: combine sums per rank before sending: less traffic, different bits. The sums are sent in fp32 ("fp32" or True)
            or rounded to the dtype of the rows ("rows").
        keep_empty_segments: every local expert gets at least one row, for kernels that fail without rows.
        max_routes_per_token: with maps [T, E] on a GPU: the largest number of bits set for a token.
        copies: copies of a token that dispatch sends between GPUs of one node: "per_route", "per_rank" or "auto" (per rank if the
            ranks are on several GPUs).
        wire: "fp8": `dispatch` sends rows in fp8 e4m3 with a power of two per 128 values, about half the bytes of bf16; its
            backward, and combine, send what they are given. Tokens with scales, and begin_dispatch, are quantised by you.
            None: rows as they are.
        wire_rows: what experts get with wire="fp8": rows in "bf16" (fp16 if x is fp16), or in "fp8" with row_scales.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        top_k: int,
        width: int,
        wire: Optional[str] = None,
        wire_rows: str = "bf16",
        **options: "Unpack[DispatchKeywords]",
    ):
        fp8.check_wire(wire, wire_rows)
        self._wire, self._keeps_fp8 = wire, wire_rows == "fp8"
        sizes = dict(num_experts=num_experts, top_k=top_k, width=width)
        self._core: Optional[Core] = Core(group_of(group), {"nonfinite": "propagate", **sizes, **options})
        self._key = self._core.key

    def __repr__(self) -> str:
        return repr(self._core.dispatcher) if self._core is not None else "Dispatcher(closed)"

    @property
    def group(self) -> crossdock.Group:
        return self._open().group

    @property
    def num_local_experts(self) -> int:
        """E_local, the experts of this rank."""
        return self._open().num_local_experts

    @property
    def local_experts(self) -> List[int]:
        """[E_local] the experts of this rank, in ascending order, as the rows of `dispatch` have them."""
        return list(self._open().local_experts)

    @property
    def strategy(self) -> str:
        """The strategy in use; if "auto" was requested, the one it chose."""
        return self._open().dispatcher.strategy

    def dispatch(self, x: Any, expert_ids: torch.Tensor, weights: torch.Tensor, *, row_weights: bool = True) -> Dispatched:
        """Sends every token to its experts. Collective. Gradients go to x and, through row_weights, to weights.

        Args:
            x: [T, D] fp32, bf16, fp16, or fp64 on the CPU. Any strides. Or (x, scales): x [T, D] float8_e4m3fn, without
                gradients, and scales [T, ceil(D/128)] fp32 or [T, ceil(D/32)] float8_e8m0fnu, which become row_scales.
            expert_ids: [T, K] int32 or int64: an expert, or -1 for no route; distinct per token. Or a map [T, E] bool,
                whose set bits are the routes.
            weights: like expert_ids: fp32, bf16, fp16 or fp64 (fp64 is rounded to fp32 unless x is fp64).
            row_weights: also send the weights, for experts that apply them themselves. If so, use them on every rank,
                even where R is 0: backward sends their gradients.
        """
        tensor = torch.Tensor
        if isinstance(x, tensor) and isinstance(expert_ids, tensor) and isinstance(weights, tensor):
            if self._wire is not None:
                return self._dispatch_fp8(x, expert_ids, weights, row_weights)
            rows, sent, counts, plan = ops.dispatch(x, expert_ids, weights, self._key, row_weights)
            return Dispatched(rows, sent if row_weights else None, counts, Handle(plan, expert_ids, weights))
        x, scales = self._tokens(x, expert_ids, weights)
        *made, row_scales = calls.dispatch_scaled(x, expert_ids, weights, self._key, row_weights, scales)
        rows, sent, counts, plan = ops.arrived(x, expert_ids, weights, made, row_weights)
        return Dispatched(rows, sent, counts, Handle(plan, expert_ids, weights), row_scales)

    def begin_dispatch(
        self, x: Any, expert_ids: torch.Tensor, weights: torch.Tensor, *, row_weights: bool = True, num_chunks: int = 1
    ) -> PendingDispatch:
        """Begins a dispatch; `finish()` of the result returns the Dispatched. On a GPU it runs in a stream of its own,
        together with later work; on the CPU it is complete. Do not use x before the end. Collective. Not under a compiler.

        num_chunks: at most so many chunks of whole local experts; see PendingDispatch.chunks. Identical on every rank.
        """
        x, scales = self._tokens(x, expert_ids, weights)
        if self._wire is not None and scales is None:
            self._open().refuse(ValueError('with wire="fp8", begin_dispatch takes the results of quantise_rows'))
        if isinstance(num_chunks, bool) or not isinstance(num_chunks, int):
            self._open().refuse(TypeError(f"num_chunks must be an integer, got {type(num_chunks).__name__}"))
        with_scales = (scales, num_chunks)
        call, *made, row_scales = calls.begin_dispatch(x, expert_ids, weights, self._key, row_weights, *with_scales)

        def sent(rows: torch.Tensor, of_rows: Optional[torch.Tensor], counts: torch.Tensor, plan: torch.Tensor) -> Dispatched:
            return Dispatched(rows, of_rows, counts, Handle(plan, expert_ids, weights), row_scales)

        return PendingDispatch(call, lambda: sent(*ops.arrived(x, expert_ids, weights, made, row_weights)), sent(*made))

    def begin_combine(self, y: torch.Tensor, handle: Handle) -> Pending:
        """Begins a weighted combine, as begin_dispatch does; `finish()` of the result returns out [T, D]."""
        if not isinstance(y, torch.Tensor) or not isinstance(handle, Handle):
            self._refuse_combine(y, handle, lib.begin_combine)
        if is_transformed((y, handle.weights)):
            routes = calls.routes_of(handle.plan)
            routes.core.refuse(transform_error(), lib.begin_combine, routes._handle)
        call, out = calls.begin_combine(y, handle.plan)
        inputs = (y, handle.weights, handle.routing, handle.plan, [out])
        return Pending(call, lambda: ops.combined(*inputs))

    def _tokens(self, x: Any, expert_ids: Any, weights: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Tokens and scales of a dispatch that is no operator."""
        tokens, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        if not all(isinstance(given, torch.Tensor) for given in (tokens, expert_ids, weights)):
            types = ", ".join(type(given).__name__ for given in (tokens, expert_ids, weights))
            self._open().refuse(TypeError(f"x, expert_ids and weights must be tensors, got {types}"))
        if tokens is not x and not isinstance(scales, torch.Tensor):
            self._open().refuse(TypeError(f"scales must be a tensor, got {type(scales).__name__}"))
        if scales is not None and tokens.requires_grad:
            self._open().refuse(TypeError("tokens with scales have no gradients: detach x"))
        if is_transformed((tokens, weights)):
            self._open().refuse(transform_error())
        return tokens, scales

    def _dispatch_fp8(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, row_weights: bool
    ) -> Dispatched:
        call = (x, expert_ids, weights, self._key, row_weights, self._keeps_fp8)
        rows, sent, counts, plan, scales, anchor = fp8.dispatch(*call)
        handle = Handle(plan, expert_ids, weights)
        extra = (scales, anchor) if self._keeps_fp8 else ()
        return Dispatched(rows, sent if row_weights else None, counts, handle, *extra)

    def combine(self, y: torch.Tensor, handle: Handle, *, weighted: bool = True) -> torch.Tensor:
        """Sums the rows y [R, D] of each token: out [T, D], in the dtype of y. Collective.

        Rows are multiplied by their weights, and gradients go to y and to the weights of `dispatch`. With
        weighted=False, for experts that applied row_weights, rows are only summed, and gradients go to y.
        """
        if not isinstance(y, torch.Tensor) or not isinstance(handle, Handle):
            self._refuse_combine(y, handle, lib.combine if weighted else lib.combine_unweighted)
        if weighted:
            return ops.combine(y, handle.weights, handle.routing, handle.plan)
        return ops.combine_unweighted(y, handle.plan, handle.routing.shape[0])

    def _refuse_combine(self, y: Any, handle: Any, function: Any) -> NoReturn:
        if isinstance(handle, Handle):
            routes = calls.routes_of(handle.plan)  # the other ranks call combine in the group of this plan
            routes.core.refuse(TypeError(f"y must be a tensor, got {type(y).__name__}"), function, routes._handle)
        error = TypeError(f"handle must be the Handle of a dispatch, got {type(handle).__name__}")
        self._open().refuse(error, function)

    def close(self) -> None:
        """Ends the dispatcher on this rank. Does not wait for other ranks. The group stays, for other dispatchers."""
        core, self._core, self._key = self._core, None, 0
        if core is not None:
            core.close()

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _open(self) -> Core:
        if self._core is None:
            raise RuntimeError("this crossdock.torch.Dispatcher is closed")
        return self._core
