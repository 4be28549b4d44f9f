"""Step 5: a whole layer, trained on four ranks: it learns to return the absolute value of its input.

    torchrun --nproc-per-node 4 examples/tutorial/5_train.py
"""
import torch
import torch.distributed as dist

from crossdock.torch import MoELayer

T, D, F, E, K, STEPS = 128, 16, 32, 8, 2, 100

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same router on every rank; experts differ by their number, not by the seed
layer = MoELayer(num_experts=E, top_k=K, width=D, inner=F)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
torch.manual_seed(1 + rank)  # from here on: different tokens on every rank

losses = []
for step in range(STEPS):
    x = torch.randn(T, D)
    loss = (layer(x) - x.abs()).square().mean() / world  # a share of the mean over all tokens
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(layer.router.weight.grad)  # the router is replicated; every expert has all of its gradient already
    optimizer.step()
    dist.all_reduce(loss.data)
    losses.append(loss.item())
    if rank == 0 and step % 20 == 0:
        print(f"step {step:3}: loss {losses[-1]:.4f}", flush=True)

if rank == 0:
    print(f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")
assert losses[-1] < losses[0] / 2
dist.destroy_process_group()
