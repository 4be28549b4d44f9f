#!/usr/bin/env python3
"""Runs cases on processes of this machine: run.py [--world 1 2 4] [--modules ...] [pattern ...]

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
MODULES = {
    "quick": ["case_dispatcher", "case_autograd", "case_groups"],  # any version of torch
    "torch": ["case_compile", "case_training"],
    "megatron": ["case_megatron"],
    "titan": ["case_titan"],
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
    for name in cases.cases_of(options.ranks, options.patterns):
        function, _ = cases.CASES[name]
        start = time.monotonic()
        try:
            function(options.rank, options.ranks)
            dist.barrier()
        except BaseException:
            results.write(f"{name}\tfailed\n")
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
    cases = load(options.modules)
    names = cases.cases_of(world, options.patterns)
    if not names:
        return True
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_ranks(world, folder, options)
        try:
            status = wait_for(ranks, time.monotonic() + options.deadline)
        finally:
            for rank in ranks:
                rank.kill()
        passed = 0
        for name in names:
            found = [result_of(f"{folder}/{rank}", name) for rank in range(world)]
            ok = all(result not in (None, "failed") for result in found)
            passed += ok
            seconds = max(float(result) for result in found) if ok else 0.0
            state = f"ok {seconds:6.2f} s" if ok else ("not run" if "failed" not in found else "FAILED")
            print(f"  {world} ranks  {name:<70} {state}")
    print(f"{world} ranks: {passed} of {len(names)} passed", flush=True)
    return status == 0 and passed == len(names)


def result_of(path, name):
    if not os.path.exists(path):
        return None
    for line in open(path):
        key, _, value = line.rstrip("\n").partition("\t")
        if key == name:
            return value
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--sets", nargs="+", default=["quick"], choices=sorted(MODULES))
    parser.add_argument("--modules", nargs="+", help="instead of --sets")
    parser.add_argument("--deadline", type=float, default=300, help="seconds per launch")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("patterns", nargs="*", help="parts of the names of cases to run")
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options)
    ok = True
    for modules in [options.modules] if options.modules else [MODULES[name] for name in options.sets]:
        options.modules = modules
        for world in options.world:
            ok = launch(world, options) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
