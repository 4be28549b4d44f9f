#!/usr/bin/env python3
"""Runs the PyTorch examples of README and docs/pytorch.md, and examples/08_torch.py, under torchrun, as a reader would."""
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


def check_first_blocks():
    """docs/pytorch.md: a layer, its training, its checkpoint; the loss falls and the loaded layer has it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/pytorch.md").read_text(), re.MULTILINE | re.DOTALL)[:3]
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "first_blocks.py"
        code = [f"folder = {folder + '/checkpoint'!r}", blocks[0], "first = (layer(x) - x).square().mean().item()", *blocks[1:]]
        code += ["again = (layer(x) - x).square().mean().item()", "print('loss', first, again, layer.expert_bias.abs().max().item())"]
        script.write_text("\n".join(code))
        output = run(script)
    found = re.findall(r"loss (\S+) (\S+) (\S+)", output)
    assert len(found) == WORLD, output
    for first, again, bias in found:
        assert float(again) < float(first) and float(bias) > 0, output


def check_example():
    output = run(ROOT / "examples" / "08_torch.py")
    assert output.count("equal") == 5 and "DIFFERENT" not in output, output


if __name__ == "__main__":
    check_readme()
    check_first_blocks()
    check_example()
    print("README, docs/pytorch.md and example: passed")
