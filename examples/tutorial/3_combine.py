"""Step 3: experts compute, and the results come back. Compared with the same sum without any communication.

    torchrun --nproc-per-node 4 examples/tutorial/3_combine.py
"""
import torch
import torch.distributed as dist

import crossdock.torch

T, D, E, K = 100, 16, 8, 2

dist.init_process_group("gloo")
dispatcher = crossdock.torch.Dispatcher(num_experts=E, top_k=K, width=D)

torch.manual_seed(0)
matrices = torch.randn(E, D, D)  # one per expert; a rank uses only those of its own experts
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(T, D)
weights, expert_ids = torch.rand(T, E).topk(K)

sent = dispatcher.dispatch(x, expert_ids, weights)
y = torch.empty_like(sent.rows)
start = 0
for expert, count in zip(dispatcher.local_experts, sent.tokens_per_expert.tolist()):
    y[start : start + count] = sent.rows[start : start + count] @ matrices[expert]
    start += count
out = dispatcher.combine(y, sent.handle)  # [T, D]: the weighted sum of each token's K rows

expected = sum(weights[:, k, None] * torch.einsum("td,tdf->tf", x, matrices[expert_ids[:, k]]) for k in range(K))
difference = (out - expected).abs().max().item()
print(f"rank {dist.get_rank()}: {len(sent.rows)} rows arrived; largest difference {difference:.1e}\n", end="")
assert difference < 1e-4
dist.destroy_process_group()
