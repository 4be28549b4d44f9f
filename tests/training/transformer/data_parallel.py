"""Sums of gradients over the ranks that hold different tokens. Nothing is averaged: the loss is divided by the number
of tokens of all ranks before backward.

The gradient of a replicated parameter is a sum over all ranks of the stage; if the parameter is cut over tp, over cp and
dp; of an expert, over edp. DDP and FSDP2 sum over cp and dp, FSDP2 also over edp; the rest is done here.
"""
import contextlib
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from collectives import sum_all_over, sum_over
from mesh import Mesh
from model import Stage
from parameters import EXPERT, REPLICATED, TENSOR, local, parts_of
from shards import Shard

# Mode -> kind -> group over which gradients are still to be summed after backward.
REMAINING: Dict[str, Dict[str, str]] = {
    "sum": {REPLICATED: "tokens", TENSOR: "data", EXPERT: "edp"},
    "ddp": {REPLICATED: "tp", EXPERT: "edp"},
    "fsdp": {REPLICATED: "tp"},
}
# Mode -> kind -> group whose ranks all hold the same gradient in the end.
COPIES: Dict[str, Dict[str, str]] = {
    "sum": {REPLICATED: "tokens", TENSOR: "data", EXPERT: "edp"},
    "ddp": {REPLICATED: "tokens", TENSOR: "data", EXPERT: "edp"},
    "fsdp": {REPLICATED: "tp"},
}


class DataParallel:
    """A stage and the mode that sums its gradients: "sum", after the step; "ddp"; or "fsdp", which also shards."""

    def __init__(self, stage: Stage, mesh: Mesh, mode: str = "sum"):
        if mode not in REMAINING:
            raise ValueError(f"the mode must be one of {', '.join(REMAINING)}, not {mode!r}")
        if mode == "ddp" and mesh.shape.pp > 1:
            raise ValueError("DDP reduces in the first backward, which in a pipeline is not the last: use sum or fsdp")
        self.stage, self.mesh, self.mode = stage, mesh, mode
        self.module: Any = {"sum": lambda: stage, "ddp": self._with_ddp, "fsdp": self._with_fsdp}[mode]()

    def __call__(self, x: torch.Tensor, shard: Shard, *, is_last: bool) -> Tuple[torch.Tensor, torch.Tensor]:
        """One micro-batch; `is_last` of the step."""
        waits = self.mode == "ddp" and not is_last
        with self.module.no_sync() if waits else contextlib.nullcontext():
            return self.module(x, shard)

    def missing_gradients(self) -> List[str]:
        """Names of parameters without a gradient: a part of the model was skipped on this rank."""
        return [name for name, parameter, _ in parts_of(self.stage) if parameter.grad is None]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums what remains to be summed after backward, in one exchange per group."""
        grads: Dict[str, List[torch.Tensor]] = {"tokens": [], "data": [], "tp": [], "edp": []}
        for _, parameter, part in parts_of(self.stage):
            group = REMAINING[self.mode].get(part.kind)
            if group is not None:
                grads[group].append(local(parameter.grad))
        for group, tensors in grads.items():
            sum_all_over(tensors, self.mesh.group(group))

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm over all parameters of all stages, each counted once."""
        total = torch.zeros((), dtype=torch.float64)
        for _, parameter, part in parts_of(self.stage):
            group = COPIES[self.mode].get(part.kind)
            copies = self.mesh.size(group) if group is not None else 1
            total += local(parameter.grad).double().square().sum() / copies
        return float(sum_over(total, self.mesh.group("world")).sqrt())

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        for _, parameter, _ in parts_of(self.stage):
            local(parameter.grad).mul_(factor)

    def _with_ddp(self) -> DistributedDataParallel:
        experts = [name for name, _, part in parts_of(self.stage) if part.kind == EXPERT]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.stage, experts)
        wrapped = DistributedDataParallel(self.stage, process_group=self.mesh.group("data"), broadcast_buffers=False)
        wrapped.register_comm_hook(self.mesh.group("data"), _sum_bucket)  # DDP itself would average
        return wrapped

    def _with_fsdp(self) -> Stage:
        data, edp = (DeviceMesh.from_group(self.mesh.group(name), "cpu") for name in ("data", "edp"))
        options = {"reshard_after_forward": self.mesh.shape.pp == 1}  # otherwise several micro-batches are in flight
        for block in self.stage.blocks.values():
            fully_shard(block.moe.experts, mesh=edp, **options)
            fully_shard(block, mesh=data, **options)
        fully_shard(self.stage, mesh=data, **options)
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return self.stage


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
