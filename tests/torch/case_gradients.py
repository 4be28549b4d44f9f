"""The norm and the scale of gradients when experts are spread over ranks, against one rank that has all. Needs torch 2.6."""
import math

import torch
import torch.distributed as dist
from cases import case, raises, random_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import crossdock
from crossdock.torch import GroupedExperts, MoELayer, clip_grad_norm_, scale_expert_gradients_

E, K, D, F = 10, 2, 8, 12  # contiguous parts on 4 ranks: 3, 3, 2, 2
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)


class Model(nn.Module):
    def __init__(self, group=None, placement=None, dtype=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D, dtype=dtype)
        self.layers = nn.ModuleList([MoELayer(group, **SIZES, placement=placement, dtype=dtype) for _ in range(2)])
        self.unused = nn.Linear(2, 2, dtype=dtype)  # has no gradients

    def own(self):
        return set().union(*(layer.expert_parameters() for layer in self.layers))


def whole_model(rank, dtype=None):
    """All experts, on this rank alone, with gradients that differ from value to value."""
    model = Model(dist.new_group([rank], use_local_synchronization=True), dtype=dtype)
    generator = random_of(7)
    for name, parameter in model.named_parameters():
        if not name.startswith("unused"):
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    return model


def pairs_of(model, whole):
    """The parameters of a model, and its parts of those of the whole."""
    for name, parameter in model.named_parameters():
        ids = model.layers[0].dispatcher.local_experts if ".experts." in name else None
        yield parameter, whole.get_parameter(name), ids


def part_of(value, like, ids):
    value = value if ids is None else value[ids]
    if hasattr(like, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, like.device_mesh, like.placements)
    return value.clone()


def take_gradients(model, whole):
    for parameter, other, ids in pairs_of(model, whole):
        if other.grad is not None:
            parameter.grad = part_of(other.grad, parameter.detach(), ids)


def same_gradients(model, whole):
    for parameter, other, ids in pairs_of(model, whole):
        if other.grad is None:
            assert parameter.grad is None
            continue
        wanted = part_of(other.grad, parameter.detach(), ids)
        if hasattr(wanted, "to_local"):
            wanted, got = wanted.to_local(), parameter.grad.to_local()
        else:
            got = parameter.grad
        torch.testing.assert_close(got, wanted)


def compare(model, rank, norm_type=2.0, dtype=None, max_norm=0.5):
    whole = whole_model(rank, dtype)
    take_gradients(model, whole)
    norm = clip_grad_norm_(model, max_norm, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, wanted.to(norm.dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1.3e-6, atol=0)
    same_gradients(model, whole)
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert all(torch.equal(other, norm) for other in norms), "ranks multiplied by different factors"


@case(1, 2, 4)
def clipping_equals_that_of_one_rank_with_all_experts(rank, world):
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        compare(Model(), rank, norm_type)
        compare(Model(placement=[e * 3 % world for e in range(E)]), rank, norm_type)
    compare(Model(placement=[0] * E), rank)  # the others have no experts
    for dtype in (torch.float64, torch.bfloat16):
        compare(Model(dtype=dtype), rank, dtype=dtype)
    compare(Model(), rank, max_norm=1e6)  # above the norm: gradients stay as they are


@case(4)
def clipping_counts_shards_and_replicas_once(rank, world):
    """FSDP2 shards the model over all ranks, and experts over the ranks that have the same ones; or nobody shards them."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    world_mesh = init_device_mesh("cpu", (4,))
    for shard_experts in (False, True):
        for norm_type in (2.0, math.inf):
            model = Model(mesh["ep"])
            if shard_experts:
                for layer in model.layers:
                    fully_shard(layer.experts, mesh=mesh["edp"])
            fully_shard(model, mesh=world_mesh, ignored_params=model.own())
            compare(model, rank, norm_type)


@case(4)
def clipping_works_in_groups_without_a_process_group(rank, world):
    blobs = [None] * world

    def all_gather(blob):
        dist.all_gather_object(blobs, blob)
        return list(blobs)

    with crossdock.Group.from_all_gather(all_gather, rank) as ranks:
        for norm_type in (2.0, math.inf):
            compare(Model(ranks), rank, norm_type)


@case(2)
def experts_outside_of_layers_are_named(rank, world):
    experts = GroupedExperts(2, D, F, expert_ids=[2 * rank, 2 * rank + 1])
    for parameter in experts.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    count = sum(parameter.numel() for parameter in experts.parameters())
    norm = clip_grad_norm_(experts, 1.0, experts=experts.parameters())
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(count * (1.0 + 4.0))))
    torch.testing.assert_close(experts.w1.grad, torch.full_like(experts.w1, (rank + 1) / norm.item()))


class OwnExperts(nn.Module):
    """A module for every expert of this rank, of which there may be none."""

    def __init__(self, number):
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(number)])


@case(4)
def ranks_without_experts_take_part(rank, world):
    layer = MoELayer(num_experts=2, top_k=1, width=D, experts=OwnExperts(2 if rank == 1 else 0), placement=[1, 1])
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = clip_grad_norm_(layer, 1.0)
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(2 * D + 2 * D * D)))
    torch.testing.assert_close(layer.router.weight.grad, torch.full((2, D), 1 / norm.item()))


@case(2, 4)
def biases_that_shards_of_an_expert_share_count_once(rank, world):
    layer = MoELayer(**SIZES, bias=True, etp=2)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = clip_grad_norm_(layer, 1.0)
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(E * D + E * (3 * F * D + 2 * F + D))))
    for parameter in layer.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1 / norm.item()))


@case(2)
def norms_that_are_not_finite_can_be_errors_on_all_ranks(rank, world):
    model = Model()
    take_gradients(model, whole_model(rank))
    if rank == 1:
        model.layers[0].experts.w1.grad.view(-1)[0] = math.inf
    before = model.first.weight.grad.clone()
    with raises(RuntimeError, "the norm of the gradients must be finite, got inf"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.equal(model.first.weight.grad, before)


@case(4)
def gradients_of_experts_become_means_over_ranks(rank, world):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    inputs = torch.randn((4, 5, D), generator=random_of(1))

    def gradients_of(model, x):
        model.zero_grad()
        model(x).square().mean().backward()
        return model.experts

    torch.manual_seed(1)
    whole = MoELayer(dist.new_group([rank], use_local_synchronization=True), **SIZES)
    gradients_of(whole, inputs.reshape(-1, D))
    for sharded in (False, True):
        torch.manual_seed(1)
        layer = MoELayer(mesh["ep"], **SIZES)
        if sharded:
            fully_shard(layer.experts, mesh=mesh["edp"])
        experts, ids = gradients_of(layer, inputs[rank]), layer.dispatcher.local_experts
        if not sharded:
            for parameter in experts.parameters():
                dist.all_reduce(parameter.grad, group=mesh["edp"].get_group())
        scale_expert_gradients_(layer, world)
        for parameter, other in ((experts.w1, whole.experts.w1), (experts.w2, whole.experts.w2)):
            got = parameter.grad.full_tensor() if sharded else parameter.grad
            torch.testing.assert_close(got, other.grad[ids])


@case(1, 2)
def a_model_without_parameters_has_no_norm(rank, world):
    for norm_type in (2.0, math.inf):
        assert clip_grad_norm_(torch.nn.Identity(), 1.0, norm_type).item() == 0
