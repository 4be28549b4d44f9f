"""What a layer's last forward decided."""
import ctypes
from dataclasses import dataclass
from typing import Sequence

import torch

import crossdock
from crossdock._tensor import Array, Fields

_DTYPES = {
    int(crossdock.DType.F64): torch.float64,
    int(crossdock.DType.F32): torch.float32,
    int(crossdock.DType.I64): torch.int64,
    int(crossdock.DType.I32): torch.int32,
}


@dataclass(frozen=True)
class LayerReport:
    """Tensors on the device of the tokens; nothing has waited for them. Without gradients.

    The losses are this rank's share: those of the ranks of the counting group sum to the loss of the group. Zero in
    evaluation. `expert_ids` can be passed to another forward as `forced_ids`, to replay it.
    """

    expert_ids: torch.Tensor  #: [T, K] int32: the experts of each token, best first; -1: none
    weights: torch.Tensor  #: [T, K] fp32 (fp64 for fp64 tokens)
    load: torch.Tensor  #: [E] int64: routes to each expert before any drop, summed over the layer's group
    dropped: torch.Tensor  #: [E] int64: routes of this rank that capacity dropped
    rows_per_expert: torch.Tensor  #: [E_local] int64: rows of this rank's experts
    losses: torch.Tensor  #: [5] fp64: auxiliary, z, and the terms of the first: batch, sequence, global batch
    ranks: Sequence[int]  #: [E] the rank of each expert; with etp > 1 the first of its ranks, divided by etp
    num_ranks: int  #: P, divided by etp

    @property
    def aux_loss(self) -> torch.Tensor:
        """Scalar: the sum of the auxiliary losses, with their coefficients."""
        return self.losses[0]

    @property
    def z_loss(self) -> torch.Tensor:
        """Scalar: the z-loss, with its coefficient."""
        return self.losses[1]

    @property
    def rows_per_rank(self) -> torch.Tensor:
        """[P] int64: routes to the experts of each rank, before any drop; with etp > 1 [P / etp]."""
        owners = torch.tensor(list(self.ranks), dtype=torch.int64, device=self.load.device)
        return self.load.new_zeros(self.num_ranks).index_add_(0, owners, self.load)


def copy_of(fields: Fields, like: torch.Tensor) -> torch.Tensor:
    """A copy of the library's memory, on the device of `like`, in its current stream."""
    address, shape, dtype = fields[0], fields[1 : 1 + fields[5]], _DTYPES[fields[6]]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if like.is_cuda:
        array = Array(fields, stream=torch.cuda.current_stream(like.device).cuda_stream)
        return torch.as_tensor(array, device=like.device).clone()
    made = torch.empty(shape, dtype=dtype, device="cpu")
    ctypes.memmove(made.data_ptr(), address, made.numel() * made.element_size())
    return made


def report_of(
    saved: crossdock.LayerSaved,
    values: Sequence[float],
    like: torch.Tensor,
    num_experts: int,
    etp: int,
    has_drops: bool,
    ranks: Sequence[int],
    num_ranks: int,
) -> LayerReport:
    """The report of a forward with the tokens `like` and, on the CPU, these losses."""
    found = saved.report_fields()
    names = ("expert_ids", "weights", "load", "rows_per_expert")
    expert_ids, weights, load, rows = (copy_of(found[name], like) for name in names)
    dropped = torch.zeros_like(load)
    if has_drops and like.is_cuda:
        kept = copy_of(found["kept_weights"], like)[:, ::etp]
        dropped = dropped_routes(expert_ids, weights, kept, num_experts)
    elif has_drops:
        dropped = torch.tensor(saved.dropped(), dtype=torch.int64, device="cpu")
    if like.is_cuda:
        losses = copy_of(saved.device_loss_fields, like)
    else:
        losses = torch.tensor(values, dtype=torch.float64, device="cpu")
    return LayerReport(expert_ids, weights, load, dropped, rows, losses, ranks, num_ranks)


def dropped_routes(
    expert_ids: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """[E] routes whose weight [T, K] is not zero, but is zero in `kept`."""
    is_dropped = (expert_ids >= 0) & (weights != 0) & (kept == 0)
    ids = torch.where(is_dropped, expert_ids, num_experts).reshape(-1).long()
    return torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).index_add_(0, ids, torch.ones_like(ids))[:-1]

