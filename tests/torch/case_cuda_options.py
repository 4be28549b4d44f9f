"""MoELayer with options on GPUs: the operator against the same steps in PyTorch, reports without a wait, graphs, and what
trains and saves a layer. The ranks may share a GPU."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case_checkpoint import shared_folder
from case_layer_options import CHOICES, EXPERTS, LOSSES, forward_hook
from cases import case, random_of, use_own_gpu

from crossdock.torch import Checkpoint, MoELayer, clip_grad_norm_, group, set_loss_scale
from crossdock.torch.groups import group_of_one

DEVICE = "cuda"
E, K, D, F, B, L = 8, 4, 64, 96, 2, 64
T = B * L
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)
OPTIONS = dict(
    SIZES, score="sigmoid", expert_bias=True, bias_update_rate=0.01, aux_loss_coeff=0.05, z_loss_coeff=0.01, shared_inner=48
)
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}  # relative norms
# Logits are these values plus the router's bias, exact in every dtype and distinct: all ways to compute them choose alike.
LEVELS = (-1.5, -1.0, -0.75, -0.25, 0.125, 0.5, 1.125, 2.0)


def tokens(rank, step=0, dtype=torch.float32):
    """x [B, L, D] and the gradient of out."""
    generator = random_of(rank, step)
    x, grad_out = (torch.randn((B, L, D), generator=generator) for _ in range(2))
    x[..., :E] = torch.tensor(LEVELS)[torch.rand((B, L, E), generator=generator).argsort(dim=-1)]
    return x.to(DEVICE, dtype).requires_grad_(), grad_out.to(DEVICE, dtype)


def made(ranks=None, **options):
    """A layer whose values depend on the number of an expert and not on the number of ranks."""
    torch.manual_seed(11)
    layer = MoELayer(ranks, **{**SIZES, "device": DEVICE, **options}).validate()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(E, D))
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.arange(E) / 64)
        if layer.expert_bias is not None:
            layer.expert_bias.copy_(torch.arange(E) * 3 % E / 64)
        for bias in (layer.experts.b1, layer.experts.b2):
            for local, expert in enumerate(layer.local_experts if bias is not None else ()):
                bias[local] = torch.randn(bias.shape[1:], generator=random_of(expert, 9)).to(bias)
    return layer


def step(layer, x, grad_out, **keywords):
    """Out and the gradients of x and the parameters."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = layer(x, **keywords)
    out.backward(grad_out)
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def close(name, got, wanted, limit):
    assert got.shape == wanted.shape, f"{name}: {got.shape}, not {wanted.shape}"
    difference, size = (got.double() - wanted.double()).norm().item(), wanted.double().norm().item()
    assert difference <= limit * size, f"{name}: differs by {difference:.1e} of {size:.1e}"  # also if it is NaN


def all_close(got, wanted, limit, text=""):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        close(f"{text} {name}", got[name], value, limit)


def compare(rank, world, dtype, text, **options):
    """The operator against steps: values, gradients, choices and reports."""
    layer, twin = (made(dtype=dtype, **options) for _ in range(2))
    twin.router.register_forward_hook(forward_hook)
    x, grad_out = tokens(rank, dtype=dtype)
    keywords = dict(total_sequences=B * world) if layer.config.aux_coeff("sequence") else {}
    text = f"{text} in {dtype}:"
    all_close(step(layer, x, grad_out, **keywords), step(twin, x, grad_out, **keywords), LIMITS[dtype], text)
    report, other = layer.report, twin.report
    for name in ("expert_ids", "load", "dropped", "rows_per_expert", "rows_per_rank"):
        assert torch.equal(getattr(report, name), getattr(other, name)), f"{text} {name}"
        assert getattr(report, name).device.type == DEVICE
    for name in ("weights", "losses"):
        close(f"{text} {name}", getattr(report, name), getattr(other, name), 1e-4)
    if layer.config.expert_bias:
        assert torch.equal(layer._state.load, twin._state.load)
    return report


@case(1, 2)
def every_choice_equals_the_steps(rank, world):
    use_own_gpu(rank)
    for dtype in LIMITS:
        for name, options in CHOICES.items():
            report = compare(rank, world, dtype, name, **options)
            assert report.load.sum() == world * T * K


@case(1, 2)
def every_loss_equals_the_steps(rank, world):
    use_own_gpu(rank)
    set_loss_scale(1.5)
    try:
        for dtype in LIMITS:
            for name, options in LOSSES.items():
                for more in ({}, dict(max_rows=T * K * world)):
                    report = compare(rank, world, dtype, name, expert_bias=True, **options, **more)
                    assert report.losses[:2].sum() > 0
    finally:
        set_loss_scale(1.0)


@case(1, 2)
def all_experts_equal_the_steps(rank, world):
    use_own_gpu(rank)
    for dtype in LIMITS:
        for name, options in EXPERTS.items():
            more = dict(shared_inner=16 * options["shared_inner"]) if "shared_inner" in options else {}
            report = compare(rank, world, dtype, name, **{"report": True, **options, **more})
            assert name != "drops" or report.dropped.sum() > 0


@case(1, 2)
def padding_and_forced_ids_equal_the_steps(rank, world):
    use_own_gpu(rank)
    x, grad_out = tokens(rank)
    mask = torch.arange(T, device=DEVICE).view(B, L) % 3 == 1
    ids = torch.rand((B, L, E), generator=random_of(rank, 2)).argsort(dim=-1)[..., :K].to(DEVICE)
    for keywords in (dict(padding_mask=mask), dict(forced_ids=ids), dict(padding_mask=mask, forced_ids=ids)):
        layer, twin = made(**OPTIONS), made(**OPTIONS)
        twin.router.register_forward_hook(forward_hook)
        all_close(step(layer, x, grad_out, **keywords), step(twin, x, grad_out, **keywords), LIMITS[torch.float32], str([*keywords]))
        assert torch.equal(layer.report.expert_ids, twin.report.expert_ids)
        assert layer.report.load.sum() == world * K * (T - int(mask.sum()) if "padding_mask" in keywords else T)


@case(1)
def nobody_waits_for_a_step_its_report_or_its_bias(rank, world):
    layer = made(**OPTIONS, dtype=torch.bfloat16, max_rows=T * K, capacity_factor=1.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x, grad_out = tokens(rank, dtype=torch.bfloat16)

    def train():
        layer(x).backward(grad_out)
        clip_grad_norm_(layer, 1.0)
        optimizer.step()
        layer.update_expert_bias()
        report = layer.report
        return [report.expert_ids, report.load, report.dropped, report.rows_per_rank, report.aux_loss, report.z_loss]

    for _ in range(3):
        train()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # 2 s
    found = train()
    done = torch.cuda.Event()
    done.record()
    is_pending = not done.query()
    torch.cuda.synchronize()
    assert is_pending, "the host waited for the GPU"
    assert found[1].sum() == T * K and found[3].tolist() == [T * K] and found[4] > 0


@case(1)
def a_step_with_options_may_be_captured(rank, world):
    """Replays have the results of calls, and add to the load of the expert bias."""
    layer = made(**OPTIONS, dtype=torch.bfloat16, max_rows=T * K)
    static_x, static_grad = tokens(rank, dtype=torch.bfloat16)
    inputs = (static_x, *layer.parameters())

    def run():
        out = layer(static_x)
        return (out.detach(), *torch.autograd.grad(out, inputs, static_grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    report = layer.report
    layer.start_step()
    for number in range(3):
        x, grad_out = tokens(rank, 10 + number, torch.bfloat16)
        with torch.no_grad():
            static_x.copy_(x)
            static_grad.copy_(grad_out)
        graph.replay()
        assert layer._state.load.sum() == (2 * number + 1) * T * K
        got, ids, losses = [tensor.clone() for tensor in captured], report.expert_ids.clone(), report.losses.clone()
        for i, (a, b) in enumerate(zip(got, run())):  # also between replays
            close(f"replay {number}, result {i}", a, b, 1e-3)
        assert torch.equal(ids, layer.report.expert_ids)
        close("losses", losses, layer.report.losses, 1e-12)
    bias, load = layer.expert_bias.clone(), layer._state.load.clone()
    layer.update_expert_bias()
    close("bias", layer.expert_bias, bias + 0.01 * (load.double().mean() - load).sign().float(), 1e-6)
    assert not layer._state.load.any()
    graph.replay()
    assert layer._state.load.sum() == T * K


@case(1, 2)
def an_update_of_the_bias_counts_every_backward(rank, world):
    use_own_gpu(rank)
    for centred in (False, True):
        layer = made(**OPTIONS, bias_update_centred=centred)
        before, load = layer.expert_bias.clone().cpu(), torch.zeros(E, dtype=torch.float64)
        for number in range(2):
            x, grad_out = tokens(rank, number)
            x.data[..., 0] = 3.0  # expert 0 has most routes
            layer(x).backward(grad_out)
            load += layer.report.load.cpu()
            with torch.no_grad():
                layer(x)
        layer.update_expert_bias(0.25)
        update = 0.25 * (load.mean() - load).sign()
        update -= update.mean() if centred else 0.0
        close("bias", layer.expert_bias.cpu(), before + update.float(), 1e-6)
        assert load.sum() == 2 * world * T * K and load[0] == 2 * world * T


@case(1, 2)
def weight_gradients_can_wait(rank, world):
    use_own_gpu(rank)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for delay_dw in (False, True):
            layer = made(**OPTIONS, delay_dw=delay_dw, bias=True, dtype=dtype)
            for number in range(2):
                x, grad_out = tokens(rank, number, dtype)
                layer(x).backward(grad_out)
            if delay_dw:
                assert layer.experts.w1.grad is None and layer.router.weight.grad is not None
                for _ in range(2):
                    layer.backward_dw()
            found.append({name: p.grad for name, p in layer.named_parameters()})
        all_close(found[1], found[0], LIMITS[dtype])


@case(1, 2)
def a_checkpoint_has_what_the_next_step_needs(rank, world):
    use_own_gpu(rank)
    layers = [made(**OPTIONS) for _ in range(2)]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in layers]
    for number in range(2):
        train(layers[0], optimizers[0], rank, number)
    folder, owner = shared_folder(rank)
    dcp.save({"app": Checkpoint(layers[0], optimizers[0])}, checkpoint_id=folder)
    dcp.load({"app": Checkpoint(layers[1], optimizers[1])}, checkpoint_id=folder)
    assert layers[1].expert_bias.device.type == DEVICE and torch.equal(layers[0].expert_bias, layers[1].expert_bias)
    for layer, optimizer in zip(layers, optimizers):
        train(layer, optimizer, rank, 2)
    for (name, a), b in zip(layers[0].named_parameters(), layers[1].parameters()):
        close(name, b.detach(), a.detach(), 1e-5)
    dist.barrier()
    del owner


def train(layer, optimizer, rank, number):
    x, grad_out = tokens(rank, number)
    optimizer.zero_grad()
    layer(x).backward(grad_out)
    for parameter in (*layer.router.parameters(), *layer.shared.parameters()):
        parameter.grad = sum_on_host(parameter.grad)
    optimizer.step()
    layer.update_expert_bias()


def sum_on_host(tensor):
    """Over all ranks."""
    total = tensor.detach().cpu()
    dist.all_reduce(total)
    return total.to(tensor.device)


@case(2)
def two_ranks_share_experts_and_tokens(rank, world):
    """As one rank with all experts."""
    use_own_gpu(rank)
    for dtype in (torch.float32, torch.bfloat16):
        for activation, interleaved in (("swiglu", False), ("geglu", True)):
            options = dict(activation=activation, interleaved=interleaved, aux_loss_coeff=0.1, gradients="summed", dtype=dtype)
            layer, whole = made(etp=2, replicated_over=group(), **options), made(group_of_one(), **options)
            x, grad_out = tokens(0, dtype=dtype)
            got, wanted = (step(one, x, grad_out) for one in (layer, whole))
            got["router.weight"] = sum_on_host(got["router.weight"].float())
            part = slice(rank * F // 2, (rank + 1) * F // 2)
            wanted["experts.w2"] = wanted["experts.w2"][:, :, part]
            w1 = wanted["experts.w1"]
            halves = w1.view(E, F, 2, D)[:, part] if interleaved else w1.view(E, 2, F, D)[:, :, part]
            wanted["experts.w1"] = halves.reshape(E, F, D)
            all_close(got, wanted, LIMITS[dtype], f"{activation} in {dtype}:")


@case(1, 2)
def norms_of_gradients_count_every_expert_once(rank, world):
    use_own_gpu(rank)
    layer = made(**OPTIONS)
    x, grad_out = tokens(rank)
    layer(x).backward(grad_out)
    experts = {id(p) for p in layer.expert_parameters()}
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in layer.parameters():
        if id(parameter) not in experts:
            parameter.grad = sum_on_host(parameter.grad)
        size = parameter.grad.double().square().sum().cpu()
        squares += size if id(parameter) not in experts or world == 1 else sum_on_host(size)
    before = [p.grad.clone() for p in layer.parameters()]
    norm = clip_grad_norm_(layer, 0.5)
    assert norm.device.type == DEVICE
    close("norm", norm.cpu(), squares.sqrt(), 1e-5)
    for parameter, grad in zip(layer.parameters(), before):
        close("clipped", parameter.grad, grad * (0.5 / norm), 1e-5)


@case(1, 2)
def a_grad_scaler_skips_a_step_that_overflows(rank, world):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    use_own_gpu(rank)
    layer = made(**OPTIONS)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    scaler = ShardedGradScaler(DEVICE, init_scale=2.0**60, backoff_factor=2.0**-54)
    set_loss_scale(scaler.get_scale)
    try:
        for number in range(2):
            before = [p.detach().clone() for p in layer.parameters()]
            x, _ = tokens(rank, number)
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = layer(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            layer.update_expert_bias()
            assert layer.expert_bias.isfinite().all()
            for parameter, old in zip(layer.parameters(), before):
                assert parameter.isfinite().all() and torch.equal(parameter, old) == (number == 0)
        assert scaler.get_scale() == 2.0**6
    finally:
        set_loss_scale(1.0)
