"""A routing with different tokens, experts and weights on every rank, all exactly representable, and its results."""
import numpy as np

E, K, D = 5, 2, 4
CONFIG = {"num_experts": E, "top_k": K, "width": D}


class Case:
    def __init__(self, rank):
        self.T = T = 0 if rank == 1 else 2 + rank
        t = np.arange(T)
        self.x = (64 * rank + 8 * t[:, None] + np.arange(D)[None, :]).astype(np.float32)
        self.grad_out = (1 + rank + t[:, None] - np.arange(D)[None, :]).astype(np.float32)
        second = np.where(t == 1, -1, (t + rank + 2) % E)
        self.expert_ids = np.stack([(t + rank) % E, second], axis=1).astype(np.int32)
        self.weights = np.stack([np.full(T, 0.25), 0.5 + 0.125 * t], axis=1).astype(np.float32)
        self.kept = (self.expert_ids >= 0).astype(np.float32)  # [T, K]


def expert(rows, number):
    """Output of expert `number` for these rows: values that no other expert produces."""
    return rows * (1 + number)


def combined(case):
    """out [T, D] of `expert` on all routes."""
    factor = (case.weights * case.kept * (1 + case.expert_ids)).sum(axis=1, keepdims=True)
    return case.x * factor


def local_experts(rank, size):
    """The default placement: contiguous, as even as possible."""
    share, rest = divmod(E, size)
    first = rank * share + min(rank, rest)
    return range(first, first + share + (rank < rest))


def apply_experts(group, plan, rows):
    """y [R, D]; pad rows are unchanged."""
    y = rows.copy()
    for local, number in enumerate(local_experts(group.rank, group.size)):
        start, count = plan.segment_starts[local], plan.segment_counts[local]
        y[start : start + count] = expert(rows[start : start + count], number)
    return y
