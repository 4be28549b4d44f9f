#!/usr/bin/env python3
"""Compares a whole layer with PyTorch's on one GPU, in one process, taking turns.

    cmake --preset python-cuda && cmake --build --preset python-cuda
    PYTHONPATH=python python3 bench/compare_torch.py [--short] [--shapes layer-qwen3 ...] [--json FILE]

The layer: softmax router with normalised top-k weights, SwiGLU experts, weighted sum; bf16, one rank. PyTorch runs it with
torch._grouped_mm in two variants, eager and compiled; the faster one counts. Crossdock runs its layer as a CUDA graph, as calls
of the Python package, and as crossdock.torch.MoELayer. Outputs and the gradients of x, gate, w1 and w2 (bf16 on both sides,
except the library's gate gradient in fp32) are checked against each other before anything is timed.

What options cost: MoELayer with losses, biases and shared experts ("all options") against MoELayer without options plus the same
shared experts. The ratio should be at most 1.03. --short measures all shapes in a minute, without torch.compile.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as functional

import crossdock
from crossdock.torch import GroupedExperts, MoELayer
from crossdock.torch.groups import group_of_one
from crossdock.torch.tensors import view_of

SHAPES = {  # T, D, F, K, E
    "layer-qwen3": (8192, 2048, 768, 8, 128),
    "layer-gptoss": (4096, 2880, 2880, 4, 32),
    "layer-deepseek": (4096, 7168, 2048, 8, 32),
}
GRADIENTS = ("grad_x", "grad_gate", "grad_w1", "grad_w2")
CALLS, UNTIMED_CALLS, WARM_UPS = 4, 2, 3
MOST_DIFFERENCE = 2e-2  # relative norm, from rounding to bf16
PLAIN, ALL_OPTIONS = "crossdock.torch.MoELayer", "crossdock.torch.MoELayer, all options"
WITH_SHARED = PLAIN + " + shared"
OPTIONS = dict(aux_loss_coeff=1e-3, z_loss_coeff=1e-4, expert_bias=True, router_bias=True)  # too small to change gradients


class Problem:
    """The tensors of a shape.

    The gate reads off the first E values of a token, a permutation of E numbers that bf16 represents: logits are exact and
    distinct, so every implementation chooses the same experts. Its zeros do not change any time.
    """

    def __init__(self, T, D, F, K, E, device="cuda"):
        self.T, self.D, self.F, self.K, self.E = T, D, F, K, E
        torch.manual_seed(0)

        def make(*shape, scale=1.0):
            return torch.randn(shape, device=device, dtype=torch.bfloat16) * scale

        self.x, self.grad_out = make(T, D), make(T, D)
        levels = (torch.arange(E, device=device) - E / 2) * (4 / E)
        self.x[:, :E] = levels[torch.rand((T, E), device=device).argsort(dim=1)].bfloat16()
        self.gate = torch.eye(E, D, device=device, dtype=torch.bfloat16)
        self.w1, self.w2 = make(E, 2 * F, D, scale=D**-0.5), make(E, D, F, scale=F**-0.5)
        self.inputs = [self.x, self.gate, self.w1, self.w2]
        for tensor in self.inputs:
            tensor.requires_grad_()


# ---- PyTorch ----


def rows_of(problem, x, gate):
    """Rows by expert, their order among the routes, the ends of the experts and the weights [T, K]."""
    scores = functional.linear(x, gate).float().softmax(dim=-1)
    weights, ids = scores.topk(problem.K, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(problem.E).scatter_add(0, flat, torch.ones_like(flat))
    return x.index_select(0, order // problem.K), order, counts.cumsum(0, dtype=torch.int32), weights


def experts(rows, w1, w2, ends, weights):
    """Weights are applied to the activations, which are narrower than the results."""
    gate, linear = torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
    return torch._grouped_mm(functional.silu(gate) * linear * weights, w2.transpose(1, 2), offs=ends)


def layer_with_index_add(problem, x, gate, w1, w2):
    rows, order, ends, weights = rows_of(problem, x, gate)
    y = experts(rows, w1, w2, ends, weights.flatten()[order, None].to(rows.dtype))
    return torch.zeros_like(x).index_add(0, order // problem.K, y)


def layer_with_gather(problem, x, gate, w1, w2):
    rows, order, ends, weights = rows_of(problem, x, gate)
    y = experts(rows, w1, w2, ends, weights.flatten()[order, None].to(rows.dtype))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return y.index_select(0, place).view(problem.T, problem.K, problem.D).sum(dim=1)


def of_torch(problem, function):
    """(forward, forward and backward), functions that return their results."""

    def forward():
        with torch.no_grad():
            return [function(problem, *problem.inputs)]

    def step():
        out = function(problem, *problem.inputs)
        return [out, *torch.autograd.grad(out, problem.inputs, problem.grad_out)]

    return forward, step


# ---- Crossdock ----


def layer_of(problem, **options):
    layer = MoELayer(
        num_experts=problem.E,
        top_k=problem.K,
        width=problem.D,
        inner=problem.F,
        device=problem.x.device,
        dtype=torch.bfloat16,
        max_rows=problem.T * problem.K,
        **options,
    )
    layer.router.weight, layer.experts.w1, layer.experts.w2 = map(torch.nn.Parameter, problem.inputs[1:])
    if layer.router.bias is not None:
        torch.nn.init.zeros_(layer.router.bias)
    return layer


def of_module(problem, call, *modules):
    """call(x) -> out, through these modules."""
    own = {id(p): p for module in modules for p in module.parameters()}
    first = [modules[0].router.weight, modules[0].experts.w1, modules[0].experts.w2]
    for parameter in first:
        del own[id(parameter)]
    inputs = [problem.x, *first, *own.values()]

    def forward():
        with torch.no_grad():
            return [call(problem.x)]

    def step():
        out = call(problem.x)
        return [out, *torch.autograd.grad(out, inputs, problem.grad_out)[: len(GRADIENTS)]]

    return forward, step


def with_shared_experts(problem):
    """A layer without options plus shared experts, and a layer with all options, whose shared experts are the same."""
    torch.manual_seed(1)
    shared = GroupedExperts(1, problem.D, problem.F, device=problem.x.device, dtype=torch.bfloat16)
    counts = torch.full((1,), problem.T, dtype=torch.int64, device=problem.x.device)
    plain, full = layer_of(problem), layer_of(problem, shared_inner=problem.F, **OPTIONS)
    full.shared.w1, full.shared.w2 = (torch.nn.Parameter(p.detach()) for p in (shared.w1, shared.w2))
    return {
        WITH_SHARED: of_module(problem, lambda x: plain(x) + shared(x, counts), plain, shared),
        ALL_OPTIONS: of_module(problem, full, full),
    }


def of_library(problem, keep, view):
    """Calls in torch's current stream. `keep` receives what must outlive a graph of them; `view` makes arguments."""
    layer = crossdock.Layer(
        group_of_one(),
        num_experts=problem.E,
        top_k=problem.K,
        width=problem.D,
        inner=problem.F,
        dtype="bf16",
        router={"normalise": True},
        dispatch={"max_rows": problem.T * problem.K},
    )
    layer.set_stream(torch.cuda.current_stream().cuda_stream)
    x, gate, w1, w2 = (tensor.detach() for tensor in problem.inputs)
    weights = crossdock.LayerWeights(view(gate), crossdock.ExpertWeights(view(w1), view(w2)))
    out, grad_x, grad_w1, grad_w2 = map(torch.empty_like, (x, x, w1, w2))
    grad_gate = torch.empty(gate.shape, device=gate.device)
    grads = crossdock.LayerGradients(view(grad_gate), crossdock.ExpertWeights(view(grad_w1), view(grad_w2)))
    given, given_grad_out, outputs = view(x), view(problem.grad_out), (view(out), view(grad_x))
    keep.append(layer)

    def forward():
        layer.forward(given, weights, out=outputs[0], save=False)
        return [out]

    def step():
        saved = layer.forward(given, weights, out=outputs[0]).saved
        layer.backward(given, weights, given_grad_out, saved, grads, grad_x=outputs[1])
        if torch.cuda.is_current_stream_capturing():
            keep.append(saved)
        return [out, grad_x, grad_gate, grad_w1, grad_w2]

    return forward, step


def as_graphs(calls):
    """The calls as replays of CUDA graphs."""

    def captured(call):
        for _ in range(WARM_UPS):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            results = call()

        def replay():
            graph.replay()
            return results

        return replay

    return tuple(map(captured, calls))


def candidates(problem, options, keep):
    """name -> (forward, forward and backward)."""
    variants = {"index_add": layer_with_index_add, "gather": layer_with_gather}
    found = {f"torch eager, {name}": of_torch(problem, function) for name, function in variants.items()}
    if not options.no_compile:
        for name, function in variants.items():
            found[f"torch compiled, {name}"] = of_torch(problem, torch.compile(function, dynamic=False))
    found["crossdock graph"] = as_graphs(of_library(problem, keep, view_of))
    found["crossdock calls"] = of_library(problem, keep, lambda tensor: tensor)  # through DLPack
    plain = layer_of(problem)
    found[PLAIN] = of_module(problem, plain, plain)
    return found


# ---- Checks and times ----


def difference(got, wanted):
    """Relative norm, in parts to save memory."""
    squares = [0.0, 0.0]
    for part, reference in zip(got.flatten().split(1 << 27), wanted.flatten().split(1 << 27)):
        squares[0] += (part.float() - reference.float()).double().square().sum().item()
        squares[1] += reference.double().square().sum().item()
    return (squares[0] / squares[1]) ** 0.5


def check(shape, found):
    """Checks that every candidate has the results of the first."""
    (first, calls), *others = found.items()
    wanted = [tensor.detach().clone() for tensor in calls[1]()]
    for name, (forward, step) in [(first, calls), *others]:
        differences = [difference(forward()[0], wanted[0])]
        differences += [difference(got, want) for got, want in zip(step(), wanted)]
        for what, value in zip(("forward alone", "out", *GRADIENTS), differences):
            if not value < MOST_DIFFERENCE:  # also if it is NaN
                raise SystemExit(f"{shape}: {what} of {name} differs from {first} by {value:.1e}")
        print(f"{shape}: {name}: differs by at most {max(differences):.1e}", flush=True)


def time_by_turns(calls, rounds, pause):
    """Median milliseconds per call of each. The GPU rests before a turn, since sustained products lower its clock, and
    the first calls of a turn, which raise the clock again, are not timed."""
    times = [[] for _ in calls]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(WARM_UPS + rounds):
        for call, taken in zip(calls, times):
            torch.cuda.synchronize()
            time.sleep(pause)
            for _ in range(UNTIMED_CALLS):
                call()
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            if turn >= WARM_UPS:
                taken.append(begin.elapsed_time(end) / CALLS)
    return [statistics.median(taken) for taken in times]


def best(times, kind):
    return min((ms for name, ms in times.items() if name.startswith(f"torch {kind}")), default=float("nan"))


def compare(shape, options):
    problem, keep = Problem(*SHAPES[shape]), []
    found, shared = candidates(problem, options, keep), with_shared_experts(problem)
    for same in (found, shared):
        check(shape, same)
    found.update(shared)
    results = []
    for i, what in enumerate(("forward", "forward + backward")):
        times = dict(zip(found, time_by_turns([calls[i] for calls in found.values()], options.rounds, options.pause)))
        eager, compiled = best(times, "eager"), best(times, "compiled")
        for name, ms in times.items():
            result = {"shape": shape, "what": what, "candidate": name, "ms": ms}
            ratios = ""
            if name.startswith("crossdock") and name not in shared:
                result.update(of_eager=eager / ms, of_compiled=compiled / ms)
                ratios = f"  {eager / ms:.2f} x eager, {compiled / ms:.2f} x compiled"
            elif name == ALL_OPTIONS:
                result.update(of_plain=ms / times[WITH_SHARED])
                ratios = f"  {ms / times[WITH_SHARED]:.3f} x the time without options"
            results.append(result)
            print(f"{shape:15} {what:19} {name:37} {ms:7.3f} ms{ratios}", flush=True)
    return results


def profile(shape):
    """The kernels of a forward and backward, replayed as one graph."""
    problem, keep = Problem(*SHAPES[shape]), []
    _, step = as_graphs(of_library(problem, keep, view_of))
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    events = recorded.key_averages()
    launches = sum(event.count for event in events if event.key == "cudaGraphLaunch")
    kernels = sorted((event for event in events if event.self_device_time_total > 0), key=lambda event: -event.self_device_time_total)
    print(f"{shape}: {launches} cudaGraphLaunch, {sum(event.count for event in kernels)} kernels")
    for event in kernels:
        print(f"  {event.self_device_time_total:9.1f} us {event.count:3}  {event.key[:120]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of rest before each turn (0.05)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--short", action="store_true", help="5 rounds without torch.compile: under a minute for all shapes")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one replay of Crossdock's graph instead")
    parser.add_argument("--json", help="file for all times")
    options = parser.parse_args()
    if options.short:
        options.rounds, options.no_compile = 5, True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, crossdock {crossdock.__version__}")
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for shape in options.shapes:
            if options.profile:
                profile(shape)
            else:
                results += compare(shape, options)
            torch.compiler.reset()
            torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
