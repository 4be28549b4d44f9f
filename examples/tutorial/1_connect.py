"""Step 1: four processes meet, and each learns which experts it has.

    torchrun --nproc-per-node 4 examples/tutorial/1_connect.py
"""
import torch.distributed as dist

import crossdock.torch

dist.init_process_group("gloo")  # "nccl" on GPUs, one for each process
dispatcher = crossdock.torch.Dispatcher(num_experts=8, top_k=2, width=4)

print(f"rank {dist.get_rank()} of {dist.get_world_size()} has the experts {list(dispatcher.local_experts)}\n", end="")
dist.destroy_process_group()
