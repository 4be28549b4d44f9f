"""Step 4: gradients travel the same way back: to the tokens, to the experts and to the router's weights.

    torchrun --nproc-per-node 4 examples/tutorial/4_gradients.py
"""
import torch
import torch.distributed as dist

import crossdock.torch
from crossdock.torch import GroupedExperts

T, D, F, E, K = 100, 16, 32, 8, 2

dist.init_process_group("gloo")
rank = dist.get_rank()
dispatcher = crossdock.torch.Dispatcher(num_experts=E, top_k=K, width=D)
torch.manual_seed(0)
experts = GroupedExperts(len(dispatcher.local_experts), D, F, expert_ids=dispatcher.local_experts)
torch.manual_seed(1 + rank)
x = torch.randn(T, D, requires_grad=True)
scores, expert_ids = torch.rand(T, E).topk(K)
weights = scores.clone().requires_grad_()


def loss(tokens, factors):
    sent = dispatcher.dispatch(tokens, expert_ids, factors)
    return dispatcher.combine(experts(sent.rows, sent.tokens_per_expert), sent.handle).square().sum()


loss(x, weights).backward()  # collective: every rank calls backward, too

# Move along a direction on all ranks at once: the losses must change as the gradients say.
dx, dw, step = torch.randn(T, D), torch.randn(T, K), 1e-3
with torch.no_grad():
    slope = (loss(x + step * dx, weights + step * dw) - loss(x - step * dx, weights - step * dw)) / (2 * step)
both = torch.stack([slope, (x.grad * dx).sum() + (weights.grad * dw).sum()])
dist.all_reduce(both)
if rank == 0:
    print(f"measured slope {both[0]:.3f}, slope by the gradients {both[1]:.3f}")
assert torch.allclose(both[0], both[1], rtol=0.02, atol=0.02)
dist.destroy_process_group()
