"""An MoE layer in PyTorch, through PyTorch's all-to-all path and through Crossdock: the same losses.

    torchrun --nproc-per-node 4 examples/08_torch.py
"""
import torch
import torch.distributed as dist

from crossdock.compare import TorchTokenDispatcher
from crossdock.torch import GroupedExperts, TitanTokenDispatcher

dist.init_process_group("gloo")
T, D, F, E, K = 100, 32, 64, 8, 2


def losses(dispatcher):
    torch.manual_seed(dist.get_rank())
    experts = GroupedExperts(E // dist.get_world_size(), D, F)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
    found = []
    for _ in range(5):
        x = torch.randn(T, D)
        weights, expert_ids = torch.rand(T, E).topk(K)
        counts = torch.bincount(expert_ids.reshape(-1), minlength=E)
        rows, rows_per_expert, sent = dispatcher.dispatch(x, weights, expert_ids, counts)
        loss = (dispatcher.combine(experts(rows, rows_per_expert), sent, x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.data)
        found.append(loss.item() / dist.get_world_size())
    return found


def compare_losses():
    crossdock_dispatcher = TitanTokenDispatcher(num_experts=E, top_k=K)
    crossdock_dispatcher.wire_meshes(ep_mesh=dist.group.WORLD)
    for a, b in zip(losses(TorchTokenDispatcher(num_experts=E, top_k=K)), losses(crossdock_dispatcher)):
        if dist.get_rank() == 0:
            print(f"loss {a:.6f} (torch), {b:.6f} (crossdock)", "equal" if abs(a - b) <= 1e-6 else "DIFFERENT")


compare_losses()
dist.destroy_process_group()
