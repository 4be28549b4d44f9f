#!/usr/bin/env python3
"""Fails if a folder includes a folder it may not see. The table is the architecture (docs/architecture.md)."""
import pathlib
import re
import sys

MAY_SEE = {
    "core": set(),
    "ops": {"core"},
    "comm": {"core"},
    "mesh": {"core"},
    "reference": {"core"},
    "router": {"core", "ops"},
    "experts": {"core", "ops"},
    "dispatch": {"core", "ops", "comm", "mesh"},
    "layer": {"core", "comm", "mesh", "router", "dispatch", "experts"},
    "conformance": {"core"},  # and the public headers
    "planner": {"core", "mesh", "dispatch"},
    "model": {"core", "ops", "comm", "mesh", "layer"},
}
MAY_SEE["capi"] = set(MAY_SEE)
USERS = ("cli", "bench", "examples")  # see include/crossdock and headers of their own

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)
SEES = re.compile(r"\bSEES\s+((?:[a-z]+\s*)+)")
FRAMEWORK = re.compile(r"^(torch|ATen|c10|pybind11|nanobind)/|^(Python|pybind11)\.h$")
SUFFIXES = {".hpp", ".h", ".cpp", ".c", ".cuh", ".cu"}


def forbidden(top, folder, header):
    """Why a file of `top`/[`folder`/] may not include `header`; None if it may."""
    target = header.split("/")[0]
    if ".." in header.split("/"):
        return "paths start at include/ or src/, without .."
    if top in ("src", "include") and FRAMEWORK.search(header):
        return "framework headers have no place in the library"
    if top == "python" and target == "crossdock" and header != "crossdock/crossdock.h":
        return "python/ sees crossdock/crossdock.h alone"
    if target not in MAY_SEE:
        return None
    if top == "src" and target in {folder} | MAY_SEE[folder]:
        return None
    return f"{folder if top == 'src' else top}/ may not include {target}/"


def check(root):
    errors = []
    for top in ("src", "include", "python", *USERS):
        for path in sorted(p for p in (root / top).rglob("*") if p.suffix in SUFFIXES):
            name, folder = path.relative_to(root), path.relative_to(root / top).parts[0]
            if top == "src" and folder not in MAY_SEE:
                errors.append(f"{name}: src/{folder}/ is not in the table of tools/check_layers.py")
                continue
            for header in INCLUDE.findall(path.read_text()):
                if reason := forbidden(top, folder, header):
                    errors.append(f'{name}: "{header}": {reason}')
    for path in sorted((root / "src").glob("*/CMakeLists.txt")):
        folder = path.parent.name
        for names in SEES.findall(path.read_text()):
            for target in sorted(set(names.split()) - MAY_SEE.get(folder, set())):
                errors.append(f"{path.relative_to(root)}: SEES {target}: {folder}/ may not see {target}/")
    return errors


if __name__ == "__main__":
    found = check(pathlib.Path(__file__).resolve().parents[1])
    print("\n".join(found) or "layers: ok")
    sys.exit(bool(found))
