#!/usr/bin/env python3
"""Tokens to experts and back with numpy: python3 examples/07_python.py, or under torchrun. Needs numpy.

Alone, the program starts 4 ranks as threads; under a launcher (torchrun, srun), its processes are the ranks.
"""
import os
import threading

import numpy as np

import crossdock

T, D, E, K = 3, 4, 8, 2


def run(group):
    dispatcher = crossdock.Dispatcher(group, num_experts=E, top_k=K, width=D)
    x = np.arange(T * D, dtype=np.float32).reshape(T, D) + 100 * group.rank
    expert_ids = np.array([[0, 5], [1, 6], [2, -1]])  # [T, K]; -1: no route
    weights = np.array([[0.25, 0.75], [0.5, 0.5], [1, 0]], np.float32)

    plan = dispatcher.plan(expert_ids, weights)  # collective, like dispatch and combine
    rows = dispatcher.dispatch(plan, x).rows  # [R, D], grouped by local expert: see plan.segment_starts
    y = rows * 2  # the experts
    out = dispatcher.combine(plan, y)  # [T, D]

    assert np.array_equal(out, 2 * x)
    print(f"rank {group.rank} of {group.size}: {plan.tokens_per_expert()} rows for its experts")


if __name__ == "__main__":
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        run(crossdock.Group.from_environment())
    else:
        ranks = [threading.Thread(target=run, args=(group,)) for group in crossdock.Group.from_threads(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
