"""Sums and token exchanges between the ranks of a group, with gradients. Numbers of tokens may differ and be 0."""
from typing import Any, List, Sequence, Tuple

import torch
import torch.distributed as dist


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """In place: the sum of the ranks' tensors, on every rank."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_all_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """In place, in one exchange. All of one dtype."""
    if group.size() == 1 or not tensors:
        return
    flat = sum_over(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(summed.view_as(tensor))


def all_gather_rows(x: torch.Tensor, counts: List[int], group: dist.ProcessGroup) -> torch.Tensor:
    """x [counts[rank], ...] -> [Σ counts, ...], in the order of ranks."""
    longest = max(counts)
    if longest == 0:
        return x.new_zeros(x.shape)
    padded = x.new_zeros((longest, *x.shape[1:]))
    padded[: x.shape[0]] = x
    gathered = x.new_empty((len(counts) * longest, *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return torch.cat([rows[:count] for rows, count in zip(gathered.split(longest), counts)])


def reduce_scatter_rows(x: torch.Tensor, counts: List[int], group: dist.ProcessGroup) -> torch.Tensor:
    """x [Σ counts, ...] -> [counts[rank], ...], the sum of the ranks' tensors."""
    longest = max(counts)
    if longest == 0:
        return x.new_zeros(x.shape)
    padded = x.new_zeros((len(counts), longest, *x.shape[1:]))
    for place, rows in zip(padded, x.split(counts)):
        place[: rows.shape[0]] = rows
    summed = x.new_empty((longest, *x.shape[1:]))
    dist.reduce_scatter_tensor(summed, padded.flatten(0, 1), group=group)
    return summed[: counts[group.rank()]]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: List[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        return all_gather_rows(x, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple:
        return reduce_scatter_rows(grad, ctx.counts, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: List[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        return reduce_scatter_rows(x, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple:
        return all_gather_rows(grad, ctx.counts, ctx.group), None, None


def gather(x: torch.Tensor, counts: List[int], group: dist.ProcessGroup) -> torch.Tensor:
    """all_gather_rows; gradients are summed over the ranks that used the tokens."""
    return _Gather.apply(x, counts, group) if group.size() > 1 else x


def reduce_scatter(x: torch.Tensor, counts: List[int], group: dist.ProcessGroup) -> torch.Tensor:
    """reduce_scatter_rows, with gradients."""
    return _ReduceScatter.apply(x, counts, group) if group.size() > 1 else x
