"""GroupedExperts and MoELayer on GPUs, in bf16 and fp16, against a plain layer in fp32. The ranks may share a GPU."""
import torch
from cases import case, first_expert, random_of, use_own_gpu

from crossdock.torch import MoELayer

E, K, D, F, T = 8, 2, 64, 96, 512
EMPTY = 3  # an expert that no token chooses
CLOSE = 2e-2  # relative norm of a difference, from rounding to bf16


class Problem:
    """The layer of all ranks, and the tokens of each; identical on every rank."""

    def __init__(self, world, dtype, score="softmax", normalise=True, scale=1.0):
        self.world, self.dtype = world, dtype
        self.options = dict(score=score, normalise=normalise, scale=scale)
        generator = random_of(100)

        def make(*shape):
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to("cuda", dtype)

        self.gate, self.w1, self.w2 = make(E, D), make(E, 2 * F, D), make(E, D, F)
        self.gate[EMPTY, 0] = -100  # and the first value of each token is 1

    def tokens(self, rank, step=0):
        """x and the gradient of out."""
        generator = random_of(rank, step)
        x, grad_out = (torch.randn((T, D), generator=generator).to("cuda", self.dtype) for _ in range(2))
        x[:, 0] = 1
        return x.requires_grad_(), grad_out

    def layer(self, rank, **options):
        made = MoELayer(
            num_experts=E, top_k=K, width=D, inner=F, device="cuda", dtype=self.dtype, **self.options, **options
        )
        first = first_expert(rank, self.world, E)
        last = first + made.dispatcher.num_local_experts
        with torch.no_grad():
            made.router.weight.copy_(self.gate)
            made.experts.w1.copy_(self.w1[first:last])
            made.experts.w2.copy_(self.w2[first:last])
        return made

    def reference(self, x, grad_out):
        """Out and the gradients of x, gate, w1 and w2 of all experts, for these tokens, in fp32."""
        inputs = x, gate, w1, w2 = [
            tensor.detach().float().requires_grad_() for tensor in (x, self.gate, self.w1, self.w2)
        ]
        logits = x @ gate.t()
        scores = logits.softmax(-1) if self.options["score"] == "softmax" else logits.sigmoid()
        weights, ids = scores.topk(K)
        if self.options["normalise"]:
            weights = weights / weights.sum(1, keepdim=True)
        dense = []
        for e in range(E):
            up, linear = (x @ w1[e].t()).chunk(2, dim=1)
            dense.append((torch.nn.functional.silu(up) * linear) @ w2[e].t())
        chosen = torch.stack(dense, dim=1).gather(1, ids[:, :, None].expand(-1, -1, D))
        out = (chosen * weights[:, :, None]).sum(1) * self.options["scale"]
        return out.detach(), torch.autograd.grad(out, inputs, grad_out.float())

    def check(self, rank, layer, step=0):
        x, grad_out = self.tokens(rank, step)
        inputs = (x, layer.router.weight, layer.experts.w1, layer.experts.w2)
        out = layer(x)
        got = torch.autograd.grad(out, inputs, grad_out)
        each = [self.reference(*self.tokens(r, step)) for r in range(self.world)]
        wanted_out, (wanted_x, wanted_gate, _, _) = each[rank]
        close("out", out, wanted_out)
        close("grad_x", got[0], wanted_x)
        close("grad_gate", got[1], wanted_gate)
        first = first_expert(rank, self.world, E)
        local = slice(first, first + layer.dispatcher.num_local_experts)
        for name, grad, i in (("grad_w1", got[2], 2), ("grad_w2", got[3], 3)):
            close(name, grad, sum(gradients[i] for _, gradients in each)[local])
            if local.start <= EMPTY < local.stop:
                assert not grad[EMPTY - first].any(), f"{name}: an expert without rows has a gradient"


def close(name, got, wanted):
    difference = ((got.float() - wanted).norm() / wanted.norm()).item()
    assert difference < CLOSE, f"{name}: differs by {difference:.1e}"  # also if it is NaN


@case(1, 2)
def the_layer_is_one_operator_with_the_references_values(rank, world):
    use_own_gpu(rank)
    for dtype in (torch.bfloat16, torch.float16):
        for options in ({}, {"score": "sigmoid", "scale": 2.5}, {"normalise": False}):
            problem = Problem(world, dtype, **options)
            for dispatch in ({}, {"max_rows": T * K * world}, {"alignment": 8}):
                layer = problem.layer(rank, **dispatch)
                x, _ = problem.tokens(rank)
                assert layer._is_one_operator(x)
                for step in range(2):
                    problem.check(rank, layer, step)


@case(1, 2)
def a_changed_layer_takes_steps_with_the_references_values(rank, world):
    use_own_gpu(rank)
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem(world, dtype)
        for dispatch in ({}, {"max_rows": T * K * world}):
            layer = problem.layer(rank, **dispatch)
            layer.experts.register_forward_hook(lambda *_: None)
            x, _ = problem.tokens(rank)
            assert not layer._is_one_operator(x)
            layer.route = route_in_fp32(layer)
            problem.check(rank, layer)


def route_in_fp32(layer):
    """Logits rounded to bf16 would choose different experts than the reference."""

    def route(x):
        weights, ids = (x.float() @ layer.router.weight.float().t()).softmax(-1).topk(K)
        return ids, weights / weights.sum(1, keepdim=True)

    return route


@case(1, 2)
def a_layer_may_have_no_tokens(rank, world):
    use_own_gpu(rank)
    layer = Problem(world, torch.bfloat16).layer(rank)
    x = torch.zeros((0, D), device="cuda", dtype=torch.bfloat16).requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, D)
    assert all(not parameter.grad.any() for parameter in layer.parameters())


@case(1)
def a_graph_may_be_used_twice(rank, world):
    problem = Problem(world, torch.bfloat16)
    layer = problem.layer(rank)
    x, grad_out = problem.tokens(rank)
    inputs = (x, *layer.parameters())
    out = layer(x)
    first = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, inputs, grad_out)):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(layer(x), out)


@case(1)
def several_micro_batches_may_be_pending_in_several_streams(rank, world):
    problem = Problem(world, torch.bfloat16)
    layer = problem.layer(rank, max_rows=T * K)
    streams = [torch.cuda.Stream() for _ in range(3)]
    steps = [problem.tokens(rank, step) for step in range(3)]
    outs = []
    for stream, (x, _) in zip(streams, steps):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs.append(layer(x))
    for stream, out, (x, grad_out) in reversed(list(zip(streams, outs, steps))):
        with torch.cuda.stream(stream):
            (grad_x,) = torch.autograd.grad(out, x, grad_out)
        stream.synchronize()
        wanted_out, wanted = problem.reference(x, grad_out)
        close("out", out, wanted_out)
        close("grad_x", grad_x, wanted[0])


@case(1)
def with_max_rows_a_step_does_not_wait(rank, world):
    problem = Problem(world, torch.bfloat16)
    layer = problem.layer(rank, max_rows=T * K)
    x, grad_out = problem.tokens(rank)
    for _ in range(3):
        torch.autograd.grad(layer(x), x, grad_out)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # 2 s
    torch.autograd.grad(layer(x), x, grad_out)
    done = torch.cuda.Event()
    done.record()
    is_pending = not done.query()
    torch.cuda.synchronize()
    assert is_pending, "the host waited for the GPU"


@case(1)
def a_step_of_the_layer_may_be_captured(rank, world):
    problem = Problem(world, torch.bfloat16)
    layer = problem.layer(rank, max_rows=T * K)
    static_x, static_grad = problem.tokens(rank)
    inputs = (static_x, *layer.parameters())

    def step():
        out = layer(static_x)
        return (out, *torch.autograd.grad(out, inputs, static_grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for number in range(5):
        x, grad_out = problem.tokens(rank, 10 + number)
        with torch.no_grad():
            static_x.copy_(x)
            static_grad.copy_(grad_out)
        graph.replay()
        got = [tensor.clone() for tensor in captured]
        for i, (a, b) in enumerate(zip(got, step())):  # also between replays
            assert torch.equal(a, b), f"replay {number}: result {i} differs from a call's"
        close("out", got[0], problem.reference(x, grad_out)[0])
