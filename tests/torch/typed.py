#!/usr/bin/env python3
"""Checks typed_program.py, a user's program, with pyright's strict mode, and runs it: typed.py"""
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import crossdock

PROGRAM = pathlib.Path(__file__).resolve().parent / "typed_program.py"
CONFIG = {
    "include": [str(PROGRAM)],
    "extraPaths": [str(pathlib.Path(crossdock.__file__).resolve().parents[1])],
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": "error",
}


def main():
    found = next((name for name in ("basedpyright", "pyright") if importlib.util.find_spec(name)), None)
    if found is None:
        print("typed_program.py: not checked, because pyright is not installed (pip install basedpyright)")
    else:
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "pyrightconfig.json"
            config.write_text(json.dumps(CONFIG))
            command = [sys.executable, "-m", found, "--project", str(config), "--pythonpath", sys.executable]
            checked = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if checked.returncode != 0:
            sys.exit(checked.stdout + checked.stderr)
        print(f"typed_program.py: no errors in {found}'s strict mode")
    subprocess.run([sys.executable, "-B", str(PROGRAM)], check=True, timeout=600)


if __name__ == "__main__":
    main()
