"""What importing crossdock.torch loads, in a new interpreter."""
import subprocess
import sys

from cases import case

# torch.distributed.nn.functional has the world's process group as a default argument: imported after init_process_group, it
# keeps the group for ever.
SLOW_OR_HARMFUL = ["torch._dynamo", "torch._inductor", "torch.distributed.nn.functional"]

STEP = """
import os, signal, sys, torch, torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = set(sys.modules)
import crossdock.torch

layer = crossdock.torch.MoELayer(num_experts=4, top_k=2, width=8, inner=8)
layer(torch.randn(3, 8, requires_grad=True)).sum().backward()
"""
LOADED = f"""
print([name for name in {SLOW_OR_HARMFUL} if name in set(sys.modules) - before])
"""
FORK = """
dist.destroy_process_group()
child = os.fork()
if child == 0:
    signal.alarm(60)  # where a process group still exists, an exit waits for its threads, which the child does not have
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def output_of(program):
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@case(1)
def a_step_without_compiling_loads_no_compiler(rank, world):
    assert output_of(STEP + LOADED) == "[]"


@case(1)
def a_forked_child_can_exit_after_the_process_group_was_destroyed(rank, world):
    assert output_of(STEP + FORK) == "7"
