#!/usr/bin/env python3
"""Runs cases on processes of this machine: run.py [--sets quick ...] [--world 1 2 4] [-- pattern ...]

All cases of a world size share one launch. A case passes if it passes on every rank; after a failure the launch ends.
"""
import argparse
import importlib
import os
import pathlib
import sys
import tempfile
import time
import traceback

from launch import PATIENCE, connect, start_ranks, wait_for

SETS = {  # modules, and the numbers of ranks that they have cases for, in this order
    "quick": (
        [
            *("case_dispatcher", "case_autograd", "case_transforms", "case_native", "case_pending"),
            *("case_layer", "case_layer_options", "case_layer_errors", "case_weights", "case_groups", "case_import"),
        ],
        [1, 2, 4],
    ),  # any version of torch
    "torch": (
        [
            *("case_compile", "case_training", "case_layer_training", "case_checkpoint", "case_checkpoint_ranks"),
            *("case_gradients", "case_convert", "case_fp8", "case_layer_transformers"),
        ],
        [1, 2, 4],
    ),
    "titan": (["case_layer_titan", "case_titan"], [1, 2, 4]),
    "megatron": (["case_layer_megatron", "case_megatron"], [1, 2, 4]),  # last: it changes torch, to run on the CPU
    "transformers": (["case_hf_experts"], [1]),  # 5.20 or later
    "transformers-parallel": (["case_hf_parallel"], [2, 4]),  # 5.23 or later
    "cuda": (["case_cuda", "case_cuda_calls", "case_cuda_fp8", "case_cuda_layer", "case_cuda_options"], [1, 2]),
    "cuda-frameworks": (["case_cuda_megatron", "case_cuda_titan"], [1, 2]),
    "cuda-transformers": (["case_cuda_hf"], [1, 2]),
}


# ---- A rank ----


def rank_main(options):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    connect(options.rank, options.ranks, options.folder)
    with open(f"{options.folder}/{options.rank}", "w", buffering=1) as results:
        for module in options.modules:
            run_module(module, results, options)
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a normal exit, during which gloo may abort (docs/pytorch.md), is tested in failures.py


def run_module(module, results, options):
    import cases
    import torch.distributed as dist

    name = module
    try:
        importlib.import_module(module)
        names = cases.cases_of(module, options.ranks, options.patterns)
        results.write("".join(f"{name}\tnot run\n" for name in names))
        for name in names:
            start = time.monotonic()
            cases.CASES[name][0](options.rank, options.ranks)
            dist.barrier()
            results.write(f"{name}\t{time.monotonic() - start:.2f}\n")
    except BaseException:
        results.write(f"{name}\tFAILED\n")
        print(f"rank {options.rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)  # the others detect it immediately


# ---- The launch ----


def launch(world, modules, options):
    """Returns the numbers of passed and of all cases, and whether everything succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        command = [__file__, *options.patterns, "--ranks", str(world), "--folder", folder, "--modules", *modules]
        codes = wait_for(start_ranks(world, [*command, "--rank"]), PATIENCE, grace=10)
        found = [results_of(f"{folder}/{rank}") for rank in range(world)]
    names = list(dict.fromkeys(name for results in found for name in results))
    passed = 0
    for name in names:
        states = [results.get(name, "not run") for results in found]
        failures = [state for state in ("FAILED", "not run") if state in states]
        passed += not failures
        state = failures[0] if failures else f"ok {max(map(float, states)):6.2f} s"
        print(f"  {world} ranks  {name:<75} {state}")
    print(f"{world} ranks: {passed} of {len(names)} passed", flush=True)
    if any(codes) and passed == len(names):
        print(f"{world} ranks: exit codes {codes}")
    return len(names), passed == len(names) and not any(codes)


def results_of(path):
    """The last word written about each case."""
    if not os.path.exists(path):
        return {}
    return dict(line.rstrip("\n").split("\t", 1) for line in open(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=["quick"], choices=sorted(SETS))
    parser.add_argument("--world", type=int, nargs="+", help="numbers of ranks; default: all that have cases")
    parser.add_argument("--modules", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("patterns", nargs="*", help="parts of the names of cases to run")
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options)
    chosen = [SETS[name] for name in SETS if name in options.sets]
    total, ok = 0, True
    for world in options.world or sorted({world for _, worlds in chosen for world in worlds}):
        modules = [module for modules, worlds in chosen if world in worlds for module in modules]
        if modules:
            count, passed = launch(world, modules, options)
            total, ok = total + count, ok and passed
    if total == 0:
        print("no such cases")
    return 0 if ok and total > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
