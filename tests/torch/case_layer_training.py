"""MoELayer with losses, expert bias and shared experts under what trains it: compile, autocast, GradScaler, DDP, FSDP2,
activation checkpointing, checkpoints, the meta device. Needs torch 2.6."""
import copy
import functools
import io
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_layer_options import E, SIZES, close, forward_hook, total
from cases import case, random_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import crossdock
from crossdock.torch import Checkpoint, MoELayer, calls, group, save_ops, set_loss_scale
from crossdock.torch.library_experts import Form

D, LENGTH, VOCABULARY, STEPS = SIZES["width"], 5, 19, 50
OPTIONS = dict(
    SIZES,
    score="sigmoid",
    expert_bias=True,
    bias_update_rate=0.01,
    aux_loss_coeffs={"batch": 0.05, "sequence": 0.02},
    z_loss_coeff=0.01,
    shared_inner=6,
)


class Block(nn.Module):
    def __init__(self, ranks, **options):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.moe = MoELayer(ranks, **{**OPTIONS, **options})

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    """Two layers; the same parameters on any number of ranks."""

    def __init__(self, ranks=None, **options):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList([Block(ranks, **options) for _ in range(2)])
        self.head = nn.Linear(D, VOCABULARY)
        self.call = lambda block, x: block(x)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def layers(self):
        return [block.moe for block in self.blocks]

    def experts(self):
        return [p for layer in self.layers() for p in layer.expert_parameters()]


def batch_of(rank, step):
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=random_of(rank, 100 + step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs).reshape(-1, VOCABULARY), targets.reshape(-1))


def train(model, layers, ranks, experts=(), steps=STEPS, optimizer=torch.optim.Adam):
    """The losses of the batches of these ranks, one after the other. `experts` have summed gradients."""
    optimizer = optimizer(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        inputs, targets = (torch.cat(parts) for parts in zip(*(batch_of(rank, step) for rank in ranks)))
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in experts:
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        for layer in layers:
            layer.update_expert_bias()
        mean = loss.detach().clone()
        if len(ranks) == 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found.append(mean.item())
    return found


def on_one_rank(world, **options):
    (alone,) = crossdock.Group.from_threads(1)
    model = Model(alone, **options)
    return train(model, model.layers(), range(world)), model


def same_course(got, wanted):
    assert max(abs(a - b) for a, b in zip(got, wanted)) <= 1e-5, list(zip(got, wanted))
    assert got[-1] < got[0]


@case(4)
def fsdp2_trains_as_one_rank_does(rank, world):
    from torch.distributed.fsdp import fully_shard

    wanted, whole = on_one_rank(world)
    mesh = init_device_mesh("cpu", (world,))
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = Model()
        layers, experts = model.layers(), model.experts()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=set(block.moe.expert_parameters()))
        fully_shard(model, mesh=mesh, ignored_params=set(experts))
        if is_compiled:
            for layer in layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        same_course(train(model, layers, [rank], experts), wanted)
        for layer, other in zip(layers, whole.layers()):
            close(layer.expert_bias, other.expert_bias)
            assert layer.report.load.sum() == world * 2 * LENGTH * SIZES["top_k"]


@case(2, 4)
def ddp_trains_as_one_rank_does(rank, world):
    wanted, _ = on_one_rank(world)
    model = Model()
    experts = set(model.experts())
    ignored = [name for name, parameter in model.named_parameters() if parameter in experts]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = nn.parallel.DistributedDataParallel(model)
    same_course(train(wrapped, model.layers(), [rank], experts), wanted)


@case(1, 2)
def checkpointing_changes_nothing(rank, world):
    """Losses, loads and the jitter's random numbers are those of one forward."""
    found = []
    for use_reentrant in (None, False, True):
        model = Model(jitter=0.05)
        if use_reentrant is not None:
            model.call = lambda block, x, kind=use_reentrant: checkpoint(block, x, use_reentrant=kind)
        torch.manual_seed(13)
        inputs, targets = batch_of(rank, 0)
        for _ in range(2):  # micro-batches
            loss_of(model, inputs, targets).backward()
        assert all(layer._state.load.sum() == 2 * total(2 * LENGTH) * SIZES["top_k"] for layer in model.layers())
        found.append([p.grad for p in model.parameters()])
    for grads in found[1:]:
        for a, b in zip(grads, found[0]):
            close(a, b)


@case(1, 2)
def selective_checkpointing_does_not_repeat_the_layer(rank, world):
    saved, forwards, original = save_ops(), [], calls.layer_forward

    def policy(context, operator, *_, **__):
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def counted(*arguments):
        forwards.append(arguments)
        return original(*arguments)

    model = Model()
    loss_of(model, *batch_of(rank, 0)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.call = lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    calls.layer_forward = counted
    try:
        loss_of(model, *batch_of(rank, 0)).backward()
    finally:
        calls.layer_forward = original
    assert len(forwards) == 2
    for parameter, grad in zip(model.parameters(), wanted):
        close(parameter.grad, grad)


@case(1, 2)
def operators_pass_the_checks_of_torch(rank, world):
    layer = MoELayer(**OPTIONS, weights_in="experts", bias=True, router_bias=True)
    x, state = torch.randn((6, D)).requires_grad_(), layer._state
    experts = layer._parameters_of_experts()
    mask, ids = torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int32)
    given = (layer.expert_bias, mask, ids, None, None, None, state.key, 2, 0, True, True)
    counts, weights, none = torch.tensor([2, 0, 1, 3]), torch.rand(6).requires_grad_(), torch.zeros(0, dtype=torch.int64)
    four = [parameter[:4].detach().clone().requires_grad_() for parameter in experts[:4]]
    inputs = {
        "whole_layer": (x, layer.router.weight, layer.router.bias, *experts, *given),
        "expert_mlp": (x, weights, *four, counts, *Form(weights_in="experts"), True),
        "attach_losses": (weights, torch.ones(()).requires_grad_(), torch.zeros(E, dtype=torch.int64), none, state.key),
        "sum_over_group": (counts, state.key, "layer"),
    }
    for name, arguments in inputs.items():
        operator = getattr(torch.ops.crossdock, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@case(1)
def every_option_is_one_graph(rank, world):
    several = dict(num_groups=4, group_top_k=2, jitter=0.0, bias=True, activation="geglu", router_bias=True)
    for options, changed in ((several, False), (dict(weights_in="experts", shared_inner=0), True)):
        torch._dynamo.reset()
        torch.manual_seed(1)
        layer = MoELayer(**{**OPTIONS, **options, **(dict(aux_loss_coeffs={"batch": 0.1}) if changed else {})})
        if changed:
            layer.experts.register_forward_hook(forward_hook)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for tokens in (3, 4):
            x = torch.randn((2, tokens, D), generator=random_of(rank, tokens)).requires_grad_()
            mask = torch.arange(2 * tokens).view(2, tokens) % 4 == 3
            results = []
            for run in (compiled, layer):
                out = run(x, padding_mask=mask)
                inputs = [x, *layer.parameters()]
                results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
            for a, b in zip(*results):
                close(a, b, 1e-5)


@case(1, 2)
def jitter_is_random_in_a_compiled_layer_too(rank, world):
    torch._dynamo.reset()
    torch.manual_seed(1)
    layer = MoELayer(**OPTIONS, jitter=0.5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn((1, 3, D)).expand(2, 3, D)
    outs = []
    for run in (compiled, compiled, layer, layer):
        out = run(x)
        assert not torch.equal(out[0], out[1])  # equal tokens get different factors
        outs.append(out)
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[2], outs[3])
    everyone = [None] * world
    dist.all_gather_object(everyone, outs[0].tolist())
    assert len({str(one) for one in everyone}) == world
    assert torch.equal(layer.eval()(x), layer(x))


@case(1, 2)
def several_layers_compiled_one_by_one_have_their_own_state(rank, world):
    torch._dynamo.reset()
    layers = [MoELayer(**OPTIONS, scale=float(1 + i)) for i in range(3)]
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
        layer(torch.ones((2, 3, D))).sum().backward()
    for layer in layers:
        assert layer._state.load.sum() == total(6) * SIZES["top_k"]
        assert layer.report.weights.sum(1).allclose(torch.full((6,), layer.scale))


@case(1, 2)
def autocast_computes_experts_in_its_dtype(rank, world):
    torch.manual_seed(2)
    layer, twin = MoELayer(**OPTIONS), MoELayer(**OPTIONS, dtype=torch.bfloat16)
    twin.load_state_dict(layer.state_dict())
    twin.router.weight = layer.router.weight  # logits from fp32 gates
    assert twin.expert_bias.dtype == torch.float32
    x = torch.randn((2, LENGTH, D), generator=random_of(rank)).to(torch.bfloat16)
    for given in (x.float(), x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(given)
        assert out.dtype == given.dtype and torch.equal(out.to(torch.bfloat16), twin(x))
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@case(1, 2)
def a_grad_scaler_scales_the_losses_too(rank, world):
    grads = []
    for init_scale in (1.0, 1024.0):
        model = Model()
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        set_loss_scale(scaler.get_scale)
        try:
            scaler.scale(loss_of(model, *batch_of(rank, 0))).backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            scaler.unscale_(optimizer)
        finally:
            set_loss_scale(1.0)
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        close(a, b)


@case(1, 2)
def dtypes_give_results_of_their_precision(rank, world):
    torch.manual_seed(4)
    wanted = None
    for dtype, limit in ((torch.float64, 0), (torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        torch.manual_seed(4)
        layer = MoELayer(**OPTIONS, dtype=torch.float64).to(dtype)
        assert layer.expert_bias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        x = torch.randn((2, LENGTH, D), generator=random_of(rank)).to(dtype)
        got = step_of(layer, x)
        wanted = wanted or got
        if layer.report.expert_ids.equal(wanted[-1]):
            for a, b in zip(got[:-1], wanted[:-1]):
                close(a, b, limit)


def step_of(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return [t.detach().double() for t in (out, x.grad, layer.shared.w1.grad)] + [layer.report.expert_ids]


@case(1, 2)
def a_layer_can_be_moved_copied_and_saved(rank, world):
    torch.manual_seed(6)
    layer = MoELayer(**OPTIONS)
    layer.expert_bias.copy_(torch.linspace(-1, 1, E) / 3)
    x = torch.randn((2, LENGTH, D), generator=random_of(rank))
    layer(x).sum().backward()
    twin = copy.deepcopy(layer)
    assert twin._state is not layer._state and torch.equal(twin._state.load, layer._state.load) and twin.report is None
    assert torch.equal(twin(x), layer(x)) and twin.report is not layer.report
    layer.update_expert_bias()
    assert twin._state.load is not None and not torch.equal(twin.expert_bias, layer.expert_bias)

    memory = io.BytesIO()
    torch.save(layer.state_dict(), memory)
    memory.seek(0)
    loaded = torch.load(memory)
    assert "expert_bias" in loaded and "shared.w1" in loaded
    other = MoELayer(**OPTIONS, device="meta")
    assert other.expert_bias.is_meta
    other.to_empty(device="cpu").reset_parameters()
    assert not other.expert_bias.any()
    other.load_state_dict(loaded)
    assert torch.equal(other(x), layer(x))

    bias = layer.expert_bias.clone()
    layer.to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.bfloat16 and torch.equal(layer.expert_bias, bias)  # not rounded
    assert layer.double().expert_bias.dtype == torch.float64

    model = nn.Sequential(nn.Linear(D, D), MoELayer(**OPTIONS), nn.Linear(D, 3))
    assert model(x).shape == (2, LENGTH, 3)
    assert not model.eval()(x).isnan().any() and not model[1].report.losses.any()


@case(2, 4)
def a_checkpoint_has_every_parameter_and_loads_on_one_rank(rank, world):
    """Continued with the same losses."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    options = dict(bias=True, router_bias=True, activation="geglu")
    models = []
    for ranks in (None, crossdock.Group.from_threads(1)[0]):
        model = Model(ranks, **options)
        models.append((model, torch.optim.Adam(model.parameters(), lr=1e-2)))
    model, optimizer = models[0]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batch_of(rank, step)).backward()
        for parameter in model.parameters():
            if id(parameter) not in {id(expert) for expert in model.experts()}:
                dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        for layer in model.layers():
            layer.update_expert_bias()
    dcp.save({"app": Checkpoint(*models[0])}, checkpoint_id=folder[0])
    alone = dist.new_group([rank], use_local_synchronization=True)
    dcp.load({"app": Checkpoint(*models[1])}, checkpoint_id=folder[0], process_group=alone)
    whole, other = models[1]
    inputs, targets = (torch.cat(parts) for parts in zip(*(batch_of(r, 3) for r in range(world))))
    wanted, got = loss_of(whole, inputs, targets), loss_of(model, *batch_of(rank, 3))
    mean = got.detach().clone()
    dist.all_reduce(mean)
    close(mean / world, wanted.detach(), 1e-5)
    for mine, theirs in zip(model.layers(), whole.layers()):
        assert torch.equal(mine.expert_bias, theirs.expert_bias) and mine.expert_bias.any()
        own = mine.local_experts
        for name in ("w1", "w2", "b1", "b2"):
            part, everything = getattr(mine.experts, name), getattr(theirs.experts, name)
            assert torch.equal(part, everything[own])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[part][key], other.state[everything][key][own])
        assert torch.equal(mine.shared.w1, theirs.shared.w1)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


@case(2, 4)
def expert_tensor_parallelism_and_replicated_tokens(rank, world):
    """Pairs of ranks share experts, and hold the same tokens: as one rank with all experts."""
    (alone,) = crossdock.Group.from_threads(1)
    for activation, interleaved in (("swiglu", False), ("geglu", True)):
        options = dict(SIZES, inner=7, activation=activation, interleaved=interleaved, aux_loss_coeff=0.1, gradients="summed")
        pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
        torch.manual_seed(8)
        layer = MoELayer(**options, etp=2, replicated_over=group(pairs[rank // 2]))
        torch.manual_seed(8)
        whole = MoELayer(alone, **options)
        assert layer.local_experts == list(range(rank // 2 * (2 * E // world), (rank // 2 + 1) * (2 * E // world)))
        xs = [torch.randn((6 + i, D), generator=random_of(i)) for i in range(world // 2)]
        mine, everything = xs[rank // 2].clone().requires_grad_(), torch.cat(xs).requires_grad_()
        out, wanted = layer(mine), whole(everything)
        for result in (out, wanted):
            result.square().sum().backward()
        parts = [len(x) for x in xs]
        close(out, wanted.split(parts)[rank // 2], 1e-5)
        close(mine.grad, everything.grad.split(parts)[rank // 2], 1e-5)
        dist.all_reduce(layer.router.weight.grad)
        close(layer.router.weight.grad, whole.router.weight.grad, 1e-5)
        part = slice(0, 4) if rank % 2 == 0 else slice(4, 7)
        own = whole.experts.w2.grad[layer.local_experts][:, :, part]
        close(layer.experts.w2.grad, own, 1e-5)


@case(4)
def pairs_that_share_sequences_have_the_loss_of_one_rank(rank, world):
    """Each pair has three sequences, of which a rank has a part, in whole layers and in steps."""
    (alone,) = crossdock.Group.from_threads(1)
    options = dict(SIZES, aux_loss_coeffs={"batch": 0.2, "sequence": 0.3}, z_loss_coeff=0.1, dtype=torch.float64)
    pair = group([dist.new_group([i, i + 1]) for i in range(0, world, 2)][rank // 2])
    xs = [torch.randn((4 + i, D), generator=random_of(i)).double() for i in range(world)]
    ids = [torch.arange(4 + i) % 3 for i in range(world)]
    whole, *layers = (
        MoELayer(ranks, **options, sequence_group=shared)
        for ranks, shared in ((alone, None), (None, pair), (None, pair))
    )
    for layer in layers:
        layer.router.load_state_dict(whole.router.state_dict())
        dist.broadcast(layer.router.weight.data, 0)
    whole.router.load_state_dict(layers[0].router.state_dict())
    layers[1].router.register_forward_hook(forward_hook)
    everything = torch.cat([id + 3 * (i // 2) for i, id in enumerate(ids)])
    (0 * whole(torch.cat(xs), sequence_ids=everything, num_sequences=6)).sum().backward()
    for layer in layers:
        for total_sequences in (0, 6, 12):
            layer.zero_grad()
            keywords = dict(sequence_ids=ids[rank], num_sequences=3, total_sequences=total_sequences)
            (0 * layer(xs[rank], **keywords)).sum().backward()
            losses = layer.report.losses.clone()
            dist.all_reduce(losses)
            factor = torch.tensor([1, 0.5 if total_sequences == 12 else 1, 1])
            close(losses[2:], whole.report.losses[2:] * factor, 1e-12)
            if total_sequences < 12:
                grad = layer.router.weight.grad
                dist.all_reduce(grad)
                close(grad / world, whole.router.weight.grad, 1e-12)


@case(1, 2)
def weight_gradients_can_wait(rank, world):
    grads = []
    for delay_dw in (False, True):
        torch.manual_seed(9)
        layer = MoELayer(**OPTIONS, delay_dw=delay_dw, bias=True)
        for step in range(2):
            x = torch.randn((2, LENGTH, D), generator=random_of(rank, step))
            layer(x).square().sum().backward()
        if delay_dw:
            assert layer.experts.w1.grad is None and layer.router.weight.grad is not None
            for _ in range(3):  # the third does nothing
                layer.backward_dw()
        grads.append({name: p.grad for name, p in layer.named_parameters()})
    for name, grad in grads[0].items():
        close(grads[1][name], grad)


@case(1, 2)
def a_second_backward_counts_once(rank, world):
    for in_steps in (False, True):
        layer = MoELayer(**{**OPTIONS, "aux_loss_coeffs": {"global_batch": 0.5}})
        if in_steps:
            layer.router.register_forward_hook(forward_hook)
        x = torch.randn((2, LENGTH, D)).requires_grad_()
        layer(x + 1).sum().backward()
        out = layer(x)
        first = torch.autograd.grad(out.sum(), [x, *layer.parameters()], retain_graph=True)
        load = layer._state.load.clone()
        for a, b in zip(first, torch.autograd.grad(out.sum(), [x, *layer.parameters()])):
            assert torch.equal(a, b)
        assert torch.equal(layer._state.load, load)
        with torch.no_grad():
            layer(x)
        assert torch.equal(layer._state.load, load)


@case(1, 2)
def forwards_in_flight_count_in_the_loss_of_steps(rank, world):
    """The third micro-batch's loss knows the first two, also if their backward calls came after both forwards."""
    losses = []
    for in_flight in (False, True):
        torch.manual_seed(3)
        layer = MoELayer(**SIZES, aux_loss_coeff=0.5, aux_loss_scope="global_batch", dtype=torch.float64)
        layer.router.register_forward_hook(forward_hook)
        x = torch.randn((3, 6, D), generator=random_of(rank)).double()
        if in_flight:
            (layer(x[0]).sum() + layer(x[1]).sum()).backward()
        else:
            for given in x[:2]:
                layer(given).sum().backward()
        layer(x[2])
        losses.append(layer.report.losses)
    assert torch.equal(*losses) and losses[0][4] > 0


@case(1, 2)
def compiled_steps_count_loads(rank, world):
    """Also without losses, in micro-batches, and not in evaluation."""
    for options in ({}, dict(aux_loss_coeff=0.1)):
        torch._dynamo.reset()
        layer = MoELayer(**SIZES, expert_bias=True, **options)
        layer.experts.register_forward_hook(forward_hook)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for number in (1, 2):
            compiled(torch.randn((6, D), generator=random_of(rank, number))).sum().backward()
            assert layer._state.load.sum() == number * total(6) * SIZES["top_k"]
        with torch.no_grad():
            compiled(torch.randn((6, D)))
        layer.eval()
        compiled(torch.randn((6, D))).sum().backward()
        assert layer._state.load.sum() == 2 * total(6) * SIZES["top_k"]
