#!/usr/bin/env python3
"""Fails if a folder includes a folder it may not include. docs/architecture.md shows the same table."""
import pathlib
import re
import sys

MAY_SEE = {
    "core": set(),
    "core/cuda": {"core"},
    "ops": {"core", "core/cuda"},
    "comm": {"core"},
    "comm/memory": {"core", "comm"},
    "comm/agreement": {"core", "comm", "comm/memory"},
    "comm/sums": {"core", "comm", "comm/memory", "comm/agreement"},
    "comm/polled": {"core", "comm"},
    "comm/threads": {"core", "comm", "comm/memory"},
    "comm/mpi": {"core", "comm", "comm/polled"},
    "comm/sockets": {"core", "comm", "comm/memory", "comm/polled"},
    "comm/cuda": {"core", "core/cuda", "comm", "comm/memory", "comm/agreement"},
    "comm/nccl": {"core", "comm"},
    "mesh": {"core", "comm", "comm/agreement"},
    "sequence": {"core", "ops", "comm", "comm/agreement", "comm/memory"},
    "router": {"core", "ops"},
    "router/cuda": {"core", "core/cuda", "ops", "router"},
    "experts": {"core", "ops"},
    "experts/cuda": {"core", "core/cuda", "ops", "experts"},
    "plan": {"core"},
    "plan/cuda": {"core", "core/cuda", "comm/cuda", "plan"},
    "cost": {"core", "plan"},
    "dispatch/host": {"core", "ops", "comm", "comm/agreement", "comm/memory", "plan", "dispatch"},
    "dispatch/cuda/kernels": {"core", "core/cuda", "comm/cuda", "plan/cuda"},
    "layer": {"core", "comm", "comm/agreement", "router", "experts"},
    "layer/cuda": {"core", "core/cuda", "comm", "comm/cuda", "layer"},
    "planner": {"core", "plan", "cost"},
    "capi": {"core", "comm"},  # C to C++ and back; everything else through the public headers
    "testing": {"core"},  # and the public headers
}
MAY_SEE["dispatch/cuda"] = {"core", "core/cuda", "comm", "comm/agreement", "comm/cuda", "comm/nccl", "ops", "plan",
                            "plan/cuda", "dispatch", "dispatch/host", "dispatch/cuda/kernels"}
MAY_SEE["dispatch/strategies"] = {"core", "core/cuda", "comm", "comm/memory", "ops", "plan", "plan/cuda", "dispatch",
                                  "dispatch/host", "dispatch/cuda", "dispatch/cuda/kernels"}
MAY_SEE["dispatch"] = {"core", "ops", "comm", "plan", "cost", "dispatch/host", "dispatch/strategies"}
MODULES = {room.split("/")[0] for room in MAY_SEE}
USERS = ("cli", "bench", "examples")  # may include include/crossdock and their own headers
DLPACK = "capi/dlpack.hpp"  # DLPack's structs, for python/ too
KERNEL_BENCHMARKS = "bench/kernels/"  # may also include ops: kernels without a public interface

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)
SEES = re.compile(r"\bSEES\s+((?:[a-z]+\s*)+)")
FRAMEWORK = re.compile(r"^(torch|ATen|c10|pybind11|nanobind)/|^(Python|pybind11)\.h$")
SUFFIXES = {".hpp", ".h", ".cpp", ".c", ".cuh", ".cu"}


def room_of(path):
    """The folder of the table that a path belongs to, e.g. "dispatch/host" for dispatch/host/wire.hpp; None if there is
    none."""
    parts = path.split("/")[:-1]
    for size in range(len(parts), 0, -1):
        if "/".join(parts[:size]) in MAY_SEE:
            return "/".join(parts[:size])
    return None


def forbidden(top, room, header):
    """Why a file in `top`/[`room`/] may not include `header`; None if it may."""
    target = room_of(header)
    if top == "python" and header == DLPACK:
        return None
    if ".." in header.split("/"):
        return "paths start at include/ or src/, without .."
    if top in ("src", "include") and FRAMEWORK.search(header):
        return "framework headers have no place in the library"
    if top == "python" and header.startswith("crossdock/") and header != "crossdock/crossdock.h":
        return f"python/ sees crossdock/crossdock.h and {DLPACK} alone"
    if target is None or (top == "src" and target in {room} | MAY_SEE[room]):
        return None
    return f"{room if top == 'src' else top}/ may not include {target}/"


def modules_seen(module):
    """The modules that a module's folders may include."""
    return {target.split("/")[0] for room in MAY_SEE if room.split("/")[0] == module for target in MAY_SEE[room]}


def check(root):
    errors = []
    for top in ("src", "include", "python", *USERS):
        for path in sorted(p for p in (root / top).rglob("*") if p.suffix in SUFFIXES):
            name, room = path.relative_to(root), room_of(path.relative_to(root / top).as_posix())
            if top == "src" and room is None:
                errors.append(f"{name}: its folder is not in the table of tools/check_layers.py")
                continue
            for header in INCLUDE.findall(path.read_text()):
                if name.as_posix().startswith(KERNEL_BENCHMARKS) and room_of(header) == "ops":
                    continue
                if reason := forbidden(top, room, header):
                    errors.append(f'{name}: "{header}": {reason}')
    for path in sorted((root / "src").glob("*/CMakeLists.txt")):
        module = path.parent.name
        for names in SEES.findall(path.read_text()):
            for target in sorted((set(names.split()) & MODULES) - modules_seen(module)):
                errors.append(f"{path.relative_to(root)}: SEES {target}: {module}/ may not see {target}/")
    return errors


if __name__ == "__main__":
    found = check(pathlib.Path(__file__).resolve().parents[1])
    print("\n".join(found) or "layers: ok")
    sys.exit(bool(found))
