"""Bugs of real training programs, put into the program one at a time. The comparison must detect each of them."""
from unittest import mock

import torch

import collectives
import data_parallel
import experts
import model
import shards


def naive_placement():
    """A gathered token's place is local + rank·T: wrong as soon as there are two rows."""
    return mock.patch.object(shards, "places_of_gathered", lambda row_lengths, parts: list(range(sum(row_lengths))))


def averaged_gradients():
    def average(tensors, group):
        collectives.sum_all_over(tensors, group)
        for tensor in tensors:
            tensor /= group.size()

    return mock.patch.object(data_parallel, "sum_all_over", average)


class _Replicate(torch.autograd.Function):
    """Every rank gets all tokens of its tp group and keeps the gradient of its own, as if all ranks computed the same."""

    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts, ctx.rank = counts, group.rank()
        return collectives.all_gather_rows(x, counts, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.counts)[ctx.rank], None, None


class _KeepOwn(torch.autograd.Function):
    """The transpose of _Replicate."""

    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts, ctx.group = counts, group
        return x.split(counts)[group.rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_gather_rows(grad.contiguous(), ctx.counts, ctx.group), None, None


def replicated_tokens():
    """The ranks of tp send the same tokens to the experts: outputs are right, the experts' gradients are doubled."""
    forward = model.MixtureOfExperts.forward

    def replicated(self, x, shard):
        group = self.router.mesh.group("tp")
        out, loss = forward(self, _Replicate.apply(x, shard.tp_counts, group), shard)
        return _KeepOwn.apply(out, shard.tp_counts, group), loss

    return mock.patch.object(model.MixtureOfExperts, "forward", replicated)


def skipped_empty_expert():
    forward = experts.Experts.forward

    def skipping(self, rows, rows_per_expert):
        return forward(self, rows, rows_per_expert) if rows.shape[0] else rows

    return mock.patch.object(experts.Experts, "forward", skipping)


