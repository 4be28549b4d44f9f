#!/usr/bin/env python3
"""Runs cases on processes of this machine: run.py [--sets quick ...] [--world 1 2 4] [-- pattern ...]

All cases of a world size share one launch. A case passes if it does on every rank; after a failure the launch ends.
"""
import argparse
import datetime
import importlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
SETS = {  # modules, and the numbers of ranks that they have cases for
    "quick": (["case_dispatcher", "case_autograd", "case_groups"], [1, 2, 4]),  # any version of torch
    "torch": (["case_compile", "case_training"], [1, 4]),
    "megatron": (["case_megatron"], [4]),
    "titan": (["case_titan"], [4]),
    "cuda": (["case_cuda"], [1, 2]),
}


def load(modules):
    sys.path.insert(0, str(HERE))
    for module in modules:
        importlib.import_module(module)
    import cases

    return cases


# ---- A rank ----


def rank_main(options):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cases = load(options.modules)
    address = f"tcp://127.0.0.1:{options.port}"
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=address, rank=options.rank, world_size=options.ranks, timeout=timeout)
    results = open(options.results, "w", buffering=1)
    names = cases.cases_of(options.ranks, options.patterns)
    results.write("".join(f"{name}\tnot run\n" for name in names))
    for name in names:
        function, _ = cases.CASES[name]
        start = time.monotonic()
        try:
            function(options.rank, options.ranks)
            dist.barrier()
        except BaseException:
            results.write(f"{name}\tFAILED\n")
            print(f"rank {options.rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)  # the others see it at once
        results.write(f"{name}\t{time.monotonic() - start:.2f}\n")
    dist.destroy_process_group()


# ---- The launch ----


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(world, folder, options):
    port = free_port()
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    ranks = []
    for rank in range(world):
        command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(world), "--port", str(port)]
        command += ["--results", f"{folder}/{rank}", "--modules", *options.modules, "--", *options.patterns]
        ranks.append(subprocess.Popen(command, env=environment))
    return ranks


def wait_for(ranks, deadline):
    """Ends all ranks soon after the first that fails."""
    grace = None
    while any(rank.poll() is None for rank in ranks):
        if grace is None and any(rank.poll() not in (None, 0) for rank in ranks):
            grace = time.monotonic() + 5
        if time.monotonic() > min(deadline, grace or deadline):
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    return max(abs(rank.wait()) for rank in ranks)


def launch(world, options):
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_ranks(world, folder, options)
        try:
            status = wait_for(ranks, time.monotonic() + options.deadline)
        finally:
            for rank in ranks:
                rank.kill()
        found = [results_of(f"{folder}/{rank}") for rank in range(world)]
    passed = 0
    for name in found[0]:
        states = [results.get(name, "not run") for results in found]
        failures = [state for state in ("FAILED", "not run") if state in states]
        passed += not failures
        state = failures[0] if failures else f"ok {max(map(float, states)):6.2f} s"
        print(f"  {world} ranks  {name:<75} {state}")
    print(f"{world} ranks: {passed} of {len(found[0])} passed", flush=True)
    return status == 0 and passed == len(found[0])


def results_of(path):
    """The last word about each case."""
    if not os.path.exists(path):
        return {}
    return dict(line.rstrip("\n").split("\t", 1) for line in open(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=["quick"], choices=sorted(SETS))
    parser.add_argument("--world", type=int, nargs="+", help="numbers of ranks; default: all that have cases")
    parser.add_argument("--deadline", type=float, default=300, help="seconds per launch")
    parser.add_argument("--modules", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("patterns", nargs="*", help="parts of the names of cases to run")
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options)
    ok = True
    for name in options.sets:
        options.modules, worlds = SETS[name]
        for world in options.world or worlds:
            ok = launch(world, options) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
