#!/usr/bin/env python3
"""What an operator of crossdock.torch adds to its calls of the C API: PYTHONPATH=python python3 bench/torch_overhead.py

One rank and one token keep the work itself small. Forward runs as an autograd function that records its backward. A step is
forward and backward, with everything that autograd does in between, divided by its four operators; the last line is the time
of torch alone, with autograd functions that only return memory. The calls of the C API are made with arguments that were
prepared once, and the time of an empty call through ctypes is subtracted.

CROSSDOCK_TORCH_NATIVE=0 makes all calls in Python, as with versions of torch before 2.10.
"""
import ctypes
import time
from ctypes import byref

import torch

import crossdock
from crossdock._abi import CombineBackwardArgs, CombineBackwardResult, COutput, CTensor
from crossdock._abi import DispatchArgs, DispatchResult, PlanInfo, Routing
from crossdock._library import lib
from crossdock._tensor import Marshal
from crossdock.torch import Dispatcher
from crossdock.torch.tensors import view_of


def microseconds(call, calls=4, runs=5000):
    """Time per call in the fastest run. Runs are short, so some are not disturbed by other programs."""
    best = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return 1e6 * best


def filled(kind, **tensors):
    """A struct of the C API with these tensors in it."""
    struct = kind()
    for name, tensor in tensors.items():
        Marshal().put(struct, getattr(kind, name).offset, view_of(tensor))
    return struct


def c_calls(dispatcher, plan, t):
    """The calls of the C API that each operator makes, the number of these calls, and the number of operators."""
    handle, of_plan, made = dispatcher._handle, plan._handle, ctypes.c_void_p()
    info, rows_per_expert = PlanInfo(), (ctypes.c_int64 * dispatcher.num_experts)()
    routing = filled(Routing, expert_ids=t["expert_ids"], weights=t["weights"])
    args, result = filled(DispatchArgs, x=t["x"]), filled(DispatchResult, rows=t["rows"])
    rows, tokens = filled(CTensor, data=t["rows"]), filled(COutput, tensor=t["out"])
    back_args = filled(CombineBackwardArgs, grad_out=t["out"], y=t["rows"])
    back_result = filled(CombineBackwardResult, grad_rows=t["grad_rows"], grad_weights=t["grad_weights"])

    def dispatch():
        lib.plan_create_described(handle, byref(routing), byref(info), rows_per_expert, byref(made))
        lib.dispatch(handle, made, byref(args), byref(result))
        lib.plan_destroy(made)

    def combine():
        lib.combine(handle, of_plan, byref(rows), byref(tokens))

    def step():
        dispatch()
        combine()
        lib.combine_backward(handle, of_plan, byref(back_args), byref(back_result))
        lib.dispatch_backward(handle, of_plan, byref(rows), byref(tokens))

    return {"dispatch": (dispatch, 3, 1), "combine": (combine, 1, 1), "a step, per operator": (step, 6, 4)}


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
        "dispatch": microseconds(lambda: dispatcher.dispatch(x, expert_ids, weights, row_weights=False)),
        "combine": microseconds(lambda: dispatcher.combine(y, sent.handle)),
        "a step, per operator": microseconds(step) / 4,
    }


class _Forth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.new_empty(2, 16)

    @staticmethod
    def backward(ctx, grad_rows):
        return grad_rows.new_empty(1, 16)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights):
        ctx.save_for_backward(y)
        return y.new_empty(1, 16)

    @staticmethod
    def backward(ctx, grad_out):
        (y,) = ctx.saved_tensors
        return y.new_empty(2, 16), y.new_empty(1, 2)


def torch_alone(x, weights):
    def step():
        torch.autograd.backward(_Back.apply(_Forth.apply(x), weights), grad_out)
        x.grad = weights.grad = None

    grad_out = torch.ones_like(x)
    return microseconds(step) / 4


def main():
    torch.set_num_threads(1)
    group = crossdock.Group.from_threads(1, num_threads=1)[0]
    made = Dispatcher(group, num_experts=8, top_k=2, width=16)
    core = made._core.dispatcher
    x, expert_ids = torch.ones(1, 16), torch.tensor([[0, 5]])
    weights = torch.tensor([[0.25, 0.75]])
    plan = core.plan(view_of(expert_ids), view_of(weights))
    memory = {name: torch.ones(2, 16) for name in ("rows", "grad_rows")}
    memory.update(x=x, expert_ids=expert_ids, weights=weights, out=torch.ones(1, 16), grad_weights=torch.ones(1, 2))
    nothing = microseconds(lambda: lib.group_check(group._handle))
    from_c = c_calls(core, plan, memory)
    from_torch = torch_calls(made, x.clone().requires_grad_(), expert_ids, weights.clone().requires_grad_())
    print(f"{'operator':24}{'C, us':>8}{'torch, us':>12}{'above C':>9}")
    for name, measured in from_torch.items():
        call, num_calls, num_operators = from_c[name]
        in_c = (microseconds(call) - num_calls * nothing) / num_operators
        print(f"{name:24}{in_c:8.2f}{measured:12.2f}{measured - in_c:9.2f}")
    alone = torch_alone(x.clone().requires_grad_(), weights.clone().requires_grad_())
    print(f"{'  of which torch alone':24}{'':8}{alone:12.2f}")


if __name__ == "__main__":
    main()
