"""Step 2: tokens go to their experts. The last rank has no tokens, which needs no special care.

    torchrun --nproc-per-node 4 examples/tutorial/2_dispatch.py
"""
import torch
import torch.distributed as dist

import crossdock.torch

T, D, E, K = 3, 4, 8, 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dispatcher = crossdock.torch.Dispatcher(num_experts=E, top_k=K, width=D)

tokens = 0 if rank == world - 1 else T
x = torch.full((tokens, D), float(rank))  # [T, D]: every value is the number of the token's rank
first = torch.arange(tokens)
expert_ids = torch.stack([first, first + 4], dim=1)  # [T, K]: token t goes to the experts t and t + 4
weights = torch.tensor([[0.25, 0.75]]).expand(tokens, K)

sent = dispatcher.dispatch(x, expert_ids, weights)  # every rank calls it, with or without tokens

start = 0
for expert, count in zip(dispatcher.local_experts, sent.tokens_per_expert.tolist()):
    sources = sent.rows[start : start + count, 0].int().tolist()
    print(f"rank {rank}, expert {expert}: rows of ranks {sources}\n", end="")
    assert sources == ([] if expert % 4 == 3 else list(range(world - 1)))
    start += count
dist.destroy_process_group()
