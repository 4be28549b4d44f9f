"""Inside Megatron's MoELayer: outputs and gradients of Megatron's own dispatcher."""
import warnings

warnings.simplefilter("ignore")
import megatron_on_cpu  # noqa: E402,F401
import torch  # noqa: E402
from cases import case, equal_where_finite, raises, random_of, random_routes  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # noqa: E402
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import crossdock.megatron  # noqa: E402

H, E, K = 16, 8, 2


def initialize(tp, ep, etp):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )


def build(kind, tp=1, ep=1, etp=1, padding=False, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_token_dispatcher_type=kind,
        moe_ffn_hidden_size=8,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
        **{"moe_router_dtype": "fp32", **options},
    )
    config.moe_router_padding_for_quantization = padding  # set late: its check requires fp8, which has no products here
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = None
    if config.moe_shared_expert_intermediate_size is not None:
        shared = ModuleSpec(module=SharedExpertMLP, submodules=mlp)
    submodules = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=mlp), shared_experts=shared)
    layer = MoELayer(config, submodules, layer_number=1)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(layer.named_parameters())):
            # Replicated parameters are identical on every rank; the others differ.
            rank = 0 if "router" in name else torch.distributed.get_rank() + 1
            parameter.copy_(torch.randn(parameter.shape, generator=random_of(rank, index)) / 4)
    return layer


def run(layer, x):
    x = x.detach().clone().requires_grad_()
    out, _ = layer(x)
    (out * torch.linspace(0.5, 1.5, out.shape[-1])).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


def compare(rank, world, tp=1, ep=1, etp=1, tokens=(4,), reference="alltoall", tolerance=0.0, **options):
    initialize(tp, ep, etp)
    x = torch.randn((tokens[rank % len(tokens)], 2, H), generator=random_of(rank, 50))
    x = x.to(options.get("params_dtype", torch.float32))
    want = run(build(reference, tp, ep, etp, **options), x)
    crossdock.megatron.install()
    try:
        layer = build("alltoall", tp, ep, etp, **options)
    finally:
        crossdock.megatron.uninstall()
    assert isinstance(layer.token_dispatcher, crossdock.megatron.MegatronTokenDispatcher)
    replaced = build(reference, tp, ep, etp, **options)
    assert crossdock.megatron.replace(replaced) == 1
    for got in (run(layer, x), run(replaced, x)):
        for name, value in want.items():
            difference = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=difference)


@case(4)
def ep4(rank, world):
    compare(rank, world, ep=4)


@case(4)
def values_that_are_not_finite_propagate(rank, world):
    """To the places to which Megatron's own dispatcher brings them, and no further."""
    initialize(1, 4, 1)
    for bad in (torch.inf, torch.nan):
        x = torch.randn((4, 2, H), generator=random_of(rank, 50))
        if rank == 1:
            x[1, 0, 3] = bad
        want = run(build("alltoall", ep=4), x)
        layer = build("alltoall", ep=4)
        assert crossdock.megatron.replace(layer) == 1
        got = run(layer, x)
        for name, value in want.items():
            equal_where_finite(name, got[name], value)
        assert got["out"].isfinite().all() == (rank != 1) and got["out"][:, 1].isfinite().all()


@case(4)
def ep4_with_unequal_tokens(rank, world):
    compare(rank, world, ep=4, tokens=(3, 1, 6, 2))


@case(4)
def ep4_with_bf16_tokens_and_probabilities(rank, world):
    """Megatron rounds after every addition, Crossdock once."""
    compare(rank, world, ep=4, moe_router_dtype=None, params_dtype=torch.bfloat16, bf16=True, tolerance=3e-2)


@case(4)
def ep4_fp64_probabilities(rank, world):
    compare(rank, world, ep=4, moe_router_dtype="fp64", tolerance=1e-6)


@case(4)
def ep4_with_capacity(rank, world):
    compare(rank, world, ep=4, moe_expert_capacity_factor=1.0)


@case(4)
def ep4_with_drop_and_pad(rank, world):
    compare(rank, world, ep=4, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)


@case(4)
def ep4_with_quantization_padding(rank, world):
    compare(rank, world, ep=4, padding=True, tokens=(16,), tolerance=1e-6)


@case(4)
def tp2_ep2_with_shared_experts(rank, world):
    compare(rank, world, tp=2, ep=2, moe_shared_expert_intermediate_size=8, tolerance=1e-6)


@case(4)
def tp2_ep4_with_shared_experts(rank, world):
    compare(rank, world, tp=2, ep=4, etp=1, moe_shared_expert_intermediate_size=8, tolerance=1e-6)


@case(4)
def tp2_ep2_with_overlapped_shared_experts(rank, world):
    for gate in (False, True):
        options = dict(moe_shared_expert_intermediate_size=8, moe_shared_expert_overlap=True)
        compare(rank, world, tp=2, ep=2, tolerance=1e-6, moe_shared_expert_gate=gate, **options)


@case(4)
def tp2_etp2_ep2(rank, world):
    """Megatron's alltoall needs a gather of unequal sizes here, which gloo lacks."""
    compare(rank, world, tp=2, ep=2, etp=2, reference="allgather", tolerance=1e-6)


@case(4)
def a_rank_may_have_no_tokens(rank, world):
    initialize(1, 4, 1)
    crossdock.megatron.guard_empty_router()
    layer = build("alltoall", ep=4)
    crossdock.megatron.replace(layer)
    x = torch.randn((0 if rank == 2 else 3, 2, H), generator=random_of(rank, 50))
    got = run(layer, x)
    assert got["out"].shape == x.shape and all(value is not None for value in got.values())


@case(4)
def several_batches_may_be_in_flight(rank, world):
    initialize(1, 4, 1)
    batches = [torch.randn((3 + step, 2, H), generator=random_of(rank, 60 + step)) for step in range(3)]
    want = [run(build("alltoall", ep=4), x)["x"] for x in batches]
    layer = build("alltoall", ep=4)
    crossdock.megatron.replace(layer)
    inputs = [x.clone().requires_grad_() for x in batches]
    outs = [layer(x)[0] for x in inputs]
    for step in (1, 2, 0):
        (outs[step] * torch.linspace(0.5, 1.5, H)).square().sum().backward()
        torch.testing.assert_close(inputs[step].grad, want[step], rtol=0, atol=0)


@case(4)
def the_graph_may_be_cut_between_steps(rank, world):
    initialize(1, 4, 1)
    x = torch.randn((4, 2, H), generator=random_of(rank, 50))
    want = run(build("alltoall", ep=4), x)
    layer = build("alltoall", ep=4)
    crossdock.megatron.replace(layer)
    leaves = []

    def cut(*tensors):
        detached = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        leaves.append((tensors, detached))
        return detached

    x = x.clone().requires_grad_()
    probs, routes = layer.route(x)
    hidden, probs = cut(*layer.preprocess(x, probs, routes))
    rows, row_probs = cut(*layer.dispatch(hidden, probs))
    (y,) = cut(layer.routed_experts_compute(rows, row_probs)[0])
    (out,) = cut(layer.combine(y))
    out = layer.postprocess(out, None)
    (out * torch.linspace(0.5, 1.5, out.shape[-1])).square().sum().backward()
    for tensors, detached in reversed(leaves):
        torch.autograd.backward(tensors, [tensor.grad for tensor in detached])
    torch.testing.assert_close(x.grad, want["x"], rtol=0, atol=0)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=0, atol=0)


@case(4)
def steps_equal_those_of_alltoall(rank, world):
    """With probabilities of each type, which are not zero outside the map."""
    initialize(1, 4, 1)
    layer = build("alltoall", ep=4)
    original = layer.token_dispatcher
    crossdock.megatron.replace(layer)
    x = torch.randn((3 + rank, 2, H), generator=random_of(rank, 70))
    tokens = x.shape[0] * x.shape[1]
    routes = torch.zeros((tokens, E), dtype=torch.bool)
    routes.scatter_(1, random_routes(random_of(rank, 71), tokens, E, K), True)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        probs = torch.rand((tokens, E), generator=random_of(rank, 72)).to(dtype)
        want = run_steps(original, x, routes, probs)
        got = run_steps(layer.token_dispatcher, x, routes, probs)
        tolerance = 1e-6 if dtype == torch.float64 else 0  # fp64 is rounded to fp32
        for name, value in want.items():
            assert got[name].dtype == value.dtype, name
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance)


def run_steps(dispatcher, x, routes, probs, between=lambda dispatcher: None):
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    given = dispatcher.dispatch_preprocess(x, routes, probs)
    between(dispatcher)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*given))
    y = rows * row_probs.float()[:, None]
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y)))
    out.square().sum().backward()
    return dict(rows=rows, counts=counts, row_probs=row_probs, out=out, grad_x=x.grad, grad_probs=probs.grad)


@case(4)
def a_graph_may_end_before_the_dispatch(rank, world):
    """Like a replay of a CUDA graph, which returns the attributes that the dispatcher names and sets nothing else."""
    initialize(1, 4, 1)
    layer = build("alltoall", ep=4)
    crossdock.megatron.replace(layer)
    dispatcher = layer.token_dispatcher
    assert dispatcher.get_expert_zero_copy_buffers() == (None, None)
    x = torch.randn((3, 2, H), generator=random_of(rank, 70))
    routes = torch.zeros((6, E), dtype=torch.bool)
    routes.scatter_(1, random_routes(random_of(rank, 71), 6, E, K), True)
    probs = torch.rand((6, E), generator=random_of(rank, 72))
    want = run_steps(dispatcher, x, routes, probs)

    def replay(dispatcher):
        saved = {name: getattr(dispatcher, name).clone() for name in dispatcher.cudagraph_attrs}
        dispatcher.dispatch_preprocess(x, ~routes, probs)  # for another micro-batch
        for name, value in saved.items():
            setattr(dispatcher, name, value)

    for name, value in run_steps(dispatcher, x, routes, probs, replay).items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=0)


@case(4)
def experts_in_another_order_are_refused(rank, world):
    initialize(1, 4, 1)
    layer = build("alltoall", ep=4)
    layer.local_expert_indices = [index ^ 2 for index in layer.local_expert_indices]
    with raises(ValueError, "local_expert_indices"):
        crossdock.megatron.replace(layer)
