"""A small transformer trains the same as with PyTorch's own dispatcher: alone, with DDP, FSDP2 and tensor parallelism."""
import torch
import torch.distributed as dist
from cases import case, random_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from crossdock.compare import TorchTokenDispatcher
from crossdock.torch import GroupedExperts, TitanTokenDispatcher

E, K, D, F, VOCABULARY, LENGTH, STEPS = 8, 2, 32, 48, 37, 12, 30


def crossdock_dispatcher():
    made = TitanTokenDispatcher(num_experts=E, top_k=K)
    made.wire_meshes(ep_mesh=dist.group.WORLD)
    return made


def torch_dispatcher():
    return TorchTokenDispatcher(num_experts=E, top_k=K)


class Layer(nn.Module):
    def __init__(self, dispatcher):
        super().__init__()
        self.dispatcher = dispatcher
        self.router = nn.Linear(D, E, bias=False)
        self.experts = GroupedExperts(E // dist.get_world_size(), D, F)
        with torch.no_grad():  # the experts of all ranks differ, and do not depend on the number of ranks
            first = dist.get_rank() * self.experts.w1.shape[0]
            for e in range(self.experts.w1.shape[0]):
                generator = random_of(first + e, 7)
                self.experts.w1[e] = torch.randn(self.experts.w1[e].shape, generator=generator) / D**0.5
                self.experts.w2[e] = torch.randn(self.experts.w2[e].shape, generator=generator) / F**0.5

    def forward(self, x):
        tokens = x.reshape(-1, D)
        weights, ids = self.router(tokens).softmax(-1).topk(K)
        counts = torch.bincount(ids.reshape(-1), minlength=E)
        rows, local, metadata = self.dispatcher.dispatch(tokens, weights, ids, counts)
        return self.dispatcher.combine(self.experts(rows, local), metadata, tokens).reshape(x.shape)


class Model(nn.Module):
    def __init__(self, dispatcher):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.moe = Layer(dispatcher)
        self.head = nn.Linear(D, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x + self.moe(self.norms[1](x)))


def batch_of(rank, step):
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=random_of(rank, 100 + step))
    return tokens[:, :-1], tokens[:, 1:]


def losses(model, parameters, after_backward=lambda: None):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    found = []
    for step in range(STEPS):
        inputs, targets = batch_of(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(model(inputs).reshape(-1, VOCABULARY), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        after_backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(float(total) / dist.get_world_size())
    return found


def alone(dispatcher):
    model = Model(dispatcher)
    return losses(model, model.parameters())


def divide_experts(model):
    for parameter in model.moe.experts.parameters():
        parameter.grad /= dist.get_world_size()


def with_ddp(dispatcher):
    model = Model(dispatcher)
    own = [f"moe.experts.{name}" for name, _ in model.moe.experts.named_parameters()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return losses(nn.parallel.DistributedDataParallel(model), model.parameters(), lambda: divide_experts(model))


def with_fsdp2(dispatcher):
    from torch.distributed.fsdp import fully_shard

    model = Model(dispatcher)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = set(model.moe.experts.parameters())
    fully_shard(model, mesh=mesh, ignored_params=own)
    return losses(model, model.parameters(), lambda: divide_experts(model))


def with_tensor_parallel(dispatcher):
    """The head is sharded over the ranks; every rank has its own tokens."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    model = Model(dispatcher)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(1)]))
    bias = model.head.bias
    model.head = nn.Identity()

    def forward(inputs):
        x = model(inputs)
        everyone = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        out = torch.matmul(everyone, weight.t()).redistribute(mesh, [Shard(0)]).to_local()
        return out + bias

    parameters = list(model.parameters()) + [weight, bias]
    replicated = [p for p in parameters if not isinstance(p, DTensor)]
    own = {id(p) for p in model.moe.experts.parameters()}

    def reduce():
        for parameter in replicated:
            if id(parameter) not in own and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        divide_experts(model)

    return losses(forward, parameters, reduce)


def compare(train):
    want, got = train(torch_dispatcher()), train(crossdock_dispatcher())
    assert max(abs(a - b) for a, b in zip(want, got)) <= 1e-5, list(zip(want, got))
    assert got[-1] < got[0]


@case(1)
def losses_agree_on_one_process(rank, world):
    compare(alone)


@case(4)
def losses_agree_with_ddp(rank, world):
    compare(with_ddp)


@case(4)
def losses_agree_with_fsdp2(rank, world):
    compare(with_fsdp2)


@case(4)
def losses_agree_with_tensor_parallelism(rank, world):
    compare(with_tensor_parallel)


@case(4)
def sharded_experts_get_the_weights_of_whole_ones(rank, world):
    """Two ranks have the same experts, each a part, from the meta device."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    ids = range(mesh.get_local_rank("ep") * 3, mesh.get_local_rank("ep") * 3 + 3)
    torch.manual_seed(3)
    whole = GroupedExperts(6, D, F)
    experts = GroupedExperts(3, D, F, expert_ids=ids, device="meta")
    fully_shard(experts, mesh=mesh["edp"])
    experts.to_empty(device="cpu")
    torch.manual_seed(3)
    experts.reset_parameters()
    assert torch.equal(experts.w1.full_tensor(), whole.w1[list(ids)])
    assert torch.equal(experts.w2.full_tensor(), whole.w2[list(ids)])
    assert experts.w1.to_local().shape[0] < 3


@case(4)
def loss_scaling_skips_steps_with_infinite_gradients(rank, world):
    model = Model(crossdock_dispatcher())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    inputs, targets = batch_of(rank, 0)
    before = model.moe.router.weight.detach().clone()
    loss = nn.functional.cross_entropy(model(inputs).reshape(-1, VOCABULARY), targets.reshape(-1))
    scaler.scale(loss * 1e3).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.moe.router.weight, before) and scaler.get_scale() < 1e38
