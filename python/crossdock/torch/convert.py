"""Weights of transformers' MoE models as the state_dict of a MoELayer, and back.

transformers 5 holds the experts of a layer in fused tensors, and its `save_pretrained` writes the files in each family's own
format. Both are read, and both can be made:

| | in memory | in files |
|---|---|---|
| qwen3_moe, deepseek_v3 | mlp.experts.gate_up_proj [E, 2F, D], down_proj [E, D, F] | mlp.experts.<e>.gate_proj.weight, ... |
| mixtral | the same | block_sparse_moe.experts.<e>.{w1,w3,w2}.weight |
| gpt_oss | gate_up_proj [E, D, 2F], columns gate 0, linear 0, gate 1, ...; down_proj [E, F, D]; biases | the same |
"""
import json
import pathlib
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch


class _Family(NamedTuple):
    router: str = "gate"
    projections: Tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  #: of an expert in files; (): as in memory
    block_in_files: str = "mlp"
    expert_bias: bool = False
    shared: bool = False
    is_transposed: bool = False  #: and interleaved, with biases


FAMILIES = {  # by config.model_type
    "qwen3_moe": _Family(),
    "mixtral": _Family(projections=("w1", "w3", "w2"), block_in_files="block_sparse_moe"),
    "deepseek_v3": _Family(expert_bias=True, shared=True),
    "gpt_oss": _Family(router="router", projections=(), is_transposed=True),
}


def from_transformers(
    tensors: Mapping[str, torch.Tensor], family: str, prefix: str = "", *, experts: Optional[Sequence[int]] = None
) -> Dict[str, torch.Tensor]:
    """The state_dict of a MoELayer (not interleaved) with the weights of one decoder layer.

    Args:
        tensors: by name: a model's state_dict, or `TransformersFiles(folder)`, of which only what is needed is read.
        family: "qwen3_moe", "mixtral", "deepseek_v3" or "gpt_oss" (`config.model_type`).
        prefix: of the decoder layer, such as "model.layers.3.".
        experts: the experts to take: `layer.dispatcher.local_experts`. Default: all, which a layer on any rank loads.
    """
    of, source = _family(family), _Source(tensors)
    block = prefix + "mlp."
    if block + "experts.gate_up_proj" not in tensors and of.projections:
        block = f"{prefix}{of.block_in_files}."
    gate = source.take(f"{block}{of.router}.weight")
    ids = list(range(gate.shape[0]) if experts is None else experts)
    found = {"router.weight": gate}
    if block + "experts.gate_up_proj" in tensors or of.is_transposed:
        w1, w2 = (source.rows(f"{block}experts.{name}", ids) for name in ("gate_up_proj", "down_proj"))
        if of.is_transposed:
            w1, w2 = _separated(w1.transpose(1, 2)), w2.transpose(1, 2)
            found["experts.b1"] = _separated(source.rows(f"{block}experts.gate_up_proj_bias", ids))
            found["experts.b2"] = source.rows(f"{block}experts.down_proj_bias", ids)
            found["router.bias"] = source.take(f"{block}{of.router}.bias")
    else:
        read = ids or [0]  # a rank without experts needs their shapes
        parts = [[source.take(f"{block}experts.{e}.{name}.weight") for name in of.projections] for e in read]
        w1 = torch.stack([torch.cat(part[:2]) for part in parts])[: len(ids)]
        w2 = torch.stack([part[2] for part in parts])[: len(ids)]
    found["experts.w1"], found["experts.w2"] = w1.contiguous(), w2.contiguous()
    if of.expert_bias:
        found["expert_bias"] = source.take(f"{block}{of.router}.e_score_correction_bias")
    if of.shared:
        parts = [source.take(f"{block}shared_experts.{name}.weight") for name in of.projections]
        found["shared.w1"], found["shared.w2"] = torch.cat(parts[:2])[None], parts[2][None]
    return found


def to_transformers(
    state: Mapping[str, torch.Tensor],
    family: str,
    prefix: str = "",
    *,
    form: str = "files",
    experts: Optional[Sequence[int]] = None,
) -> Dict[str, torch.Tensor]:
    """The opposite of `from_transformers`: the weights of a decoder layer under transformers' names.

    Args:
        state: of a MoELayer (not interleaved) with all experts, or with `experts`.
        form: "files", as save_pretrained writes them, or "memory", as a model's load_state_dict takes them.
        experts: the numbers of the experts in `state`, for one file per rank. Only forms with a tensor per expert have parts.
    """
    of = _family(family)
    if form not in ("files", "memory"):
        raise ValueError(f'form must be "files" or "memory", got {form!r}')
    block = prefix + (of.block_in_files if form == "files" else "mlp") + "."
    num_experts, (w1, w2) = state["router.weight"].shape[0], (state["experts.w1"], state["experts.w2"])
    ids = list(range(num_experts) if experts is None else experts)
    is_fused = form == "memory" or not of.projections
    if w1.shape[0] != (num_experts if is_fused else len(ids)):
        raise ValueError(
            f"state must have {num_experts if is_fused else len(ids)} experts, got {w1.shape[0]}; for one tensor of all "
            "experts, load a checkpoint of the layer on one rank first (docs/checkpoints.md)"
        )
    made = {f"{block}{of.router}.weight": state["router.weight"]}
    if is_fused:
        if of.is_transposed:
            made[f"{block}{of.router}.bias"] = state["router.bias"]
            made[f"{block}experts.gate_up_proj_bias"] = _interleaved(state["experts.b1"])
            made[f"{block}experts.down_proj_bias"] = state["experts.b2"]
            w1, w2 = _interleaved(w1).transpose(1, 2), w2.transpose(1, 2)
        made[f"{block}experts.gate_up_proj"], made[f"{block}experts.down_proj"] = w1, w2
    else:
        for row, expert in enumerate(ids):
            parts = (*w1[row].chunk(2), w2[row])
            made.update((f"{block}experts.{expert}.{name}.weight", part) for name, part in zip(of.projections, parts))
    if of.expert_bias:
        made[f"{block}{of.router}.e_score_correction_bias"] = state["expert_bias"]
    if of.shared:
        parts = (*state["shared.w1"][0].chunk(2), state["shared.w2"][0])
        made.update((f"{block}shared_experts.{name}.weight", part) for name, part in zip(of.projections, parts))
    return {name: tensor.contiguous() for name, tensor in made.items()}


class TransformersFiles(Mapping[str, torch.Tensor]):
    """The tensors in a folder that save_pretrained wrote, by name, each read when asked for. Needs safetensors.

    Close it, or use it in a `with` statement.
    """

    def __init__(self, folder: Union[str, "pathlib.Path"]):
        from safetensors import safe_open

        path = pathlib.Path(folder)
        index = path / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
        self._files = [safe_open(str(path / name), framework="pt") for name in names]
        self._file_of = {key: file for file in self._files for key in file.keys()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Reads these rows of a tensor only."""
        part = self._file_of[name].get_slice(name)
        return torch.cat([part[row : row + 1] for row in rows or [0]])[: len(rows)]

    def close(self) -> None:
        self._file_of.clear()
        while self._files:
            self._files.pop().__exit__(None, None, None)

    def __enter__(self) -> "TransformersFiles":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Source:
    """Finds tensors, and says what is wrong if they are not there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = tensors

    def take(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            self._fail(name)
        tensor = self.tensors[name]
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ValueError(f"{name} must be fp64, fp32, bf16 or fp16, got {tensor.dtype}; {_DEQUANTISE}")
        return tensor

    def rows(self, name: str, rows: List[int]) -> torch.Tensor:
        if name not in self.tensors:
            self._fail(name)
        read = getattr(self.tensors, "rows", None)
        return read(name, rows) if read else self.take(name)[rows]

    def _fail(self, name: str) -> None:
        near = sorted(other for other in self.tensors if other.startswith(name.split("experts.")[0]))
        quantised = any(other.endswith(("_blocks", "_scales", "_scale_inv")) for other in near)
        shown = ", ".join(near[:4]) or ", ".join(sorted(self.tensors)[:4])
        advice = _DEQUANTISE if quantised else "check family and prefix"
        raise ValueError(f"there is no tensor {name}; {advice}; there are {len(self.tensors)}, such as {shown}")


_DEQUANTISE = "the weights are quantised: load the model with transformers, dequantised, and convert its state_dict"


def _family(name: str) -> _Family:
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def _separated(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2F, ...] gate 0, linear 0, gate 1, ... -> the gates, then the linear rows."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """The opposite of `_separated`."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
