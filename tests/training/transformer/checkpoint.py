"""Checkpoints: one safetensors file of logical tensors, so that any mesh can read what another mesh wrote.

A file is written under a temporary name, flushed to the disk and renamed: a file with a checkpoint's name is complete.
"""
import json
import os
import pathlib
from typing import Any, Callable, Dict, List, Optional

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist

from mesh import Mesh
from model import Stage
from parameters import EXPERT, REPLICATED, TENSOR, Part, parts_of, shard_like, whole

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
# The rank that saves a part has coordinate 0 on these axes.
COPIED_ALONG = {REPLICATED: ("tp", "cp", "dp"), TENSOR: ("cp", "dp"), EXPERT: ("edp",)}


def collect(
    stage: Stage, mesh: Mesh, value_of: Callable[[torch.nn.Parameter], torch.Tensor]
) -> Dict[str, torch.Tensor]:
    """Logical tensors of all stages, on the first rank of the mesh; {} elsewhere. Collective."""
    mine = []
    for name, parameter, part in parts_of(stage):
        value = whole(value_of(parameter)).detach()  # a part without FSDP's shards
        if all(mesh.at[axis] == 0 for axis in COPIED_ALONG[part.kind]):
            mine.append((name, part, value.clone()))
    found: Dict[str, torch.Tensor] = {}
    for received in _gather(mine, mesh):
        for name, part, value in received:
            found.setdefault(name, value.new_zeros(part.shape))[part.slices] = value
    return found


def _gather(value: Any, mesh: Mesh) -> List[Any]:
    """The ranks' objects, on the first rank; [] elsewhere."""
    received = [None] * mesh.size("world") if mesh.rank == 0 else None
    dist.gather_object(value, received, dst=0, group=mesh.group("world"))
    return received or []


def _router_biases(stage: Stage) -> Dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in stage.named_buffers() if name.endswith("selection_bias")}


def save(
    folder: pathlib.Path, training: Dict[str, Any], stage: Stage, optimizer: torch.optim.Optimizer, mesh: Mesh
) -> None:
    """`training`: the step and any other state, as JSON. Collective; a failure to write is an error on every rank."""
    tensors = {f"model/{name}": value for name, value in collect(stage, mesh, lambda p: p).items()}
    for moment in MOMENTS:
        for name, value in collect(stage, mesh, lambda p: optimizer.state[p][moment]).items():
            tensors[f"{moment}/{name}"] = value
    for biases in _gather(_router_biases(stage), mesh):
        tensors.update({f"router/{name}": value.clone() for name, value in biases.items()})
    failure: List[Optional[str]] = [None]
    if mesh.rank == 0:
        try:
            _write(folder / f"step_{training['step']:08d}.safetensors", tensors, training)
        except OSError as error:
            failure = [f"cannot write the checkpoint: {error}"]
    dist.broadcast_object_list(failure, src=0, group=mesh.group("world"))
    if failure[0] is not None:
        raise RuntimeError(failure[0])


def _write(path: pathlib.Path, tensors: Dict[str, torch.Tensor], training: Dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    safetensors.torch.save_file(tensors, temporary, metadata={"training": json.dumps(training)})
    _flush(temporary)
    os.replace(temporary, path)
    _flush(path.parent)


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def newest(folder: pathlib.Path) -> Optional[pathlib.Path]:
    return max(folder.glob("step_*.safetensors"), default=None)


@torch.no_grad()
def load(path: pathlib.Path, stage: Stage, optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """Reads this rank's parts. Returns `training` of `save`."""
    with safetensors.safe_open(path, framework="pt") as file:
        training = json.loads(file.metadata()["training"])
        for name, parameter, part in parts_of(stage):
            parameter.copy_(_read(file, f"model/{name}", part, parameter))
            moments = {moment: _read(file, f"{moment}/{name}", part, parameter) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(training["step"])), **moments}
        for name, bias in _router_biases(stage).items():
            bias.copy_(file.get_tensor(f"router/{name}"))
    return training


def _read(file: Any, key: str, part: Part, parameter: torch.Tensor) -> torch.Tensor:
    if 0 in part.sizes:
        return shard_like(torch.zeros(part.sizes, dtype=parameter.dtype), parameter)
    return shard_like(file.get_slice(key)[part.slices].to(parameter.dtype), parameter)
