#!/usr/bin/env python3
"""Compares implementations of transformers' experts modules in one process, taking turns.

    PYTHONPATH=python python3 bench/compare_transformers.py [--tokens 1 16 128 4096] [--divide 4] [--dtype fp32] [--json FILE]

Modules are those of transformers with the widths of published models, divided by --divide (default: 1 on a GPU, 8 on a CPU).
Forward runs without gradients. Training is forward and backward, with the gradients of tokens, weights and parameters; it runs
with --training-from tokens or more. Every result is checked against grouped_mm's first.

A time is that of one call. A round makes as many calls in a row as take --round-ms, at most 20; the median of --rounds counts.
On a GPU a round lies between two CUDA events and includes whatever the host does in the calls, so with few tokens the host
often sets the time. What does not fit into the GPU's memory is left out, with a note.

On a CPU, set OMP_NUM_THREADS to the number of cores; all implementations use as many threads.
"""
import argparse
import gc
import importlib
import json
import statistics
import time
import types

import torch

import crossdock.transformers

MODELS = {  # module, class, E, K, D, F
    "Qwen3-30B-A3B": ("qwen3_moe", "Qwen3MoeExperts", 128, 8, 2048, 768),
    "gpt-oss-20b": ("gpt_oss", "GptOssExperts", 32, 4, 2880, 2880),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3Experts", 256, 8, 7168, 2048),
}
SMALL = 128  # tokens, up to which batched_mm is compared
MOST_CALLS = 20  # in a round
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_module(name, divide, device, dtype):
    folder, kind, E, K, D, F = MODELS[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    D, F = (max(size // divide // 8 * 8, 8) for size in (D, F))
    config = types.SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), F),
        **dict(hidden_size=D, hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0, _experts_implementation="eager"),
    )
    torch.set_default_dtype(dtype)  # a copy in another dtype might not fit
    with torch.device(device):
        made = getattr(module, kind)(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.02)
    return made, E, K, D, F


def make_inputs(tokens, E, K, D, device, dtype):
    scores = torch.randn((tokens, E), device=device) + torch.linspace(1, 0, E, device=device)  # some experts get more tokens
    weights, ids = scores.softmax(-1).topk(K)
    return torch.randn((tokens, D), device=device, dtype=dtype).requires_grad_(), ids, weights.to(dtype).requires_grad_()


def make_step(module, implementation, inputs, grad, mode):
    def forward():
        module.config._experts_implementation = implementation
        with torch.no_grad():
            return (module(*inputs),)

    def training():
        module.config._experts_implementation = implementation
        out = module(*inputs)
        return (out, *torch.autograd.grad(out, [inputs[0], inputs[2], *module.parameters()], grad))

    return {"forward": forward, "training": training}[mode]


def seconds(function, device, calls):
    """Of one call, in a row of several."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def check(name, got, wanted, dtype):
    """One expert at a time: gradients in fp32 would take twice the memory of the parameters."""
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip(got, wanted):
        parts = zip(a, b) if a.dim() == 3 else [(a, b)]
        squares = [((x.float() - y.float()).square().sum().double(), y.float().square().sum().double()) for x, y in parts]
        difference, size = (torch.stack(sums).sum().sqrt().item() for sums in zip(*squares))
        error = difference / max(size, 1e-20)
        assert error < limit, f"{name} differs from grouped_mm by {error:.1e}"


def first_results(step, options):
    """What a step returns, and how many of it a round makes; None if it does not fit into the memory."""
    try:
        got = step()
        one = seconds(step, options.device, 1)
    except torch.OutOfMemoryError:
        return None  # whatever the step had made goes with its frames
    return got, max(1, min(MOST_CALLS, int(options.round_ms / 1e3 / one)))


def compare(title, module, names, inputs, mode, options):
    """Seconds by implementation; None: it does not fit into the memory."""
    device, grad = options.device, torch.randn_like(inputs[0])
    steps = {name: make_step(module, name, inputs, grad, mode) for name in names}
    wanted, calls = first_results(steps["grouped_mm"], options)
    calls = {"grouped_mm": calls}
    for name in names[1:]:
        made = first_results(steps[name], options)
        if made is None:
            print(f"{title}: {name} is left out, as it needs more memory than there is", flush=True)
        else:
            check(f"{title}, {name}", made[0], wanted, inputs[0].dtype)
            calls[name] = made[1]
        made = None
        free(device)
    del wanted
    taken = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name in taken:
            taken[name].append(seconds(steps[name], device, calls[name]))
    return {name: statistics.median(taken[name]) if name in taken else None for name in names}


def free(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def line_of(title, mode, times):
    listed = "  ".join(f"{name} {'-' if value is None else f'{1e3 * value:.3f}':>9}" for name, value in times.items())
    ratio = "" if times["crossdock"] is None else f"   grouped_mm / crossdock {times['grouped_mm'] / times['crossdock']:.2f}"
    return f"{title:29}  {mode:8} ms: {listed}{ratio}"


def parse():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 4096])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--divide", type=int, default=1 if on_gpu else 8, help="the widths; default: %(default)s")
    parser.add_argument("--dtype", default="bf16" if on_gpu else "fp32", choices=list(KINDS))
    parser.add_argument("--also", nargs="+", default=[], help="for example eager")
    parser.add_argument("--training-from", type=int, default=1024, help="tokens; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--round-ms", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--json", help="written after each comparison")
    options = parser.parse_args()
    options.device = "cuda" if on_gpu else "cpu"
    return options


def main():
    options = parse()
    device, dtype, begin = options.device, KINDS[options.dtype], time.monotonic()
    crossdock.transformers.register()
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{machine}, {options.dtype}, widths / {options.divide}", flush=True)
    results = []
    for name in options.models:
        module, E, K, D, F = make_module(name, options.divide, device, dtype)
        for tokens in options.tokens:
            inputs = make_inputs(tokens, E, K, D, device, dtype)
            names = ["grouped_mm", "crossdock", *(["batched_mm"] if tokens <= SMALL else []), *options.also]
            for mode in ("forward", *(["training"] if tokens >= options.training_from else [])):
                title = f"{name:14} {tokens:6} tokens"
                times = compare(title, module, names, inputs, mode, options)
                print(line_of(title, mode, times), flush=True)
                results.append(dict(model=name, E=E, K=K, D=D, F=F, tokens=tokens, mode=mode, seconds=times))
                if options.json:
                    with open(options.json, "w") as file:
                        json.dump(results, file, indent=1)
        del module, inputs
        free(device)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
