"""A model of two layers with FSDP2 and experts spread over ranks trains as on one rank, and goes on on other numbers of ranks."""
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import case, random_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from crossdock.torch import Checkpoint, MoELayer, clip_grad_norm_, scale_expert_gradients_

E, K, D, F, VOCABULARY, LENGTH, BATCH = 10, 2, 16, 24, 37, 8, 12
STEPS, SAVED_AFTER = 50, 35
OPTIONS = dict(score="sigmoid", expert_bias=True, bias_update_rate=1e-2, aux_loss_coeff=1e-2)


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.moe = MoELayer(group, num_experts=E, top_k=K, width=D, inner=F, **OPTIONS)

    def forward(self, x):
        x = x + self.mix(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.moe(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, group, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList([Block(group), Block(group)])
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def expert_parameters(self):
        return [parameter for block in self.blocks for parameter in block.moe.expert_parameters()]


class Training:
    """A model and its optimizer on the ranks of a group, each with its share of every batch."""

    def __init__(self, group, seed=0, compiled=False, fsdp=True):
        from torch.distributed.fsdp import fully_shard

        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.model = Model(group, seed)
        own = dict.fromkeys(self.model.expert_parameters())  # in an order
        if fsdp:
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, ignored_params=set(own))
            fully_shard(self.model, mesh=mesh, ignored_params=set(own))
        if compiled:
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        others = [parameter for parameter in self.model.parameters() if parameter not in own]
        self.optimizer = torch.optim.AdamW([{"params": others}, {"params": list(own)}], lr=3e-3)

    def step(self, number):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=random_of(number, 100))
        tokens[:, 1::2] = tokens[:, :-1:2]  # something to learn
        mine = tokens.tensor_split(self.world)[self.rank]
        logits = self.model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), mine[:, 1:].reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()
        scale_expert_gradients_(self.model, self.world)
        norm = clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        for block in self.model.blocks:
            block.moe.update_expert_bias()
        values = torch.stack([loss.detach() / self.world, norm / self.world])
        dist.all_reduce(values, group=self.group)
        return values.tolist()

    def steps(self, first, last):
        return [self.step(number) for number in range(first, last)]


    def biases(self):
        return torch.stack([block.moe.expert_bias for block in self.model.blocks])


def agree(got, wanted):
    """The losses and the norms of the gradients."""
    difference = (torch.tensor(got) - torch.tensor(wanted)).abs().max(0).values
    assert difference[0] <= 1e-5 and difference[1] <= 1e-4, (difference, got, wanted)


@case(4)
def training_equals_one_rank_and_goes_on_on_any_number(rank, world):
    folder = tempfile.TemporaryDirectory() if rank == 0 else None
    names = [folder.name if folder else None]
    dist.broadcast_object_list(names)
    groups = {size: dist.new_group(list(range(size))) for size in (4, 3, 2)}
    groups[1] = dist.new_group([rank], use_local_synchronization=True)
    whole = Training(groups[1], fsdp=False)
    wanted = whole.steps(0, STEPS)
    assert wanted[-1][0] < wanted[0][0] - 0.5, "it must learn"
    for compiled in (False, True):
        torch._dynamo.reset()
        path = f"{names[0]}/{compiled}"
        training = Training(groups[4], compiled=compiled)
        got = training.steps(0, SAVED_AFTER)
        dcp.save({"app": Checkpoint(training.model, training.optimizer)}, checkpoint_id=path)
        agree(got + training.steps(SAVED_AFTER, STEPS), wanted)
    for size in (4, 3, 2, 1):
        if rank < size or size == 1:
            other = Training(groups[size], seed=1)
            state = {"app": Checkpoint(other.model, other.optimizer)}
            dcp.load(state, checkpoint_id=path, process_group=groups[size])
            agree(other.steps(SAVED_AFTER, STEPS), wanted[SAVED_AFTER:])
    # And back: saved by three ranks, continued by four.
    if rank < 3:
        three = Training(groups[3], seed=1)
        dcp.load({"app": Checkpoint(three.model, three.optimizer)}, checkpoint_id=path, process_group=groups[3])
        dcp.save({"app": Checkpoint(three.model, three.optimizer)}, checkpoint_id=f"{path}3", process_group=groups[3])
    dist.barrier()
    four = Training(groups[4], seed=1)
    dcp.load({"app": Checkpoint(four.model, four.optimizer)}, checkpoint_id=f"{path}3")
    agree(four.steps(SAVED_AFTER, STEPS), wanted[SAVED_AFTER:])
    torch.testing.assert_close(four.biases(), whole.biases())
    assert four.biases().any()
    dist.barrier()
    del folder
