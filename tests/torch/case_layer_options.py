"""MoELayer with the library's options: the operator against the same steps in PyTorch, and its experts against products."""
import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from cases import case, random_of, tokens_of

import crossdock
from crossdock.torch import GroupedExperts, MoELayer, clip_grad_norm_, set_loss_scale

E, K, D, F = 8, 4, 8, 12
SIZES = dict(num_experts=E, top_k=K, width=D, inner=F)


def forward_hook(*_):
    """Takes a layer off the operator."""


def twins(**options):
    """Two layers with equal parameters; the second runs step by step."""
    layers = []
    for _ in range(2):
        torch.manual_seed(11)
        layers.append(MoELayer(**{**SIZES, **options}))
    layers[1].router.register_forward_hook(forward_hook)
    for layer in layers:
        generator = random_of(5)
        with torch.no_grad():
            for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
                if name in ("router.bias", "expert_bias"):
                    value.copy_(torch.randn(value.shape, generator=generator) / 8)
                elif name.endswith(("b1", "b2")) and name.startswith("experts"):
                    for local, expert in enumerate(layer.local_experts):
                        value[local] = torch.randn(value.shape[1:], generator=random_of(expert, 9)).to(value.dtype)
    return layers


def close(got, wanted, limit=1e-6):
    """The largest difference is at most `limit` of the largest value."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    if wanted.numel() > 0:
        difference, size = (got - wanted).abs().max().item(), wanted.abs().max().item()
        assert difference <= limit * max(size, 1e-30), f"differs by {difference:.1e} of {size:.1e}"


def step(layer, x, grad_out, **keywords):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, **keywords)
    out.backward(grad_out)
    return [out, x.grad, *(p.grad for p in layer.parameters())]


def inputs_of(rank, world, dtype=torch.float64, tokens=None):
    tokens = tokens_of(rank, world) if tokens is None else tokens
    generator = random_of(rank)
    return (torch.randn((tokens, D), generator=generator).to(dtype) for _ in range(2))


def compare(layers, x, grad_out, limit=1e-12, **keywords):
    """Values, gradients, losses and choices of both layers; returns the report of the first."""
    got, wanted = (step(layer, x, grad_out, **keywords) for layer in layers)
    names = ["out", "x", *(name for name, _ in layers[0].named_parameters())]
    for name, a, b in zip(names, got, wanted):
        try:
            close(a, b, limit)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    reports = [layer.report for layer in layers]
    for name in ("expert_ids", "load", "dropped", "rows_per_expert", "rows_per_rank"):
        assert torch.equal(*(getattr(report, name) for report in reports)), name
    for name in ("weights", "losses"):
        close(*(getattr(report, name) for report in reports), limit)
    return reports[0]


CHOICES = {
    "sqrt_softplus": dict(score="sqrt_softplus"),
    "after": dict(score="softmax_after_top_k", scale=0.5),
    "groups": dict(num_groups=4, group_top_k=2, score="sigmoid", expert_bias=True),
    "best two": dict(num_groups=2, group_top_k=1, group_score="top_2", normalise=False, router_bias=True),
    "balanced": dict(force_balance=True),
    "bias": dict(expert_bias=True, score="softmax", router_bias=True, scale=2.5),
}


@case(1, 2, 4)
def every_choice_equals_the_steps(rank, world):
    for name, options in CHOICES.items():
        layers = twins(**options, dtype=torch.float64)
        x, grad_out = inputs_of(rank, world)
        report = compare(layers, x, grad_out)
        assert report.expert_ids.shape == (x.shape[0], K) and report.load.sum() == total(x.shape[0]) * K, name
        expert_ids, weights = layers[1].route(x)
        assert torch.equal(report.expert_ids.long(), expert_ids.long()), name
        close(report.weights, weights.detach(), 1e-12)


def total(number):
    number = torch.tensor(number)
    dist.all_reduce(number)
    return number.item()


@case(1, 2)
def a_single_weight_is_normalised_without_options(rank, world):
    layer = MoELayer(**{**SIZES, "top_k": 1}, scale=0.5, dtype=torch.float64)
    x, _ = inputs_of(rank, world)
    ids, weights = layer.route(x)
    assert weights.equal(torch.full((x.shape[0], 1), 0.5, dtype=torch.float64))
    out = layer(x)
    mask = torch.arange(x.shape[0]) % 2 == 1
    assert layer(x, forced_ids=ids).equal(out)
    assert layer(x, padding_mask=mask).equal(torch.where(mask[:, None], 0.0, out))


LOSSES = {
    "batch": dict(aux_loss_coeff=0.3),
    "sequence": dict(aux_loss_coeff=0.3, aux_loss_scope="sequence", score="sigmoid"),
    "global": dict(aux_loss_coeff=0.3, aux_loss_scope="global_batch"),
    "all": dict(aux_loss_coeffs={"batch": 0.2, "sequence": 0.3, "global_batch": 0.4}, z_loss_coeff=0.1),
    "z": dict(z_loss_coeff=0.5, gradients="summed"),
}


@case(1, 2, 4)
def every_loss_reaches_the_gradients(rank, world):
    """In two micro-batches, of which the second has padding, under a loss scale."""
    set_loss_scale(lambda: 1.5)
    try:
        for options in LOSSES.values():
            layers = twins(**options, expert_bias=True, dtype=torch.float64)
            without = twins(expert_bias=True, dtype=torch.float64)[0]
            for number in range(2):
                x, grad_out = inputs_of(rank + 10 * number, world, tokens=3 + rank if number or rank < 3 else 0)
                mask = torch.arange(x.shape[0]) % 3 == 1 if number else None
                ids = torch.arange(x.shape[0]) % 2
                keywords = dict(padding_mask=mask, sequence_ids=ids, num_sequences=2)
                report = compare(layers, x, grad_out, **keywords)
                assert report.aux_loss >= 0 and torch.isclose(report.losses[2:].sum(), report.losses[0])
                plain = step(without, x, grad_out, **keywords)
                if x.shape[0]:
                    assert report.losses[:2].sum() > 0
                    assert not torch.allclose(plain[2], layers[0].router.weight.grad)
            assert torch.equal(layers[0]._state.load, layers[1]._state.load)
            bias = layers[0].expert_bias.clone()
            for layer in layers:
                layer.update_expert_bias(0.25)
            assert torch.equal(layers[0].expert_bias, layers[1].expert_bias) and not torch.equal(bias, layers[0].expert_bias)
            assert not layers[0]._state.load.any()
    finally:
        set_loss_scale(1.0)


@case(1, 2)
def jitter_equals_the_steps(rank, world):
    """Its factors follow from seed, token id and column, also in the gradients."""
    jitter, options = 0.25, dict(jitter=0.25, aux_loss_coeff=0.1, score="sigmoid")
    x, grad_out = inputs_of(rank, world, tokens=200)
    order = torch.randperm(x.shape[0], generator=random_of(rank, 4))
    ids = torch.arange(x.shape[0]) + 1000 * rank + 2**40

    def seeded(layer, order, **keywords):
        torch.manual_seed(17)  # the same on every rank
        found = step(layer, x[order], grad_out[order], **keywords)
        return found, layer.report

    straight, seen = torch.arange(x.shape[0]), []
    for keywords in ({}, dict(token_ids=ids), dict(padding_mask=ids % 5 == 1)):
        layers = twins(**options, dtype=torch.float64)
        layers[1].router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        (got, report), (wanted, other) = (seeded(layer, straight, **keywords) for layer in layers)
        for a, b in zip(got, wanted):
            close(a, b, 1e-12)
        assert torch.equal(report.expert_ids, other.expert_ids)
        close(report.losses, other.losses, 1e-12)
        unseeded = step(layers[0], x, grad_out, **keywords)
        assert not torch.equal(unseeded[0], got[0])
        if "token_ids" in keywords:
            found, _ = seeded(layers[0], order, token_ids=ids[order])
            for i in (0, 1):
                close(found[i], got[i][order], 1e-12)
    factors = [(inputs / x) for inputs in seen]
    assert all(((one >= 1 - jitter - 1e-12) & (one < 1 + jitter + 1e-12)).all() for one in factors)
    assert all(one.min() < 0.76 and one.max() > 1.24 and abs(one.mean() - 1) < 0.01 for one in factors)
    everyone = [None] * world
    dist.all_gather_object(everyone, [one.tolist() for one in factors[:2]])
    assert len({str(one) for those in everyone for one in those}) == 2 * world

    for layer in twins(jitter=jitter, score="sigmoid", dtype=torch.float64):
        y, shift = x[:3].clone().requires_grad_(), torch.tensor([0.0, 0.0, 1e-6] + [0.0] * (D - 3))
        ends = []
        for sign in (1, -1):
            torch.manual_seed(17)
            ends.append(layer(y + sign * shift).sum())
        torch.manual_seed(17)
        (grad,) = torch.autograd.grad(layer(y).sum(), y)
        close((ends[0] - ends[1]) / 2e-6, grad[:, 2].sum(), 1e-6)


EXPERTS = {
    "geglu": dict(activation="geglu", interleaved=True),
    "clamped": dict(activation="clamped_swiglu", limit=0.5, bias=True),
    "limited": dict(activation="limited_swiglu", interleaved=True, limit=0.5, shared_inner=3),
    "geglu tanh": dict(activation="geglu_tanh"),
    "gelu": dict(activation="gelu", bias=True, recompute=True),
    "tanh": dict(activation="gelu_tanh", weights_in="experts", bias=True),
    "squared": dict(activation="squared_relu", shared_inner=5),
    "shared": dict(shared_inner=6, overlap_shared=False, bias=True),
    "chunks": dict(overlap_chunks=2, shared_inner=3, weights_in="experts"),
    "drops": dict(capacity_factor=0.75, report=True),
}


@case(1, 2, 4)
def all_experts_equal_the_steps(rank, world):
    for name, options in EXPERTS.items():
        layers = twins(**{"report": True, **options}, dtype=torch.float64)
        x, grad_out = inputs_of(rank, world)
        report = compare(layers, x, grad_out)
        if name == "drops":
            assert (report.dropped.sum() > 0) == (x.shape[0] > 0)
        kept = report.rows_per_expert.sum().clone()
        dropped = report.dropped.sum().clone()
        for value in (kept, dropped):
            dist.all_reduce(value)
        assert kept + dropped == total(x.shape[0]) * K == report.rows_per_rank.sum()


MOST_ROWS = 4 * 16 * K  # of all ranks
ROWS = {
    "padded": dict(capacity_factor=4.0, capacity_tokens=16, pad_to_capacity=True),
    "sums": dict(partial_sums="fp32"),
    "no empty segments": dict(keep_empty_segments=True),
    "routes": dict(max_routes_per_token=K),
    "direct": dict(strategy="direct"),
    "alltoall": dict(strategy="alltoall"),
    "allgather": dict(strategy="allgather"),
    "hierarchical": dict(strategy="hierarchical"),
    "copies": dict(copies="per_rank"),
    "aligned": dict(alignment=16),
    "limited": dict(max_rows=MOST_ROWS),
    "several": dict(alignment=8, max_rows=2 * MOST_ROWS, keep_empty_segments=True, copies="per_route", partial_sums=True),
}


@case(1, 2, 4)
def options_of_rows_change_no_value(rank, world):
    """Against a layer without them: whole and step by step, with and without other options. One expert has no rows."""
    x, grad_out = inputs_of(rank, world)
    x[:, 0] = 4.0
    for more in ({}, dict(expert_bias=True, shared_inner=3, aux_loss_coeff=0.1, weights_in="experts")):
        default, _ = twins(**more, dtype=torch.float64)
        gate = default.router.weight.detach().clone()
        gate[3] = torch.tensor([-100.0] + [0.0] * (D - 1))
        results = []
        for options in ({}, *ROWS.values()):
            for layer in twins(**more, **options, dtype=torch.float64):
                layer.validate()
                layer.router.weight.data.copy_(gate)
                if layer.expert_bias is not None:
                    layer.expert_bias[3] = -10.0
                results.append((options, step(layer, x, grad_out), layer.report))
        _, wanted, report = results[0]
        for options, got, other in results[1:]:
            for a, b in zip(got, wanted):
                close(a, b, 1e-12)
            if more:
                assert torch.equal(other.expert_ids, report.expert_ids) and torch.equal(other.load, report.load), options
                assert not other.dropped.any() and other.load[3] == 0, options


@case(1, 2)
def sums_in_the_dtype_of_rows_are_rounded_once_more(rank, world):
    x, grad_out = inputs_of(rank, world, torch.bfloat16)
    layers = [twins(report=True, dtype=torch.bfloat16, **options)[0] for options in ({}, dict(partial_sums="rows"))]
    for a, b in zip(*(step(layer, x, grad_out) for layer in layers)):
        close(a.float(), b.float(), 0.05)


@case(1, 2)
def experts_may_have_another_dtype_than_the_tokens(rank, world):
    layers = twins(aux_loss_coeff=0.1, shared_inner=3)
    for layer in layers:
        layer.router.bfloat16()
    x, grad_out = inputs_of(rank, world, torch.bfloat16)
    got, wanted = (step(layer, x, grad_out) for layer in layers)
    for (name, parameter), grad, other in zip(layers[0].named_parameters(), got[2:], wanted[2:]):
        assert grad.dtype == parameter.dtype == (torch.bfloat16 if name == "router.weight" else torch.float32)
        close(grad.float(), other.float(), 0.05)


@case(2)
def a_report_has_every_rank_and_only_its_own_forward(rank, world):
    for layer in twins(placement=[0] * E, report=True):
        layer(torch.ones(3, D))
        assert layer.report.rows_per_rank.tolist() == [world * 3 * K, 0]
    layer = MoELayer(**SIZES)
    layer(torch.ones(3, D), padding_mask=torch.zeros(3, dtype=torch.bool))
    assert layer.report.load.sum() == world * 3 * K
    layer(torch.ones(3, D))
    assert layer.report is None


@case(1, 2)
def score_normalise_and_scale_can_be_changed(rank, world):
    changes = dict(score="sigmoid", normalise=False, scale=numpy.float32(0.5))
    for options in ({}, dict(aux_loss_coeff=numpy.float64(0.1))):
        for layer in twins(**options, dtype=torch.float64):
            layer(torch.ones((1, D), dtype=torch.float64))
            for name, value in changes.items():
                setattr(layer, name, value)
            wanted = twins(**options, **changes, dtype=torch.float64)[0].validate()
            x, _ = inputs_of(rank, world)
            close(layer(x), wanted(x), 1e-12)


@case(1, 2)
def the_default_device_changes_nothing(rank, world):
    if not hasattr(torch, "set_default_device"):  # torch 1.13
        return
    layer = twins(jitter=0.1, capacity_factor=0.75, shared_inner=3)[0]
    x, grad_out = inputs_of(rank, world, torch.float32)
    try:
        torch.set_default_device("meta")
        found = step(layer, x, grad_out)
        clip_grad_norm_(layer, 1.0)
    finally:
        torch.set_default_device(None)
    report = layer.report
    tensors = [*found, report.losses, report.dropped, report.expert_ids, report.rows_per_rank]
    assert all(tensor.device.type == "cpu" for tensor in tensors)


@case(1, 2)
def given_experts_keep_their_options(rank, world):
    for options in (dict(activation="geglu", bias=True), dict(interleaved=True), dict(weights_in="experts")):
        for more in ({}, dict(aux_loss_coeff=0.1, report=True)):
            wanted, _ = twins(**options, **more, dtype=torch.float64)
            more = dict(more, weights_in=options.get("weights_in", "combine"), inner=None)
            given = MoELayer(**{**SIZES, **more}, experts=wanted.experts, dtype=torch.float64).validate()
            given.router = wanted.router
            x, grad_out = inputs_of(rank, world)
            for mask in (None, torch.arange(x.shape[0]) % 2 == 1):
                steps = (step(layer, x, grad_out, padding_mask=mask) for layer in (given, wanted))
                for a, b in zip(*([t.clone() for t in found] for found in steps)):
                    close(a, b, 1e-12)


@case(1, 2, 4)
def values_that_are_not_finite_propagate(rank, world):
    """An infinite or NaN token spoils its own output and gradient and those of its experts; the others are as with any other token
    that has its routes. So does a gradient of out."""
    x, grad_out = inputs_of(rank, world, tokens=5)
    ids = torch.rand((5, E), generator=random_of(rank, 3)).argsort(dim=1)[:, :K]
    others = torch.tensor([0, 1, 3, 4])
    for options in ({}, dict(expert_bias=True), dict(shared_inner=3, bias=True), dict(capacity_factor=2.0, report=True)):
        for layer in twins(**options, dtype=torch.float64):
            forced = dict(forced_ids=ids) if options else {}
            wanted = step(layer, x, grad_out, **forced)
            wanted = [value.clone() for value in wanted]
            for bad, where in ((torch.inf, "x"), (torch.nan, "x"), (torch.inf, "grad_out")):
                inputs = {"x": x.clone(), "grad_out": grad_out.clone()}
                if rank == 0:
                    inputs[where][2, 0] = bad
                got = step(layer, **inputs, **forced)
                for i, (a, b) in enumerate(zip(got[:2], wanted[:2])):
                    close(a[others], b[others], 1e-12)
                    is_spoilt = rank == 0 and (i == 1 or where == "x")
                    assert a[2].isfinite().all() != is_spoilt, (options, bad, where, i)
                experts = torch.cat([p.grad.flatten(1) for p in layer.expert_parameters()], dim=1)
                spoilt = torch.zeros(E, dtype=torch.bool)
                if rank == 0:
                    spoilt[(ids if forced else layer.route(inputs["x"])[0])[2]] = True
                assert layer.report is None or layer.report.load.sum() == world * 5 * K
                spoilt = spoilt.int()
                dist.all_reduce(spoilt)
                own = spoilt.bool()[layer.local_experts]
                assert torch.equal(~experts.isfinite().all(dim=1), own), (options, bad, where)


@case(1, 2)
def transposed_experts_have_the_same_values(rank, world):
    """Alone, as shards, and as the experts of a layer."""
    for options in (dict(), dict(activation="geglu", interleaved=True, bias=True, shard=(1, 2)), dict(activation="gelu")):
        made = []
        for transposed in (False, True):
            torch.manual_seed(3)
            made.append(GroupedExperts(3, D, F, transposed=transposed, dtype=torch.float64, **options))
        plain, other = made
        assert torch.equal(plain.w1.mT, other.w1) and torch.equal(plain.w2.mT, other.w2) and "transposed=True" in repr(other)
        rows, counts = torch.randn((6, D), generator=random_of(rank)).double(), torch.tensor([1, 0, 5])
        outs = [experts(rows, counts) for experts in made]
        close(outs[1], outs[0], 1e-12)
        for out in outs:
            out.square().sum().backward()
        for (name, a), b in zip(other.named_parameters(), plain.parameters()):
            close(a.grad, b.grad.mT if name.startswith("w") else b.grad, 1e-12)
    x, grad_out = inputs_of(rank, world)
    layers = twins(report=True, dtype=torch.float64)
    numbers = dict(expert_ids=layers[0].local_experts, num_experts=E, transposed=True, dtype=torch.float64)
    experts = GroupedExperts(len(layers[0].local_experts), D, F, **numbers)
    layer = MoELayer(**{**SIZES, "inner": None}, experts=experts, report=True, dtype=torch.float64)
    layer.router = layers[0].router
    for name in ("w1", "w2"):
        getattr(experts, name).data.copy_(getattr(layers[0].experts, name).mT)
    for a, b in zip(step(layer, x, grad_out)[:2], step(layers[0], x, grad_out)[:2]):
        close(a, b, 1e-12)


ACTIVATIONS = {
    "swiglu": lambda gate, linear: functional.silu(gate) * linear,
    "clamped_swiglu": lambda gate, linear: clamped(gate.clamp(max=0.5), linear.clamp(-0.5, 0.5)),
    "geglu": lambda gate, linear: functional.gelu(gate) * linear,
    "geglu_tanh": lambda gate, linear: functional.gelu(gate, approximate="tanh") * linear,
    "limited_swiglu": lambda gate, linear: functional.silu(gate.clamp(max=0.5)) * linear.clamp(-0.5, 0.5),
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "squared_relu": lambda h: functional.relu(h).square(),
}


def clamped(gate, linear):
    return gate * (1.702 * gate).sigmoid() * (linear + 1)


@case(1)
def grouped_experts_with_options_equal_products(rank, world):
    """One expert has no rows; the last rows belong to no expert."""
    counts, rows_of = torch.tensor([4, 0, 3]), [4, 0, 3, 2]
    for activation in crossdock._experts.ACTIVATIONS:
        function = ACTIVATIONS[activation]
        is_gated = activation.endswith("swiglu") or activation.startswith("geglu")
        for interleaved in (False, True)[: 1 + is_gated]:
            for weights_in, recompute, bias in (("combine", True, True), ("experts", False, True), ("experts", True, False)):
                torch.manual_seed(2)
                options = dict(activation=activation, interleaved=interleaved, bias=bias, limit=0.5, dtype=torch.float64)
                experts = GroupedExperts(3, D, F, weights_in=weights_in, recompute=recompute, **options)
                for value in (experts.b1, experts.b2) if bias else ():
                    torch.nn.init.normal_(value)
                rows = torch.randn((9, D), dtype=torch.float64).requires_grad_()
                weights = torch.rand(9, dtype=torch.float64).requires_grad_()
                parts = []
                for e, x in enumerate(rows.split(rows_of)[:3]):
                    hidden = x @ experts.w1[e].t() + (experts.b1[e] if bias else 0)
                    if is_gated:
                        halves = (hidden[:, 0::2], hidden[:, 1::2]) if interleaved else hidden.chunk(2, dim=1)
                        active = function(*halves)
                    else:
                        active = function(hidden)
                    y = active @ experts.w2[e].t() + (experts.b2[e] if bias else 0)
                    parts.append(y * weights.split(rows_of)[e][:, None] if weights_in == "experts" else y)
                wanted = torch.cat([*parts, torch.zeros(2, D, dtype=torch.float64)])
                got = experts(rows, counts, *([weights] if weights_in == "experts" else []))
                inputs = [rows, *experts.parameters(), *([weights] if weights_in == "experts" else [])]
                direction = torch.randn(9, D, dtype=torch.float64)
                close(got, wanted, 1e-12)
                for a, b in zip(torch.autograd.grad(got, inputs, direction), torch.autograd.grad(wanted, inputs, direction)):
                    close(a, b, 1e-12)
