"""One step over the pipeline stages: one forward, one backward ("1F1B"), with several micro-batches in flight."""
from typing import Dict, Iterator, List, Tuple

import torch
import torch.distributed as dist

from data_parallel import DataParallel
from mesh import Mesh
from shards import Shard


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Tuple[str, int]]:
    """The order of a stage: ("forward" or "backward", micro-batch)."""
    ahead = min(stages - 1 - stage, micro_batches)
    for index in range(ahead):
        yield "forward", index
    for index in range(micro_batches - ahead):
        yield "forward", ahead + index
        yield "backward", index
    for index in range(micro_batches - ahead, micro_batches):
        yield "backward", index


class Pipeline:
    """Runs this rank's stage. The ranks of a stage take the same order, so their collective calls match."""

    def __init__(self, model: DataParallel, mesh: Mesh, *, width: int, dtype: torch.dtype):
        self.model, self.mesh = model, mesh
        self.width, self.dtype = width, dtype
        self.most_in_flight = 0
        self._in_flight: Dict[int, Tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._sends: List[Tuple[dist.Work, torch.Tensor]] = []

    def step(self, shards: List[Shard]) -> torch.Tensor:
        """Forward and backward of all micro-batches. Returns this rank's parts of two sums over all ranks: the mean
        loss of a token, and the routers' losses."""
        losses = torch.zeros(2, dtype=torch.float64)
        for direction, index in one_forward_one_backward(self.mesh.at["pp"], self.mesh.shape.pp, len(shards)):
            if direction == "forward":
                losses += self._forward(index, shards)
                self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
            else:
                self._backward(index, shards[index])
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        return losses

    def _forward(self, index: int, shards: List[Shard]) -> torch.Tensor:
        shard = shards[index]
        x = shard.tokens if self.mesh.is_first_stage else self._receive(shard, -1).requires_grad_()
        out, router_loss = self.model(x, shard, is_last=index == len(shards) - 1)
        router_loss = router_loss / len(shards)
        found = torch.zeros(2, dtype=torch.float64)
        found[1] = router_loss.detach()
        if self.mesh.is_last_stage:
            out = out / shard.step_tokens
            found[0] = out.detach()
        else:
            self._send(out.detach(), 1)
        self._in_flight[index] = (x, out, router_loss)
        return found

    def _backward(self, index: int, shard: Shard) -> None:
        x, out, router_loss = self._in_flight.pop(index)
        if self.mesh.is_last_stage:
            (out + router_loss).backward()
        else:
            torch.autograd.backward([out, router_loss], [self._receive(shard, 1), None])
        if not self.mesh.is_first_stage:
            self._send(x.grad, -1)

    # Both sides know the number of tokens, so a message without any is not sent.

    def _send(self, x: torch.Tensor, stages: int) -> None:
        if x.shape[0]:
            x = x.contiguous()
            self._sends.append((dist.isend(x, self.mesh.neighbour(stages)), x))

    def _receive(self, shard: Shard, stages: int) -> torch.Tensor:
        x = torch.empty((shard.num_tokens, self.width), dtype=self.dtype)
        if shard.num_tokens:
            dist.recv(x, self.mesh.neighbour(stages))
        return x
