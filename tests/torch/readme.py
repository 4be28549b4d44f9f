#!/usr/bin/env python3
"""Runs the README's PyTorch example and examples/08_torch.py under torchrun, as a reader would: readme.py"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from launch import PATIENCE

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD = 4


def run(script):
    command = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command + [str(script)], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_readme():
    section = (ROOT / "README.md").read_text().split("## PyTorch\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    assert sum(1 for line in code.split("\n") if line.strip()) == 10, "the README says ten lines"
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "ten_lines.py"
        script.write_text(code)
        output = run(script)
    pairs = re.findall(r"\[(\S+), (\S+)\]", output)  # ranks may print into each other's lines
    assert len(pairs) == WORLD, output
    for other, ours in pairs:
        assert abs(float(other) - float(ours)) <= 1e-6, output


def check_example():
    output = run(ROOT / "examples" / "08_torch.py")
    assert output.count("equal") == 5 and "DIFFERENT" not in output, output


if __name__ == "__main__":
    check_readme()
    check_example()
    print("README and example: passed")
