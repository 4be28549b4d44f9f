#!/usr/bin/env python3
"""Runs the PyTorch programs of README, docs/pytorch.md, tutorial and examples as a reader would: under torchrun, on 4 ranks: readme.py

All programs share one launch, because most of a short program's time is the import of torch.
"""
import contextlib
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile

from launch import PATIENCE

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD = 4


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def programs(page):
    """The blocks that a reader can copy to a file and launch."""
    return [code for code in python_blocks(page) if "init_process_group" in code and "destroy_process_group" in code]


def as_program(lines):
    """A program of the README's two lines."""
    begin = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    return begin + lines + "print(layer(torch.randn(3, 512)).shape)\ndist.destroy_process_group()\n"


def run_as_rank(folder, scripts):
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    init = dist.init_process_group
    fresh = torch.get_rng_state()
    for script in scripts:
        name = pathlib.Path(script).stem
        torch.set_rng_state(fresh)  # as in a process of its own
        # torchrun's store still has the addresses of the programs before.
        dist.init_process_group = lambda backend, name=name: init(
            backend, store=dist.PrefixStore(name, store), rank=rank, world_size=world
        )
        with open(f"{folder}/{name}.{rank}.txt", "w") as output, contextlib.redirect_stdout(output):
            runpy.run_path(script, run_name="__main__")


def launch(folder, scripts):
    """Returns what each script printed: a list of texts, one per rank."""
    command = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    command += [__file__, "--in", folder, *map(str, scripts)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return {script.stem: [pathlib.Path(f"{folder}/{script.stem}.{rank}.txt").read_text() for rank in range(WORLD)] for script in scripts}


def check_training(outputs):
    losses = [float(re.search(r"loss (\S+)", output).group(1)) for output in outputs]
    assert all(loss < 0.5 for loss in losses), outputs  # 1 before training


def check_comparison(outputs):
    for output in outputs:
        other, ours = map(float, re.search(r"\[(\S+), (\S+)\]", output).groups())
        assert abs(other - ours) <= 1e-6, outputs


def first_blocks(page, folder):
    """The first three blocks of the page, a layer, its training and its checkpoint, as one program."""
    code = [f"folder = {folder!r}", *python_blocks(page)[:3]]
    code.insert(2, "first = (layer(x) - x).square().mean().item()")
    code += ["again = (layer(x) - x).square().mean().item()"]
    code += ["print('loss', first, again, layer.expert_bias.abs().max().item())", "dist.destroy_process_group()"]
    return "\n".join(code)


def dispatcher_block(page):
    """The block of the page that uses a dispatcher."""
    (code,) = [code for code in python_blocks(page) if "import Dispatcher" in code]
    begin = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ntorch.manual_seed(dist.get_rank())\n"
    return begin + code + "dist.destroy_process_group()\n"


def check_first_blocks(outputs):
    for output in outputs:
        first, again, bias = map(float, re.search(r"loss (\S+) (\S+) (\S+)", output).groups())
        assert again < first and bias > 0, outputs


def check_example(outputs):
    assert outputs[0].count("equal") == 5 and "DIFFERENT" not in outputs[0], outputs


def main():
    training = programs("README.md")
    comparison = programs("docs/tutorial.md")
    assert len(training) == 1 and len(comparison) == 1, "README and tutorial each have one program to copy"
    two_lines = next(code for code in python_blocks("README.md") if "MoELayer" in code)
    assert two_lines.count("\n") == 2, "the README says two lines"
    lines = [line for line in training[0].split("\n") if line.strip()]
    assert "optimizer.step()" in lines[9], "the README says that ten lines train a layer"
    steps = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
    assert len(steps) == 5, steps
    with tempfile.TemporaryDirectory() as folder:
        scripts = {"readme_training": training[0], "tutorial_comparison": comparison[0], "readme_layer": as_program(two_lines)}
        scripts["pytorch_page"] = first_blocks("docs/pytorch.md", f"{folder}/checkpoint")
        scripts["pytorch_dispatcher"] = dispatcher_block("docs/pytorch.md")
        for name, code in scripts.items():
            (pathlib.Path(folder) / f"{name}.py").write_text(code)
        files = [*(pathlib.Path(folder) / f"{name}.py" for name in scripts), ROOT / "examples" / "08_torch.py", *steps]
        printed = launch(folder, files)
    check_training(printed["readme_training"])
    check_comparison(printed["tutorial_comparison"])
    check_first_blocks(printed["pytorch_page"])
    check_example(printed["08_torch"])
    for output in printed["pytorch_dispatcher"]:
        assert "experts 0 to 3" in output and "torch.float8_e4m3fn" in output, printed
    assert printed["readme_layer"] == ["torch.Size([3, 512])\n"] * WORLD, printed
    for step in steps:  # each checks its own results
        assert printed[step.stem][0], f"{step.name} printed nothing"
    print("README, docs/pytorch.md, tutorial and example: passed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        run_as_rank(sys.argv[2], sys.argv[3:])
    else:
        main()
