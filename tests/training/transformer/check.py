#!/usr/bin/env python3
"""Shows by training that every mesh computes the same results: python tests/training/transformer/check.py [pattern ...]

Compares models on meshes of up to 8 processes on this machine with the same model on one rank: the loss and all
gradients of the first step, and the losses of 50 freely routed steps, which must fall by a third. Then kills a run at a
random moment and continues it. Patterns select cases by parts of their names; --list shows the names.
"""
import argparse
import dataclasses
import sys
import time
from typing import List

import torch
import torch.distributed as dist

import killed
import launch
from compare import Case, Comparison
from mesh import MeshShape
from presets import PRESETS
from train import start_processes
from training import Settings

WORLD = 8
PATIENCE_S = 3600  # of processes that take no part in a case
STRATEGIES = ("allgather", "alltoall", "direct", "hierarchical")
EXACT = Settings(dtype=torch.float64)
MESHES = {
    "ep4": dataclasses.replace(EXACT, mesh=MeshShape(dp=4, ep=4)),
    "tp2·ep2": dataclasses.replace(EXACT, mesh=MeshShape(tp=2, ep=2)),
    "dp2·tp2·ep4 FSDP2": dataclasses.replace(EXACT, mesh=MeshShape(dp=2, tp=2, ep=4), data_parallel="fsdp"),
    "tp2·cp2·ep2": dataclasses.replace(EXACT, mesh=MeshShape(tp=2, cp=2, ep=2)),
    "tp2·cp2·pp2·ep2": dataclasses.replace(EXACT, mesh=MeshShape(tp=2, cp=2, pp=2, ep=2), micro_batches=4),
    "etp2·ep2": dataclasses.replace(EXACT, mesh=MeshShape(dp=2, tp=2, etp=2, ep=2)),
}


def with_strategy(settings: Settings, strategy: str) -> Settings:
    """hierarchical gets two nodes to differ from direct."""
    ranks = settings.mesh.etp * settings.mesh.ep
    nodes = {"ranks_per_node": ranks // 2} if strategy == "hierarchical" else {}
    return dataclasses.replace(settings, strategy=strategy, **nodes)


def all_cases() -> List[Case]:
    cases = [
        Case(f"{name} {strategy}", with_strategy(settings, strategy))
        for name, settings in MESHES.items()
        for strategy in STRATEGIES
    ]
    for preset in ("mixtral", "deepseek-v3", "gpt-oss"):
        for name in ("ep4", "tp2·cp2·pp2·ep2", "etp2·ep2"):
            cases.append(Case(f"{name} {preset}", dataclasses.replace(MESHES[name], model=PRESETS[preset])))
    others = {
        "dp2·tp2·ep4 DDP": dict(mesh=MeshShape(dp=2, tp=2, ep=4), data_parallel="ddp"),
        "dp4·ep2 FSDP2": dict(mesh=MeshShape(dp=4, ep=2), data_parallel="fsdp"),
        "dp2·tp2·pp2·ep2 FSDP2": dict(mesh=MeshShape(dp=2, tp=2, pp=2, ep=2), data_parallel="fsdp", micro_batches=4),
        "dp3·ep3 uneven experts": dict(mesh=MeshShape(dp=3, ep=3)),
        "dp8·ep8 ranks without experts": dict(mesh=MeshShape(dp=8, ep=8), model=PRESETS["mixtral"]),
        "cp4·etp4": dict(mesh=MeshShape(cp=4, etp=4)),
    }
    cases += [Case(name, dataclasses.replace(EXACT, **changes)) for name, changes in others.items()]
    cases += empty_cases()
    for name, settings in MESHES.items():
        single = dataclasses.replace(settings, dtype=torch.float32)
        cases.append(Case(f"{name} float32", single, steps=10, first=1e-4, later=1e-4, must_fall=False))
    return cases


def empty_cases() -> List[Case]:
    """Ranks without tokens in some micro-batches, and an expert that never gets any."""
    cases = [
        Case(f"{name} ranks without tokens", dataclasses.replace(MESHES[name], vary_rows=True))
        for name in ("ep4", "dp2·tp2·ep4 FSDP2", "etp2·ep2")
    ]
    model = dataclasses.replace(PRESETS["mixtral"], idle_expert=3)
    for name in ("ep4", "dp2·tp2·ep4 FSDP2", "tp2·cp2·pp2·ep2"):
        cases.append(Case(f"{name} idle expert", dataclasses.replace(MESHES[name], model=model)))
    return cases


def selected(patterns: List[str]) -> List[Case]:
    return [case for case in all_cases() if not patterns or any(pattern in case.name for pattern in patterns)]


def rank_main(cases: List[Case]) -> None:
    start_processes(PATIENCE_S)
    comparison, failures = Comparison(), 0
    for case in cases:
        start = time.monotonic()
        verdict = comparison.run(case)
        failures += bool(verdict.problems)
        if dist.get_rank() == 0:
            state = "FAILED" if verdict.problems else "ok"
            print(f"{state:6} {case.name:32} {verdict.text}  ({time.monotonic() - start:.0f} s)", flush=True)
            for problem in verdict.problems[:5]:
                print(f"       {problem}", flush=True)
    if dist.get_rank() == 0:
        print(f"{len(cases) - failures} of {len(cases)} cases agree with one rank", flush=True)
    dist.destroy_process_group()
    if failures:
        sys.exit(1)


def check_killed() -> bool:
    options = ["--dp", "4", "--ep", "4", "--preset", "deepseek-v3"]
    problems = killed.kill_and_continue(4, options, steps=30, kills=3, seed=int(time.time()))
    print(f"{'FAILED' if problems else 'ok':6} killed and continued: the same losses, bit for bit")
    for problem in problems[:5]:
        print(f"       {problem}")
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("patterns", nargs="*", metavar="pattern", help="part of a name")
    options = parser.parse_args()
    cases, ok = selected(options.patterns), True
    if options.list:
        print("\n".join([*(case.name for case in cases), "killed"]))
        return 0
    if cases:
        ok = launch.wait(launch.start_forks(WORLD, lambda: rank_main(cases)), 6 * PATIENCE_S)
    if not options.patterns or "killed" in options.patterns:
        ok = check_killed() and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
