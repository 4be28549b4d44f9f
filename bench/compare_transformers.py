#!/usr/bin/env python3
"""Compares implementations of transformers' experts modules in one process, taking turns.

    PYTHONPATH=python python3 bench/compare_transformers.py [--tokens 1 16 128 4096] [--divide 4] [--dtype fp32] [--json FILE]

Modules are those of transformers with the widths of published models, divided by --divide (default: 1 on a GPU, 8 on a CPU). Forward
runs without gradients. Training is forward and backward, with the gradients of tokens, weights and parameters. Medians of --rounds;
every result is checked against grouped_mm's. On a CPU, set OMP_NUM_THREADS to the number of cores; both use as many threads.
"""
import argparse
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


def make_module(name, divide, device, dtype):
    folder, kind, E, K, D, F = MODELS[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    D, F = (max(size // divide // 8 * 8, 8) for size in (D, F))
    config = types.SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), F),
        **dict(hidden_size=D, hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0, _experts_implementation="eager"),
    )
    with torch.device(device):
        made = getattr(module, kind)(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.02)
    return made, E, K, D, F


def make_inputs(tokens, E, K, D, device, dtype):
    scores = torch.randn((tokens, E), device=device) + torch.linspace(1, 0, E, device=device)  # some experts get more tokens
    weights, ids = scores.softmax(-1).topk(K)
    return torch.randn((tokens, D), device=device, dtype=dtype).requires_grad_(), ids, weights.to(dtype).requires_grad_()


def make_step(module, implementation, inputs, grad):
    def forward():
        module.config._experts_implementation = implementation
        with torch.no_grad():
            return module(*inputs)

    def training():
        module.config._experts_implementation = implementation
        out = module(*inputs)
        return torch.autograd.grad(out, [inputs[0], inputs[2], *module.parameters()], grad)

    return {"forward": forward, "training": training}


def seconds(function, device):
    if device == "cpu":
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def check(name, got, wanted, dtype):
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    got, wanted = (result if isinstance(result, tuple) else (result,) for result in (got, wanted))
    for a, b in zip(got, wanted):
        error = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)).item()
        assert error < limit, f"{name} differs from grouped_mm by {error:.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 4096])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--divide", type=int)
    parser.add_argument("--dtype", default=None, choices=["fp32", "bf16"])
    parser.add_argument("--also", nargs="+", default=[], help="for example eager")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    divide = options.divide or (1 if device == "cuda" else 8)
    kind = options.dtype or ("bf16" if device == "cuda" else "fp32")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    crossdock.transformers.register()
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else f'{torch.get_num_threads()} threads'}, {kind}, widths / {divide}")
    results = []
    for name in options.models:
        module, E, K, D, F = make_module(name, divide, device, dtype)
        for tokens in options.tokens:
            inputs = make_inputs(tokens, E, K, D, device, dtype)
            grad = torch.randn_like(inputs[0])
            names = ["grouped_mm", "crossdock", *(["batched_mm"] if tokens <= SMALL else []), *options.also]
            steps = {implementation: make_step(module, implementation, inputs, grad) for implementation in names}
            for mode in ("forward", "training"):
                wanted = steps["grouped_mm"][mode]()
                for implementation in names[1:]:
                    check(f"{name}, {tokens} tokens, {implementation}", steps[implementation][mode](), wanted, dtype)
                taken = {implementation: [] for implementation in names}
                for _ in range(options.rounds):
                    for implementation in names:
                        taken[implementation].append(seconds(steps[implementation][mode], device))
                medians = {implementation: statistics.median(times) for implementation, times in taken.items()}
                results.append(dict(model=name, E=E, K=K, D=D, F=F, tokens=tokens, mode=mode, seconds=medians))
                ratio = medians["grouped_mm"] / medians["crossdock"]
                times = "  ".join(f"{implementation} {1e3 * value:9.3f}" for implementation, value in medians.items())
                print(f"{name:14} {tokens:6} tokens  {mode:8} ms: {times}   grouped_mm / crossdock {ratio:.2f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
