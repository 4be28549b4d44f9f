"""Parameters that are parts of logical tensors: the values are the same on every mesh, and the place of every part is
known."""
import dataclasses
import zlib
from typing import Dict, Iterator, Optional, Tuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

REPLICATED = "replicated"  # on every rank of the stage, each with gradients of its own tokens
TENSOR = "tensor"  # cut over tp; gradients of the tokens of its tp group
EXPERT = "expert"  # cut over etp and ep; gradients of the tokens of its etp·ep group


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a parameter is in its logical tensor."""

    kind: str
    shape: Tuple[int, ...]  # of the logical tensor
    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]
    scale: Optional[float]  # of the first values, which are normal; None: ones

    @property
    def slices(self) -> Tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes))


class Parts(nn.Module):
    """A module whose parameters are made by `add_part`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Dict[str, Part] = {}

    def add_part(
        self,
        name: str,
        shape: Tuple[int, ...],
        kind: str = REPLICATED,
        *,
        cuts: Optional[Dict[int, range]] = None,
        scale: Optional[float] = 0.02,
    ) -> None:
        """`cuts`: dimension -> this rank's part of it; other dimensions are whole."""
        ranges = [(cuts or {}).get(dim, range(size)) for dim, size in enumerate(shape)]
        offsets, sizes = tuple(each.start for each in ranges), tuple(len(each) for each in ranges)
        self.parts[name] = Part(kind, shape, offsets, sizes, scale)
        self.register_parameter(name, nn.Parameter(torch.empty(sizes)))


def parts_of(model: nn.Module) -> Iterator[Tuple[str, nn.Parameter, Part]]:
    """Name, parameter and part of all parameters, in the order of the model."""
    for prefix, module in model.named_modules():
        if isinstance(module, Parts):
            for name, part in module.parts.items():
                yield f"{prefix}.{name}".lstrip("."), getattr(module, name), part


def initialise(model: nn.Module, seed: int) -> None:
    """Values that depend only on the seed and the parameter's name."""
    for name, parameter, part in parts_of(model):
        full = torch.ones(part.shape, dtype=torch.float64)
        if part.scale is not None:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            full = part.scale * torch.randn(part.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(full[part.slices])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP may have sharded; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The part without the shards of FSDP. Collective over the ranks that share them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`value` sharded as FSDP has sharded the parameter. Not collective."""
    if not isinstance(parameter, DTensor):
        return value.clone()
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
