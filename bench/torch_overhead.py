#!/usr/bin/env python3
"""Host time of the calls of crossdock.torch: PYTHONPATH=python python3 bench/torch_overhead.py [--device cpu|cuda] [--layer-only]

Operators, on one rank, with one token (small) and with many (large, rows in the library's memory on the CPU), on the CPU and,
if there is one, on a GPU, where calls only queue work:

  C       the calls of the C API with arguments that were prepared once, without the time of an empty call through ctypes
  module  the call of the compiled module (python/crossdock/torch/native.py), or of the plain calls without it
  torch   the operator through autograd. A step is forward and backward, divided by its four operators
  above C what Python and torch add
  alone   torch's part of a step: autograd functions that only allocate results of these sizes
  ratio   above C / alone

Layers: MoELayer with 128 tokens, forward without gradients, and forward and backward. On a GPU also the number of kernels, and
the time of as many empty launches. Each time is that of the fastest of many short runs, so some are not disturbed by other
programs. CROSSDOCK_TORCH_NATIVE=0 makes all calls in Python.
"""
import argparse
import ctypes
import time
from ctypes import byref

import torch

import crossdock.torch
from crossdock._abi import CombineBackwardArgs, CombineBackwardResult, COutput, CTensor
from crossdock._abi import DispatchArgs, DispatchResult, PlanInfo, Routing
from crossdock._library import lib
from crossdock._tensor import Marshal
from crossdock.torch import Dispatcher, MoELayer, calls, native
from crossdock.torch.tensors import view_of

E, K = 8, 2
# Tokens and width. On the CPU, results of 60 KiB: larger ones are new pages of the system, which cost more than all else.
SIZES = {"cpu": {"small": (1, 16), "large": (30, 512)}, "cuda": {"small": (1, 16), "large": (4096, 2048)}}
SECONDS = 2.0  # at most, for one time


def microseconds(call, num_calls=4, num_runs=5000, is_on_gpu=False):
    """Time per call in the fastest run. On a GPU, nothing is queued when a run begins."""
    for _ in range(3):
        call()
    best, end = float("inf"), time.perf_counter() + SECONDS
    for _ in range(num_runs):
        if is_on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        now = time.perf_counter()
        best = min(best, (now - begin) / num_calls)
        if now > end:
            break
    return 1e6 * best


# ---- Operators ----


def filled(kind, **tensors):
    """A struct of the C API with these tensors in it."""
    struct = kind()
    for name, tensor in tensors.items():
        Marshal().put(struct, getattr(kind, name).offset, view_of(tensor))
    return struct


def c_calls(dispatcher, plan, t, has_rows):
    """The calls of the C API that each operator makes, the number of these calls, and the number of operators.

    has_rows: rows are written to the caller's memory, as in crossdock.torch; else to the library's."""
    handle, of_plan, made = dispatcher._handle, plan._handle, ctypes.c_void_p()
    info, rows_per_expert = PlanInfo(), (ctypes.c_int64 * dispatcher.num_experts)()
    routing = filled(Routing, expert_ids=t["expert_ids"], weights=t["weights"])
    args, result = filled(DispatchArgs, x=t["x"]), DispatchResult()
    rows, tokens = filled(CTensor, data=t["rows"]), filled(COutput, tensor=t["out"])
    back_args = filled(CombineBackwardArgs, grad_out=t["out"], y=t["rows"])
    back_result = filled(CombineBackwardResult, grad_weights=t["grad_weights"])
    outputs = (result, DispatchResult.rows.offset), (back_result, CombineBackwardResult.grad_rows.offset)
    if has_rows:
        for (struct, offset), name in zip(outputs, ("other_rows", "grad_rows")):
            Marshal().put_output(struct, offset, view_of(t[name]))
    rows_out, grad_rows_out = (byref(*output) for output in outputs)

    def dispatch():
        lib.plan_create_described(handle, byref(routing), byref(info), rows_per_expert, byref(made))
        lib.dispatch(handle, made, byref(args), byref(result))
        if not has_rows:
            lib.output_release(rows_out, None)
        lib.plan_destroy(made)

    def combine():
        lib.combine(handle, of_plan, byref(rows), byref(tokens))

    def step():
        dispatch()
        combine()
        lib.combine_backward(handle, of_plan, byref(back_args), byref(back_result))
        lib.dispatch_backward(handle, of_plan, byref(rows), byref(tokens))
        if not has_rows:
            lib.output_release(grad_rows_out, None)

    more = 0 if has_rows else 1
    return {"dispatch": (dispatch, 3 + more, 1), "combine": (combine, 1, 1), "step": (step, 6 + 2 * more, 4)}


def module_calls(dispatcher, t):
    x, ids, weights, rows, out = (t[name] for name in ("x", "expert_ids", "weights", "rows", "out"))
    plan = calls.dispatch(x, ids, weights, dispatcher._key, False)[3]

    def dispatch():
        calls.dispatch(x, ids, weights, dispatcher._key, False)

    def combine():
        calls.combine(rows, weights, ids, plan)

    def step():
        dispatch()
        combine()
        calls.combine_backward(out, rows, ids, plan)
        calls.dispatch_backward(rows, plan, 0)

    return {"dispatch": dispatch, "combine": combine, "step": step}


def torch_calls(dispatcher, x, expert_ids, weights):
    def step():
        sent = dispatcher.dispatch(x, expert_ids, weights, row_weights=False)
        out = dispatcher.combine(sent.rows, sent.handle)
        torch.autograd.backward(out, grad_out)
        x.grad = weights.grad = None

    grad_out = torch.ones_like(x)
    sent = dispatcher.dispatch(x, expert_ids, weights, row_weights=False)
    y = sent.rows.detach().requires_grad_()
    return {
        "dispatch": lambda: dispatcher.dispatch(x, expert_ids, weights, row_weights=False),
        "combine": lambda: dispatcher.combine(y, sent.handle),
        "step": step,
    }


def torch_alone(x, weights, num_rows):
    """A step of autograd functions that only return memory."""

    class Forth(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.new_empty(num_rows, width)

        @staticmethod
        def backward(ctx, grad_rows):
            return grad_rows.new_empty(tokens, width)

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, weights):
            ctx.save_for_backward(y)
            return y.new_empty(tokens, width)

        @staticmethod
        def backward(ctx, grad_out):
            (y,) = ctx.saved_tensors
            return y.new_empty(num_rows, width), y.new_empty(tokens, K)

    def step():
        torch.autograd.backward(Back.apply(Forth.apply(x), weights), grad_out)
        x.grad = weights.grad = None

    tokens, width = x.shape
    grad_out = torch.ones_like(x)
    return step


def measure_operators(group, device, size):
    tokens, width = SIZES[device][size]
    is_on_gpu, num_rows = device == "cuda", tokens * K
    dispatcher = Dispatcher(group, num_experts=E, top_k=K, width=width, max_rows=num_rows)
    core = dispatcher._core.dispatcher
    ids = torch.rand(tokens, E).argsort(dim=1)[:, :K].contiguous().to(device)
    t = {"expert_ids": ids, "x": torch.ones(tokens, width, device=device)}
    t.update(weights=torch.full((tokens, K), 0.5, device=device), out=torch.ones_like(t["x"]))
    t.update({name: torch.ones(num_rows, width, device=device) for name in ("other_rows", "grad_rows")})
    t.update(grad_weights=torch.ones(tokens, K, device=device))
    t.update(rows=dispatcher.dispatch(t["x"], ids, t["weights"], row_weights=False).rows)
    if is_on_gpu:
        core.set_stream(torch.cuda.current_stream().cuda_stream)
    plan = core.plan(view_of(ids), view_of(t["weights"]))
    nothing = microseconds(lambda: lib.group_check(group._handle))
    has_rows = is_on_gpu or size == "small"
    from_c, of_module = c_calls(core, plan, t, has_rows), module_calls(dispatcher, t)
    x, weights = (t[name].clone().requires_grad_() for name in ("x", "weights"))
    from_torch = torch_calls(dispatcher, x, ids, weights)
    for name, call in from_torch.items():
        c_call, num_c_calls, divisor = from_c[name]
        in_c = (microseconds(c_call, is_on_gpu=is_on_gpu) - num_c_calls * nothing) / divisor
        in_module, in_torch = (microseconds(one, is_on_gpu=is_on_gpu) / divisor for one in (of_module[name], call))
        line = f"{device:6}{size:7}{name:10}{in_c:8.2f}{in_module:9.2f}{in_torch:8.2f}{in_torch - in_c:9.2f}"
        if name == "step":
            alone = microseconds(torch_alone(x, weights, num_rows), is_on_gpu=is_on_gpu) / divisor
            line += f"{alone:8.2f}{(in_torch - in_c) / alone:7.2f}"
        print(line, flush=True)


# ---- Layers ----


def num_kernels(call):
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    kinds = ("Memcpy", "Memset")
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(events), sum(any(kind in event.name for kind in kinds) for event in events)


def measure_layer(group, device):
    is_on_gpu, tokens, width, inner = device == "cuda", 128, 512, 256
    dtype = torch.bfloat16 if is_on_gpu else torch.float32
    limit = {"max_rows": tokens * K} if is_on_gpu else {}
    layer = MoELayer(group, num_experts=E, top_k=K, width=width, inner=inner, device=device, dtype=dtype, **limit)
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    with_grad, grad_out = x.clone().requires_grad_(), torch.ones_like(x)
    parameters = [with_grad, *layer.parameters()]

    def forward():
        with torch.no_grad():
            layer(x)

    def step():
        torch.autograd.backward(layer(with_grad), grad_out)
        for parameter in parameters:
            parameter.grad = None

    for name, call in (("forward", forward), ("forward and backward", step)):
        measured = microseconds(call, num_calls=1, is_on_gpu=is_on_gpu)
        line = f"{device:6}{name:22}{measured:9.1f} us"
        if is_on_gpu:
            kernels, copies = num_kernels(call)
            launch = microseconds(lambda: torch.cuda._sleep(0), num_calls=16, is_on_gpu=True)
            line += f"; {kernels} kernels, of which {copies} copies: {kernels * launch:.1f} us as empty launches of {launch:.2f}"
        print(line, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: both, if there is a GPU")
    parser.add_argument("--layer-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = crossdock.torch.group(num_threads=1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if options.device is not None:
        devices = [options.device]
    print(f"torch {torch.__version__}, the calls are made by {'the module' if native.module else 'Python'}")
    if not options.layer_only:
        print(f"{'':6}{'':7}{'us':10}{'C':>8}{'module':>9}{'torch':>8}{'above C':>9}{'alone':>8}{'ratio':>7}")
        for device in devices:
            for size in SIZES[device]:
                measure_operators(group, device, size)
    for device in devices:
        measure_layer(group, device)


if __name__ == "__main__":
    main()
