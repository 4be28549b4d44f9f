"""Experts over rows that are grouped by expert."""
import math
from typing import Any, Iterator, Optional, Sequence, Tuple

import torch
import torch.nn.functional as functional
from torch import nn

from crossdock._experts import ACTIVATIONS, GATED, WEIGHTS_IN

from .expert_tensors import is_sharded, number_experts
from .layer_config import check_choice
from .library_experts import expert_mlp
from .registration import HAS_OPERATORS, define, refuse_gradient, save_nothing
from .tensors import weights_dtype


class GroupedExperts(nn.Module):
    """The experts of one rank: gated or plain MLPs over rows that are grouped by expert.

    w1 [E_local, G, D] and w2 [E_local, D, F]; G is 2F for the gated activations (the gate's rows, then the linear ones), else
    F. With `bias` also b1 [E_local, G] and b2 [E_local, D]. Every expert takes part in the graph, so experts without rows
    get zero gradients. Computes in the dtype of the rows, or in autocast's. SwiGLU without other options is computed by
    PyTorch on the CPU and by the library, without waiting, on a GPU in bf16 and fp16; everything else by the library.

    Args:
        num_local_experts, width, inner: E_local, D and F.
        expert_ids: [E_local] the numbers of these experts among those of all ranks (`Dispatcher.local_experts`). Their
            first values follow from these numbers and torch's seed, on any number of ranks. Default: 0, 1, ...; for
            experts that are the only ones.
        num_experts: E, with expert_ids: for checkpoints that fit any number of ranks (docs/checkpoints.md).
        activation: "swiglu", "clamped_swiglu" (gpt-oss), "limited_swiglu" (DeepSeek-V4), "geglu", "geglu_tanh", "gelu",
            "gelu_tanh" or "squared_relu".
        interleaved: rows of w1 are gate 0, linear 0, gate 1, ...
        transposed: w1 is [E_local, D, G] and w2 [E_local, F, D], as gpt-oss stores them; on the CPU only.
        limit: of clamped_swiglu and limited_swiglu.
        bias: experts have b1 and b2, which start at zero.
        weights_in: "experts" multiplies each row by its weight before w2; pass row_weights to forward.
        recompute: backward repeats the first product instead of keeping its result.
        shard: (index, count): these experts are one of `count` shards of the inner dimension (expert tensor parallelism).
    """

    b1: Optional[nn.Parameter]
    b2: Optional[nn.Parameter]

    def __init__(
        self,
        num_local_experts: int,
        width: int,
        inner: int,
        *,
        expert_ids: Optional[Sequence[int]] = None,
        num_experts: Optional[int] = None,
        activation: str = "swiglu",
        interleaved: bool = False,
        limit: float = 7.0,
        bias: bool = False,
        weights_in: str = "combine",
        recompute: bool = False,
        transposed: bool = False,
        shard: Tuple[int, int] = (0, 1),
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if expert_ids is not None and len(expert_ids) != num_local_experts:
            raise ValueError(f"expert_ids must have {num_local_experts} entries, one per local expert, got {len(expert_ids)}")
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("weights_in", weights_in, WEIGHTS_IN)
        self.expert_ids: Optional[Sequence[int]] = None
        if expert_ids is not None:
            number_experts(self, expert_ids, num_experts)
        self.activation, self.interleaved, self.limit = activation, interleaved, float(limit)
        self.weights_in, self.recompute, self.transposed = weights_in, recompute, transposed
        self.shard, self._whole_inner = shard, inner
        inner = inner // shard[1] + (shard[0] < inner % shard[1])
        rows = 2 * inner if activation in GATED else inner
        made = {"device": device, "dtype": dtype}
        shapes = ((width, rows), (inner, width)) if transposed else ((rows, width), (width, inner))
        self.w1, self.w2 = (nn.Parameter(torch.empty((num_local_experts, *shape), **made)) for shape in shapes)
        self.register_parameter("b1", nn.Parameter(torch.zeros((num_local_experts, rows), **made)) if bias else None)
        self.register_parameter("b2", nn.Parameter(torch.zeros((num_local_experts, width), **made)) if bias else None)
        self.reset_parameters()

    @property
    def is_plain(self) -> bool:
        """Whether these are SwiGLU networks without other options."""
        options = (self.activation, self.interleaved, self.weights_in, self.recompute, self.transposed, self.b1 is None)
        return options == ("swiglu", False, "combine", False, False, True)

    def extra_repr(self) -> str:
        num_experts, width, inner = self.w2.mT.shape if self.transposed else self.w2.shape
        shown = [f"num_local_experts={num_experts}, width={width}, inner={inner}"]
        defaults = dict(activation="swiglu", interleaved=False, weights_in="combine", recompute=False, transposed=False)
        defaults["shard"] = (0, 1)
        shown += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(shown + ["bias=True"] * (self.b1 is not None))

    def reset_parameters(self) -> None:
        """Gives every expert the values that follow from its number. Takes one number from torch's CPU generator, however
        many experts there are, so ranks with the same seed stay in step."""
        if self.w1.is_meta:  # reset them when they have memory
            return
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(2**62)
        if type(drawn) is not torch.Tensor:  # a mode such as FakeTensorMode, in which tensors have no values
            return
        seed, generator = int(drawn), torch.Generator(self.w1.device)
        parameters = (self.w1, self.w2)
        with torch.no_grad():
            values = [torch.empty(p.shape, dtype=p.dtype, device=p.device) if is_sharded(p) else p for p in parameters]
            for local, expert in enumerate(range(self.w1.shape[0]) if self.expert_ids is None else self.expert_ids):
                generator.manual_seed(seed + expert)
                if self.transposed:  # the same values, transposed
                    drawn_values = [value.new_empty((1, *value.shape[:0:-1])) for value in values]
                    self._draw(drawn_values, 0, generator)
                    for value, made in zip(values, drawn_values):
                        value[local].copy_(made[0].t())
                else:
                    self._draw(values, local, generator)
            for bias in (self.b1, self.b2):
                if bias is not None:
                    bias.zero_()
            for parameter, value in zip(parameters, values):
                if value is not parameter:
                    _copy_to_shards(value, parameter)

    def _draw(self, values: Sequence[torch.Tensor], local: int, generator: torch.Generator) -> None:
        """Sets one expert. A shard gets its part of what the whole expert would get."""
        index, count = self.shard
        if count == 1:
            for value in values:
                value[local].uniform_(-1, 1, generator=generator).div_(math.sqrt(value.shape[2]))
            return
        w1, w2 = values
        width, inner = w1.shape[2], self._whole_inner
        first = index * (inner // count) + min(index, inner % count)
        own, halves = slice(first, first + w2.shape[2]), w1.shape[1] // w2.shape[2]
        whole = w1.new_empty((halves * inner, width)).uniform_(-1, 1, generator=generator).div_(math.sqrt(width))
        parts = whole.view(inner, halves, width)[own] if self.interleaved else whole.view(halves, inner, width)[:, own]
        w1[local].copy_(parts.reshape(-1, width))
        whole = w2.new_empty((width, inner)).uniform_(-1, 1, generator=generator).div_(math.sqrt(inner))
        w2[local].copy_(whole[:, own])

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_weights: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """rows [R, D], grouped by expert -> y [R, D]. Rows after those of the last expert become zero.

        tokens_per_expert: [E_local] int64. row_weights: [R], with weights_in="experts"."""
        if (row_weights is not None) != (self.weights_in == "experts"):
            raise ValueError('row_weights must be given with weights_in="experts", and only then')
        dtype = _computing_dtype(rows)
        rows, w1, w2 = rows.to(dtype), self.w1.to(dtype), self.w2.to(dtype)
        if not self.is_plain or library_computes(rows, w1, w2):
            biases = (None if bias is None else bias.to(dtype) for bias in (self.b1, self.b2))
            weights = None if row_weights is None else row_weights.to(weights_dtype(dtype))
            options = (self.activation, self.limit, self.interleaved, self.transposed, self.weights_in, self.recompute)
            inputs = (rows, weights, w1, w2, *biases, tokens_per_expert)
            return expert_mlp(*inputs, *options, torch.is_grad_enabled())[0]
        if _torch_has_product(rows, w2.shape[2]):
            ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
            gate, linear = torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
            return torch._grouped_mm(functional.silu(gate) * linear, w2.transpose(1, 2), offs=ends)
        gate, linear = grouped_product(rows, w1, tokens_per_expert).chunk(2, dim=1)
        return grouped_product(functional.silu(gate) * linear, w2, tokens_per_expert)


def library_computes(tokens: torch.Tensor, *parameters: torch.Tensor) -> bool:
    """Whether the library's experts take these tensors: bf16 or fp16 on a GPU, no subclasses of Tensor."""
    if not tokens.is_cuda or tokens.dtype not in (torch.bfloat16, torch.float16):
        return False
    return all(p.is_cuda and type(p) in (torch.Tensor, nn.Parameter) for p in parameters)


def _copy_to_shards(value: torch.Tensor, parameter: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))


def _computing_dtype(rows: torch.Tensor) -> torch.dtype:
    kind = rows.device.type
    if HAS_OPERATORS and rows.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return rows.dtype


def _torch_has_product(rows: torch.Tensor, inner: int) -> bool:
    """Whether torch._grouped_mm supports these rows: bf16, and rows of matrices in multiples of 16 bytes."""
    if not hasattr(torch, "_grouped_mm") or rows.dtype != torch.bfloat16 or rows.shape[1] % 8 or inner % 8:
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] >= 9


# ---- For all other rows: one product per expert, as one operator ----


def _segments(counts: torch.Tensor) -> Iterator[Tuple[int, slice]]:
    """Yields each expert that has rows, with its rows."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count > 0:
            yield expert, slice(start, start + count)
        start += count


def _product(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [R, A], weight [E_local, B, A] -> [R, B]: the rows of each expert times its matrix, transposed."""
    out = rows.new_zeros((rows.shape[0], weight.shape[1]))
    for expert, segment in _segments(counts):
        torch.mm(rows[segment], weight[expert].t(), out=out[segment])
    return out


def _product_backward(
    grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    grad_rows, grad_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    for expert, segment in _segments(counts):
        torch.mm(grad[segment], weight[expert], out=grad_rows[segment])
        torch.mm(grad[segment].t(), rows[segment], out=grad_weight[expert])
    return grad_rows, grad_weight


def _save_product(ctx: Any, inputs: Tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad_product(ctx: Any, grad: torch.Tensor) -> Tuple:
    return (*grouped_product_backward(grad, *ctx.saved_tensors), None)


grouped_product = define(
    "grouped_product",
    "(Tensor rows, Tensor weight, Tensor counts) -> Tensor",
    _product,
    lambda rows, weight, counts: rows.new_empty((rows.shape[0], weight.shape[1])),
    _save_product,
    _grad_product,
)
grouped_product_backward = define(
    "grouped_product_backward",
    "(Tensor grad, Tensor rows, Tensor weight, Tensor counts) -> (Tensor, Tensor)",
    _product_backward,
    lambda grad, rows, weight, counts: (torch.empty_like(rows), torch.empty_like(weight)),
    save_nothing,
    refuse_gradient,
)
