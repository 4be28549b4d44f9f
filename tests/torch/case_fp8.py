"""Rows in fp8: their bits, dispatches that send them, gradients, and a training beside bf16."""
import torch
import torch.distributed as dist
from cases import (
    case,
    error_of,
    first_expert,
    raises,
    random_of,
    random_routes,
    same_everywhere,
    scale_by_expert,
    tokens_of,
)
from torch import nn

import crossdock
from crossdock.torch import Dispatcher, dequantise_rows, quantise_rows

E, K, D = 6, 2, 200  # groups of 128 and 72


def rows_of(tokens, generator, width=D, dtype=torch.bfloat16):
    """Rows of different sizes, each with some large values."""
    x = torch.randn((tokens, width), generator=generator) * torch.randn((tokens, 1), generator=generator).exp()
    return (x * (1 + 20 * (torch.rand(x.shape, generator=generator) < 0.02))).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


def deepep_cast(x):
    """DeepEP's per_token_cast_to_fp8."""
    padded = nn.functional.pad(x, (0, -x.shape[1] % 128)).view(x.shape[0], -1, 128)
    amax = padded.abs().float().amax(dim=2).clamp(1e-4)
    values = (padded * (448.0 / amax.unsqueeze(2))).to(torch.float8_e4m3fn)
    return values.view(x.shape[0], -1)[:, : x.shape[1]], amax / 448.0


def pow2_cast(x, group):
    padded = nn.functional.pad(x.float(), (0, -x.shape[1] % group)).view(x.shape[0], -1, group)
    amax = padded.abs().amax(dim=2)
    exponent = torch.where(amax > 0, (amax.double() / 448).log2().ceil().clamp(min=-126), 0.0)
    scale = torch.exp2(exponent).float()
    return (padded / scale[:, :, None]).to(torch.float8_e4m3fn).view(x.shape[0], -1)[:, : x.shape[1]], scale


# ---- Rows ----


@case(1)
def exact_rows_are_those_of_deepep(rank, world):
    for width in (128, 200, 1024):
        for scaling in (1.0, 1e-7):  # below the floor
            x = rows_of(50, random_of(0), width) * scaling
            x[3] = 0
            values, scales = quantise_rows(x, scale="exact", amax_floor=1e-4)
            wanted, wanted_scales = deepep_cast(x)
            assert bits(values) == bits(wanted) and torch.equal(scales, wanted_scales)


@case(1)
def powers_of_two_are_the_smallest_that_fit(rank, world):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for group in (128, 32):
            x = rows_of(50, random_of(1), 200, dtype)
            x[3] = 0
            values, scales = quantise_rows(x, group=group)
            wanted, wanted_scales = pow2_cast(x, group)
            assert bits(values) == bits(wanted)
            assert scales.dtype == (torch.float32 if group == 128 else torch.float8_e8m0fnu)
            assert torch.equal(scales.float(), wanted_scales)
            back = dequantise_rows(values, scales)
            assert back.dtype == torch.bfloat16
            assert torch.equal(back.float(), dequantise_rows(values, scales, torch.float32))  # bf16 rounds nothing


@case(1)
def rows_may_have_any_strides_and_number(rank, world):
    x = rows_of(31, random_of(2))
    assert bits(quantise_rows(x.t().contiguous().t()).values) == bits(quantise_rows(x).values)
    values, scales = quantise_rows(x[:0])
    assert values.shape == (0, D) and scales.shape == (0, 2) and dequantise_rows(values, scales).shape == (0, D)


@case(1)
def wrong_arguments_are_refused(rank, world):
    x = rows_of(2, random_of(3))
    with raises(ValueError, "group must be 128"):
        quantise_rows(x, group=64)
    with raises(ValueError, "scale must be one of"):
        quantise_rows(x, scale="floor")
    with raises(crossdock.Error, 'scale must be "pow2"'):
        quantise_rows(x, group=32, scale="exact")
    with raises(crossdock.Error, "x must be fp32, bf16 or fp16"):
        quantise_rows(x.double())
    with raises(TypeError, "2 dimensions"):
        quantise_rows(x[0])
    with raises(ValueError, "wire must be"):
        Dispatcher(num_experts=E, top_k=K, width=D, wire="int8")
    with raises(ValueError, "needs wire"):
        Dispatcher(num_experts=E, top_k=K, width=D, wire_rows="fp8")


@case(1)
def gradients_do_not_vanish_silently(rank, world):
    x = rows_of(4, random_of(4)).requires_grad_()
    values, scales = quantise_rows(x)
    with raises(RuntimeError, "no gradient passes through quantise_rows"):
        dequantise_rows(values, scales).sum().backward()
    quantise_rows(x.detach())
    with torch.no_grad():
        assert not quantise_rows(x).values.requires_grad


@case(1)
def a_compiled_function_has_the_same_bits(rank, world):
    def function(x):
        values, scales = quantise_rows(x * 2)
        return values, scales, dequantise_rows(values, scales) + 1

    x = rows_of(9, random_of(5))
    for got, wanted in zip(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x)):
        assert bits(got) == bits(wanted)


# ---- Dispatch ----


def make(rank, world, step=0, dtype=torch.bfloat16):
    generator = random_of(rank, step)
    tokens = tokens_of(rank, world)
    weights = torch.rand((tokens, K), generator=generator)
    return rows_of(tokens, generator, dtype=dtype), random_routes(generator, tokens, E, K), weights


def rounded(x):
    return dequantise_rows(*quantise_rows(x), torch.float16 if x.dtype == torch.float16 else torch.bfloat16)


@case(1, 2, 4)
def experts_get_the_rounded_rows(rank, world):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, ids, weights = make(rank, world, dtype=dtype)
        options = dict(num_experts=E, top_k=K, width=D, alignment=8)
        sent = Dispatcher(**options, wire="fp8").dispatch(x, ids, weights)
        wanted = Dispatcher(**options).dispatch(rounded(x), ids, weights)
        assert sent.rows.dtype == wanted.rows.dtype and torch.equal(sent.rows, wanted.rows)
        assert torch.equal(sent.row_weights, wanted.row_weights) and sent.row_scales is None and sent.anchor is None
        assert torch.equal(sent.tokens_per_expert, wanted.tokens_per_expert)
        kept = Dispatcher(**options, wire="fp8", wire_rows="fp8").dispatch(x, ids, weights)
        assert kept.rows.dtype == torch.float8_e4m3fn and kept.row_scales.dtype == torch.float32
        assert torch.equal(dequantise_rows(kept.rows, kept.row_scales, wanted.rows.dtype), wanted.rows)
        assert kept.anchor.shape == wanted.rows.shape and kept.anchor.dtype == wanted.rows.dtype


class Fp8Experts(torch.autograd.Function):
    """The experts of these cases, on rows in fp8."""

    @staticmethod
    def forward(ctx, rows, scales, anchor, counts, first):
        ctx.save_for_backward(counts)
        ctx.first = first
        return scale_by_expert(dequantise_rows(rows, scales), counts, first)

    @staticmethod
    def backward(ctx, grad):
        assert grad.dtype == torch.bfloat16
        return None, None, scale_by_expert(grad, *ctx.saved_tensors, ctx.first), None, None


@case(1, 2, 4)
def backward_is_that_of_bf16(rank, world):
    """Bit for bit: gradients pass straight through and are sent in bf16."""
    first = first_expert(rank, world, E)
    x, ids, weights = make(rank, world)

    def run(x, dispatcher, experts):
        x, factors = x.detach().requires_grad_(), weights.clone().requires_grad_()
        sent = dispatcher.dispatch(x, ids, factors)
        out = dispatcher.combine(experts(sent), sent.handle)
        loss = (out.float() * torch.randn(out.shape, generator=random_of(rank, 9))).sum() + sent.row_weights.square().sum()
        return out.detach(), *torch.autograd.grad(loss, (x, factors))

    def in_bf16(sent):
        return scale_by_expert(sent.rows, sent.tokens_per_expert, first)

    def in_fp8(sent):
        return Fp8Experts.apply(sent.rows, sent.row_scales, sent.anchor, sent.tokens_per_expert, first)

    options = dict(num_experts=E, top_k=K, width=D)
    wanted = run(rounded(x), Dispatcher(**options), in_bf16)
    runs = [
        run(x, Dispatcher(**options, wire="fp8"), in_bf16),
        run(x, Dispatcher(**options, wire="fp8", wire_rows="fp8"), in_fp8),
    ]
    for got in runs:
        for a, b in zip(got, wanted):
            assert a.dtype == b.dtype and torch.equal(a, b)


@case(1, 2)
def wide_tokens_get_wide_gradients(rank, world):
    x, ids, weights = make(rank, world, dtype=torch.float32)
    x.requires_grad_()
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, wire="fp8")
    sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
    dispatcher.combine(sent.rows, sent.handle).float().sum().backward()
    assert x.grad.dtype == torch.float32 and torch.allclose(x.grad, weights.sum(1, keepdim=True).expand(x.shape), rtol=1e-2)


@case(2, 4)
def an_unusable_tensor_is_the_same_error_on_every_rank(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, wire="fp8")
    x, ids, weights = make(0, world)
    for unusable in (x.double(), x.to("meta"), x[0], x.to(torch.int32)):
        error = error_of(lambda: dispatcher.dispatch(unusable if rank == 1 else x, ids, weights))
        same_everywhere(str(error))
        assert error.culprit == 1
    other = Dispatcher(num_experts=E, top_k=K, width=D, wire="fp8" if rank == 0 else None)
    same_everywhere(str(error_of(lambda: other.dispatch(x, ids, weights))))
    assert dispatcher.dispatch(x, ids, weights).rows.shape[1] == D  # the group is usable


@case(1, 2)
def tokens_may_be_quantised_before(rank, world):
    x, ids, weights = make(rank, world)
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, wire="fp8")
    wanted = dispatcher.dispatch(x, ids, weights).rows
    begun = dispatcher.begin_dispatch(quantise_rows(x), ids, weights)
    for sent in (dispatcher.dispatch(quantise_rows(x), ids, weights), begun.finish()):
        assert sent.rows.dtype == torch.float8_e4m3fn
        assert torch.equal(dequantise_rows(sent.rows, sent.row_scales), wanted)
    with raises(crossdock.Error, "begin_dispatch takes the results of quantise_rows"):
        dispatcher.begin_dispatch(x, ids, weights)


@case(1)
def a_compiled_step_has_the_same_gradients(rank, world):
    x, ids, weights = make(0, world)
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D, wire="fp8")

    def step(x):
        sent = dispatcher.dispatch(x, ids, weights, row_weights=False)
        return dispatcher.combine(sent.rows * 2, sent.handle)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = x.clone().requires_grad_()
        out = function(given)
        out.float().square().sum().backward()
        results.append((out.detach(), given.grad))
    for a, b in zip(*results):
        assert torch.equal(a, b)


@case(1)
def a_dispatch_sends_about_half_the_bytes(rank, world):
    x = torch.randn(64, 7168).bfloat16()
    sent = sum(tensor.numel() * tensor.element_size() for tensor in quantise_rows(x))
    assert sent == 64 * (7168 + 56 * 4) and sent / (2 * x.numel()) < 0.516
    planned = [crossdock.plan("deepseek-v3", ranks_per_node=8, tokens=4096, dtype=dtype) for dtype in ("bf16", "fp8_e4m3")]
    for strategy in planned[0]["strategies"]:
        costs = [answer["strategies"][strategy]["dispatch"] for answer in planned]
        total = [sum(value for name, value in cost.items() if name.startswith("bytes_")) for cost in costs]
        assert total[0] > 0 and abs(total[1] / total[0] - sent / (2 * x.numel())) < 1e-3, (strategy, costs)


# ---- Training ----

VOCABULARY, WIDTH, INNER, EXPERTS, LENGTH, STEPS = 48, 256, 128, 4, 32, 200


class Layer(nn.Module):
    """A layer of experts in bf16, and a linear map before it. Equal for every way to send rows."""

    def __init__(self, rank, world, dispatch):
        super().__init__()
        self.dispatch = dispatch
        self.dispatcher = Dispatcher(num_experts=EXPERTS, top_k=2, width=WIDTH, wire="fp8" if dispatch == "fp8" else None)
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        up = torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5
        down = torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5
        own = self.dispatcher.local_experts
        self.up, self.down = nn.Parameter(up[own]), nn.Parameter(down[own])

    def forward(self, tokens):
        """Logits of the token after each pair of tokens."""
        x = self.embedding(tokens)
        x = nn.functional.layer_norm(self.mix(torch.cat((x[:, :-1], x[:, 1:]), dim=2)).reshape(-1, WIDTH), (WIDTH,))
        weights, ids = self.router(x).softmax(-1).topk(2)
        given = x.detach() if self.dispatch == "no gradient" else x
        sent = self.dispatcher.dispatch(given.bfloat16(), ids, weights, row_weights=False)
        parts = sent.rows.split(sent.tokens_per_expert.tolist())
        up, down = self.up.bfloat16(), self.down.bfloat16()
        y = torch.cat([torch.relu(part @ up[e]) @ down[e] for e, part in enumerate(parts)])
        return self.head(x + self.dispatcher.combine(y, sent.handle).float())


def losses(rank, world, dispatch):
    """Of 200 steps that learn a fixed rule: the next token follows from the two before it, with some noise."""
    model = Layer(rank, world, dispatch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rule = torch.randint(VOCABULARY, (VOCABULARY, VOCABULARY), generator=random_of(77))
    own = {id(model.up), id(model.down)}
    found = []
    for step in range(STEPS):
        generator = random_of(rank, 1000 + step)
        tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
        wanted = rule[tokens[:, :-1], tokens[:, 1:]].reshape(-1)
        loss = nn.functional.cross_entropy(model(tokens), wanted)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if id(parameter) not in own:
                dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(float(total) / world)
    return torch.tensor(found).view(-1, 20).mean(1)  # of 20 steps each


@case(2)
def losses_of_200_steps_are_those_of_bf16(rank, world):
    bf16, fp8, broken = (losses(rank, world, dispatch) for dispatch in ("bf16", "fp8", "no gradient"))

    def difference(curve):
        """In parts of the first loss."""
        return float((curve - bf16).abs().max() / bf16[0])

    if rank == 0:
        for name, curve in (("bf16", bf16), ("fp8", fp8), ("without gradients", broken)):
            print(f"losses {name:18}", *(f"{value:.4f}" for value in curve), f"{100 * difference(curve):.2f} %", flush=True)
    assert bf16[-1] < 0.05 * bf16[0]
    assert difference(fp8) < 0.01
    assert difference(broken) > 0.05  # so the limit would notice a backward that is wrong
