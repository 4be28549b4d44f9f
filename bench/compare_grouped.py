#!/usr/bin/env python3
"""Compares grouped products with torch._grouped_mm on one GPU, in one process, taking turns.

    cmake --preset cuda && cmake --build build/cuda --target product_library
    python3 bench/compare_grouped.py [--library build/cuda/bench/kernels/libproduct_library.so] [--json FILE]

Every candidate is a graph of a few launches; graphs are replayed in turn and medians compared. dW in fp32 is compared with
torch's dW in bf16, SwiGLU with torch's product followed by silu(gate) * linear. Results are checked against torch's.
"""
import argparse
import ctypes
import json
import math
import statistics

import torch

LAUNCHES, WARM_UPS = 4, 3
SIZES = [  # model, layer, K, N, experts, rows
    ("A", "up", 7168, 4096, 32, 32768), ("A", "down", 2048, 7168, 32, 32768),
    ("B", "up", 2048, 1536, 16, 65536), ("B", "down", 768, 2048, 16, 65536),
    ("C", "up", 2880, 5760, 8, 16384), ("C", "down", 2880, 2880, 8, 16384),
]


class ProductCall(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "out", "hidden", "starts", "counts")]
    _fields_ += [(name, ctypes.c_int64) for name in "RENK"] + [("stream", ctypes.c_void_p)]


class Products:
    """The library's grouped products."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.products_error.restype = ctypes.c_char_p
        self.lib.products_create.restype = ctypes.c_void_p
        self.lib.products_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ProductCall)]
        self.handle = self.lib.products_create(0)
        if not self.handle:
            raise RuntimeError(self.lib.products_error().decode())

    def run(self, operation, a, b, out, case, hidden=None):
        stream = torch.cuda.current_stream().cuda_stream
        call = ProductCall(a.data_ptr(), b.data_ptr(), out.data_ptr(), hidden.data_ptr() if hidden is not None else None,
                           case["starts"].data_ptr(), case["counts"].data_ptr(), case["R"], case["E"], case["N"], case["K"],
                           stream)
        if self.lib.products_run(self.handle, operation.encode(), call):
            raise RuntimeError(self.lib.products_error().decode())


def skewed(rows, experts):
    """Same as skewed_counts in bench/kernels/product_counts.hpp."""
    shares = [0.0 if e in (1, experts // 2) else 1.0 / (e + 2) for e in range(experts)]
    counts = [int(share / sum(shares) * rows) for share in shares]
    counts[0] += rows - sum(counts)
    return counts


def make_case(K, N, E, R, counts):
    ends = torch.tensor(counts).cumsum(0)
    case = {"K": K, "N": N, "E": E, "R": R, "offsets": ends.int().cuda()}
    case["starts"] = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).cuda()
    case["counts"] = torch.tensor(counts).cuda()
    for name, shape in (("x", (R, K)), ("grad", (R, N)), ("w", (E, N, K))):
        case[name] = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * (0.05 if name == "w" else 1.0)
    return case


def candidates(products, case, layer):
    """name -> (ours, torch's), functions that return their result."""
    x, grad, w, offsets = case["x"], case["grad"], case["w"], case["offsets"]
    R, E, N, K = (case[name] for name in "RENK")
    out = {"forward": (R, N), "dx": (R, K), "dw": (E, N, K), "dw_fp32": (E, N, K), "swiglu": (R, N // 2),
           "swiglu_hidden": (R, N // 2)}
    out = {name: torch.empty(shape, device="cuda", dtype=torch.float32 if name == "dw_fp32" else torch.bfloat16)
           for name, shape in out.items()}
    hidden = torch.empty((R, N), device="cuda", dtype=torch.bfloat16)

    def ours(operation, name, a, b, kept=None):
        def run():
            products.run(operation, a, b, out[name], case, kept)
            return out[name]
        return run

    def torch_forward():
        return torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)

    def torch_swiglu():
        gate, linear = torch_forward().chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * linear

    def torch_dw():
        return torch._grouped_mm(grad.t(), x, offs=offsets)

    found = {
        "forward": (ours("forward", "forward", x, w), torch_forward),
        "dx": (ours("dx", "dx", grad, w), lambda: torch._grouped_mm(grad, w, offs=offsets)),
        "dw": (ours("dw", "dw", grad, x), torch_dw),
        "dw_fp32": (ours("dw_fp32", "dw_fp32", grad, x), torch_dw),
    }
    if layer == "up":
        found["swiglu"] = (ours("swiglu", "swiglu", x, w), torch_swiglu)
        found["swiglu_hidden"] = (ours("swiglu", "swiglu_hidden", x, w, hidden), torch_swiglu)
    return found


def check(name, got, wanted, empty):
    """Experts without rows must have gradients of exactly zero; torch may leave them undefined."""
    if name.startswith("dw"):
        assert not got[empty].any(), f"{name}: an expert without rows has a gradient"
        got, wanted = got[~empty], wanted[~empty]
    error = 0.0  # in parts, to save memory
    for part, reference in zip(got.flatten().split(1 << 28), wanted.flatten().split(1 << 28)):
        error = max(error, ((part.float() - reference.float()).norm() / reference.float().norm()).item())
    assert error < 1e-2, f"{name}: differs from torch by {error:.1e}"


def capture(function):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(LAUNCHES):
            function()
    return graph


def time_by_turns(functions, rounds):
    """Median milliseconds per launch of each."""
    graphs = [capture(function) for function in functions]
    times = [[] for _ in graphs]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(WARM_UPS + rounds):
        for graph, taken in zip(graphs, times):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= WARM_UPS:
                taken.append(begin.elapsed_time(end) / LAUNCHES)
    return [statistics.median(taken) for taken in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/cuda/bench/kernels/libproduct_library.so")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default="ABC", help="e.g. B")
    parser.add_argument("--json", help="file for all times")
    options = parser.parse_args()
    products = Products(options.library)
    results = []
    for model, layer, K, N, E, R in (size for size in SIZES if size[0] in options.models):
        for load, counts in (("balanced", [R // E] * E), ("skewed", skewed(R, E))):
            case = make_case(K, N, E, R, counts)
            for name, (ours, theirs) in candidates(products, case, layer).items():
                check(name, ours(), theirs(), case["counts"] == 0)
                mine, torchs = time_by_turns((ours, theirs), options.rounds)
                results.append({"model": model, "layer": layer, "load": load, "operation": name, "ms": mine,
                                "torch_ms": torchs, "ratio": torchs / mine, "tflops": 2e-9 * R * N * K / mine})
                print("{model} {layer:4} {load:8} {operation:13} {ms:7.3f} ms {tflops:5.0f} TFLOP/s  torch {torch_ms:7.3f} ms"
                      "  {ratio:.3f} x".format(**results[-1]), flush=True)
            del case
            torch.cuda.empty_cache()
    print()
    for name in dict.fromkeys(result["operation"] for result in results):
        ratios = [result["ratio"] for result in results if result["operation"] == name]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{name:13} geometric mean {mean:.3f} x, least {min(ratios):.3f} x")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
