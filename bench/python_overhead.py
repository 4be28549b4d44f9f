#!/usr/bin/env python3
"""What a call from Python adds to the same call of the C API: PYTHONPATH=python python3 bench/python_overhead.py

One rank and one token keep the work itself small. The C call is made with arguments that were prepared once, and the time of
an empty call through ctypes is subtracted from it, which leaves the time of a call from C.
"""
import argparse
import ctypes
import time
from ctypes import byref

import numpy as np

import crossdock
from crossdock._abi import COutput, CTensor, DispatchArgs, DispatchResult, Routing
from crossdock._library import lib
from crossdock._tensor import Marshal


def microseconds(call, repeats):
    """Time per call, in the fastest of many short runs."""
    best = float("inf")
    for _ in range(100):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - begin) / repeats)
    return 1e6 * best


def c_calls(dispatcher, plan, inputs):
    """The same calls of the C API, with arguments that stay the same."""
    expert_ids, weights, x, y, out = inputs
    marshal = Marshal()
    routing, args, result, source, target = Routing(), DispatchArgs(), DispatchResult(), CTensor(), COutput()
    marshal.put(routing, Routing.expert_ids.offset, expert_ids)
    marshal.put(routing, Routing.weights.offset, weights)
    marshal.put(args, DispatchArgs.x.offset, x)
    marshal.put(result, DispatchResult.rows.offset, y)
    marshal.put(source, 0, y)
    marshal.put(target, 0, out)
    made = ctypes.c_void_p()
    references = [byref(struct) for struct in (routing, args, result, source, target, made)]
    routing_, args_, result_, source_, target_, made_ = references

    def plan_and_destroy():
        lib.plan_create(dispatcher._handle, routing_, made_)
        lib.plan_destroy(made)

    return {
        "plan": plan_and_destroy,
        "dispatch": lambda: lib.dispatch(dispatcher._handle, plan._handle, args_, result_),
        "combine": lambda: lib.combine(dispatcher._handle, plan._handle, source_, target_),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats

    group = crossdock.Group.from_threads(1, num_threads=1)[0]
    dispatcher = crossdock.Dispatcher(group, num_experts=8, top_k=2, width=16)
    expert_ids, weights = np.array([[0, 5]], np.int32), np.array([[0.25, 0.75]], np.float32)
    x = np.ones((1, 16), np.float32)
    plan = dispatcher.plan(expert_ids, weights)
    y = np.ones((plan.capacity_rows, 16), np.float32)
    out = np.empty_like(x)
    in_c = c_calls(dispatcher, plan, (expert_ids, weights, x, y, out))
    nothing = microseconds(lambda: lib.group_check(group._handle), repeats)  # includes the lambda

    in_python = {
        "plan": lambda: dispatcher.plan(expert_ids, weights),
        "dispatch": lambda: dispatcher.dispatch(plan, x, rows=y),
        "dispatch, memory of the library": lambda: dispatcher.dispatch(plan, x),
        "combine": lambda: dispatcher.combine(plan, y, out=out),
        "combine, memory of the library": lambda: dispatcher.combine(plan, y),
    }
    print(f"{'call':34}{'C, us':>8}{'Python, us':>12}{'above C':>9}")
    for name, call in in_python.items():
        c_call = in_c[name.split(",")[0]]
        calls = 2 if name == "plan" else 1  # it destroys the plan too
        from_c = microseconds(c_call, repeats) - calls * nothing
        from_python = microseconds(call, repeats)
        print(f"{name:34}{from_c:8.2f}{from_python:12.2f}{from_python - from_c:9.2f}")


if __name__ == "__main__":
    main()
