"""Inside torchtitan's MoE: outputs and gradients of torchtitan's own dispatcher."""
import torch
import torch.distributed as dist

if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # torchtitan 0.3.0 with torch 2.11
    torch.compiler._is_non_strict_tracing = lambda: False

from cases import case, equal_where_finite, random_of, random_routes  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.token_dispatcher import (  # noqa: E402
    AllToAllTokenDispatcher,
    HybridEPTokenDispatcher,
    TorchAOTokenDispatcher,
)

E, K, D, F = 8, 2, 16, 32


def config_of(dispatcher, **options):
    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=dispatcher.Config(num_experts=E, top_k=K, **options),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E, gate=Linear.Config(in_features=D, out_features=E, bias=False), top_k=K
        ),
    )


def build(config, rank, world):
    """Replaces all experts by this rank's own: RoutedExperts works on local tensors."""
    set_spmd_backend("full_dtensor")
    moe = config.build()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    experts = moe.routed_experts.inner_experts
    local = E // world
    generator = random_of(0, 9)
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        everything = torch.randn(getattr(experts, name).shape, generator=generator) / 4
        setattr(experts, name, torch.nn.Parameter(everything[rank * local : (rank + 1) * local].clone()))
    with torch.no_grad():
        moe.router.gate.weight.copy_(torch.randn((E, D), generator=generator))
    moe._init_self_buffers(buffer_device=torch.device("cpu"))
    moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return moe


def run(moe, x):
    x = x.detach().clone().requires_grad_()
    out = moe(x)
    (out * torch.linspace(0.5, 1.5, D)).square().sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: value.grad for name, value in moe.named_parameters()}}


def compare(want, got):
    assert want.keys() == got.keys()
    for name, value in want.items():
        difference = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6, msg=difference)


@case(4)
def inside_moe(rank, world):
    x = torch.randn((2, 6, D), generator=random_of(rank, 1))
    want = run(build(config_of(AllToAllTokenDispatcher), rank, world), x)
    config = config_of(AllToAllTokenDispatcher)
    assert len(apply_overrides(OverrideConfig(imports=["crossdock.torchtitan.dispatcher"]), config)) == 1
    compare(want, run(build(config, rank, world), x))


@case(4)
def values_that_are_not_finite_propagate(rank, world):
    """To the places to which torchtitan's own dispatcher brings them, and no further."""
    for bad in (torch.inf, torch.nan):
        x = torch.randn((2, 6, D), generator=random_of(rank, 1))
        if rank == 1:
            x[1, 2, 3] = bad
        want = run(build(config_of(AllToAllTokenDispatcher), rank, world), x)
        config = config_of(AllToAllTokenDispatcher)
        apply_overrides(OverrideConfig(imports=["crossdock.torchtitan.dispatcher"]), config)
        got = run(build(config, rank, world), x)
        for name, value in want.items():
            equal_where_finite(name, got[name], value)
        assert got["out"].isfinite().all() == (rank != 1) and got["out"][0].isfinite().all()


@case(4)
def inside_moe_as_hybridep(rank, world):
    x = torch.randn((2, 6, D), generator=random_of(rank, 1))
    want = run(build(config_of(AllToAllTokenDispatcher), rank, world), x)
    config = config_of(HybridEPTokenDispatcher, hidden_dim=D, num_max_tokens_per_rank=12)
    imports = [("crossdock.torchtitan.graph_dispatcher", {"capacity_factor": 1.0})]
    assert len(apply_overrides(OverrideConfig(imports=imports), config)) == 1
    dispatcher = config.routed_experts.token_dispatcher
    assert isinstance(dispatcher, HybridEPTokenDispatcher.Config) and dispatcher.non_blocking_capacity_factor == 1.0
    compare(want, run(build(config, rank, world), x))


@case(4)
def padding_for_quantised_experts_is_kept(rank, world):
    config = config_of(TorchAOTokenDispatcher, pad_multiple=16)
    apply_overrides(OverrideConfig(imports=["crossdock.torchtitan.dispatcher"]), config)
    assert config.routed_experts.token_dispatcher.alignment == 16
    x = torch.randn((2, 6, D), generator=random_of(rank, 1))
    want = run(build(config_of(AllToAllTokenDispatcher), rank, world), x)
    compare(want, run(build(config, rank, world), x))


@case(4)
def rows_equal_those_of_all_to_all(rank, world):
    from crossdock.torch import TitanTokenDispatcher

    set_spmd_backend("full_dtensor")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    original = AllToAllTokenDispatcher.Config(num_experts=E, top_k=K).build()
    ours = TitanTokenDispatcher(num_experts=E, top_k=K)
    for dispatcher in (original, ours):
        dispatcher.wire_meshes(ep_mesh=mesh)
    for tokens in (5, rank):
        generator = random_of(rank, tokens)
        x, scores = torch.randn((tokens, D), generator=generator), torch.rand((tokens, K), generator=generator)
        ids = random_routes(generator, tokens, E, K)
        counts = torch.bincount(ids.reshape(-1), minlength=E)
        rows, local, _ = ours.dispatch(x, scores, ids, counts)
        want_rows, want_local, _ = original.dispatch(x, scores, ids, counts)
        assert torch.equal(rows, want_rows) and torch.equal(local, want_local)


@case(4)
def selective_checkpointing_saves_rows_and_outputs(rank, world):
    from crossdock.torchtitan import SelectiveCheckpointing

    saved = SelectiveCheckpointing.Config().build().get_save_ops()
    assert {torch.ops.crossdock.dispatch.default, torch.ops.crossdock.combine.default} <= saved
    assert torch.ops.aten.mm.default in saved


@case(4)
def the_command_compares_with_torchtitan(rank, world):
    from crossdock import compare as command

    result = command.compare(command._parse(["--tokens", "32", "--width", "16", "--experts", "8", "--top-k", "2"]))
    assert result["equal"] and "torchtitan (all-to-all)" in result["seconds"], result
    dist.barrier()
