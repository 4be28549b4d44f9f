"""torch.compile, selective checkpointing, autocast. Needs torch 2.4."""
import torch
from cases import case, first_expert, raises, random_of, random_routes, scale_by_expert, tokens_of
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import crossdock
from crossdock.torch import Dispatcher, MoELayer, TitanTokenDispatcher, calls, group, save_ops
from crossdock.torch.library_experts import Form

E, K, D = 8, 2, 16


def make(rank, tokens, step=0):
    generator = random_of(rank, step)
    x = torch.randn((tokens, D), generator=generator).requires_grad_()
    weights = torch.rand((tokens, K), generator=generator).requires_grad_()
    return x, random_routes(generator, tokens, E, K), weights


def function(dispatcher, x, ids, weights):
    sent = dispatcher.dispatch(x, ids, weights)
    y = torch.nn.functional.silu(sent.rows) * sent.row_weights[:, None]
    return dispatcher.combine(y, sent.handle)


def gradients(out, *inputs):
    return torch.autograd.grad((out * out).sum(), inputs)


def compare(compiled, dispatcher, x, ids, weights):
    got, want = compiled(dispatcher, x, ids, weights), function(dispatcher, x, ids, weights)
    torch.testing.assert_close(got, want)
    for a, b in zip(gradients(got, x, weights), gradients(want, x, weights)):
        torch.testing.assert_close(a, b)


@case(1, 4)
def one_graph_for_any_number_of_rows(rank, world):
    torch._dynamo.reset()
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for step, tokens in enumerate((5, 7, 9)):
        compare(compiled, dispatcher, *make(rank, tokens + rank, step))
    x, ids, weights = make(rank, 6)
    compare(compiled, dispatcher, x, torch.arange(K).expand_as(ids).contiguous(), weights)  # rank 0 has all rows
    compare(compiled, dispatcher, *make(rank, tokens_of(rank, world)))  # the last of several ranks has no tokens


@case(1)
def inductor_keeps_the_graph(rank, world):
    torch._dynamo.reset()
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    compare(torch.compile(function, fullgraph=True), dispatcher, *make(rank, 6))


@case(1, 4)
def the_layer_is_one_graph(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        torch.manual_seed(rank)
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=32, dtype=dtype)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = make(rank, 5)[0].detach().to(dtype).requires_grad_()
        inputs = (x, *layer.parameters())
        got, want = compiled(x), layer(x)
        torch.testing.assert_close(got, want)
        for a, b in zip(gradients(got, *inputs), gradients(want, *inputs)):
            torch.testing.assert_close(a, b)


@case(1)
def a_layer_can_be_made_of_fake_tensors(rank, world):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    group()
    with FakeTensorMode(shape_env=ShapeEnv()):
        layer = MoELayer(num_experts=E, top_k=K, width=D, inner=32)
        out = layer(torch.ones(5, D))
    assert isinstance(out, FakeTensor) and out.shape == (5, D)


@case(1)
def the_layer_is_one_graph_under_autocast(rank, world):
    torch._dynamo.reset()
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = make(rank, 5)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(x), layer(x))


@case(1)
def transforms_are_refused_while_compiling(rank, world):
    """torch would trace the operators without their tangents."""
    torch._dynamo.reset()
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = (given.detach() for given in make(rank, 5))

    def call(x):
        return function(dispatcher, x, ids, weights)

    for transformed in (lambda x: torch.func.jvp(call, (x,), (x,))[1], torch.func.grad(lambda x: call(x).sum())):
        with raises(crossdock.Error, "does not support forward-mode derivatives or transforms of torch.func"):
            torch.compile(transformed, backend="aot_eager")(x)


@case(1, 4)
def a_dispatcher_may_be_made_while_compiling(rank, world):
    torch._dynamo.reset()
    dispatcher = TitanTokenDispatcher(num_experts=E, top_k=K)
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh

        dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))

    def run(x, ids, weights):
        rows, _, metadata = dispatcher.dispatch(x, weights, ids)
        return dispatcher.combine(rows * 2, metadata, x)

    x, ids, weights = make(rank, 5)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids, weights), run(x, ids, weights))


@case(1, 4)
def selective_checkpointing_does_not_communicate_again(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, tokens_of(rank, world))
    saved = save_ops()

    def policy(context, operator, *_, **__):
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    plans, original = [], calls.dispatch

    def counted(*arguments):
        made = original(*arguments)
        plans.append(made[3])
        return made

    want = gradients(function(dispatcher, x, ids, weights), x, weights)
    calls.dispatch = counted
    try:
        out = checkpoint(
            function,
            dispatcher,
            x,
            ids,
            weights,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        got = gradients(out, x, weights)
    finally:
        calls.dispatch = original
    assert len(plans) == 1
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@case(1, 4)
def autocast_reaches_the_experts(rank, world):
    torch.manual_seed(rank)
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=32)
    x, _, _ = make(rank, tokens_of(rank, world))
    dtypes = []
    layer.experts.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert dtypes == [torch.bfloat16]
    out.sum().backward()
    assert out.dtype == x.dtype and x.grad.dtype == x.dtype
    assert all(parameter.grad is not None for parameter in layer.parameters())


@case(4)
def operators_pass_the_checks_of_torch(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    x, ids, weights = make(rank, 3)
    sent = dispatcher.dispatch(x, ids, weights)
    first = first_expert(rank, world, E)
    y = scale_by_expert(sent.rows, sent.tokens_per_expert, first).detach().requires_grad_()
    layer = MoELayer(num_experts=E, top_k=K, width=D, inner=32)
    experts = (layer.experts.w1, layer.experts.w2)
    checks = ("test_schema", "test_faketensor")
    for name, inputs in {
        "combine": (y, weights, ids, sent.handle.plan),
        "combine_unweighted": (y, sent.handle.plan, 3),
        "expert_mlp": (y, None, *experts, None, None, sent.tokens_per_expert, *Form(), True),
        "whole_layer": (x, layer.router.weight, None, *experts, *(None,) * 12, layer._state.key, 1, 0, True, True),
    }.items():
        torch.library.opcheck(getattr(torch.ops.crossdock, name).default, inputs, test_utils=checks)
