"""Two grids over the same ranks: attention is tp x cp x dp x pp, the experts are etp x ep x edp x pp.

The first axis is the fastest. Both grids have the same pipeline stages.
"""
import dataclasses
from typing import Dict, List, Sequence, Tuple

import torch.distributed as dist

AXES = {"attention": ("tp", "cp", "dp", "pp"), "experts": ("etp", "ep", "edp", "pp")}

# Name of a group -> grid, and the axes along which its ranks differ.
GROUPS = {
    "tp": ("attention", ("tp",)),  # holds shards of the attention weights, and of the sequence between them
    "cp": ("attention", ("cp",)),  # holds parts of the same sequences
    "data": ("attention", ("cp", "dp")),  # same attention weights, different tokens
    "tokens": ("attention", ("tp", "cp", "dp")),  # all ranks of a stage: different tokens
    "experts": ("experts", ("etp", "ep")),  # exchanges rows: every expert once
    "edp": ("experts", ("edp",)),  # same experts
    "world": ("attention", ("tp", "cp", "dp", "pp")),
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"{name} ({size}) must be at least 1")
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.etp * self.ep):
            raise ValueError(
                f"tp*cp*dp ({self.tp}*{self.cp}*{self.dp} = {ranks}) must be a multiple of "
                f"etp*ep ({self.etp}*{self.ep} = {self.etp * self.ep})"
            )

    @property
    def edp(self) -> int:
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def sizes(self, grid: str) -> List[int]:
        return [getattr(self, axis) for axis in AXES[grid]]

    def coordinates(self, rank: int) -> Dict[str, int]:
        """Of a rank, in both grids."""
        found = {}
        for grid, axes in AXES.items():
            rest = rank
            for axis, size in zip(axes, self.sizes(grid)):
                found[axis] = rest % size
                rest //= size
        return found

    def ranks_of(self, grid: str, along: Sequence[str], rank: int) -> Tuple[int, ...]:
        """The ranks that differ from `rank` in these axes only, ascending."""
        mine = self.coordinates(rank)
        fixed = [axis for axis in AXES[grid] if axis not in along]

        def belongs(other: int) -> bool:
            theirs = self.coordinates(other)
            return all(theirs[axis] == mine[axis] for axis in fixed)

        return tuple(other for other in range(self.world) if belongs(other))

    def __str__(self) -> str:
        parts = [f"{name}{size}" for name, size in dataclasses.asdict(self).items() if size > 1]
        return "·".join(parts) or "1 rank"


_process_groups: Dict[Tuple[int, ...], dist.ProcessGroup] = {}


def make_groups(shape: MeshShape) -> None:
    """The process groups of all ranks of a mesh, each made once. Called by every process, even those outside the
    mesh."""
    for along in GROUPS.values():
        for ranks in sorted({shape.ranks_of(*along, rank) for rank in range(shape.world)}):
            if ranks not in _process_groups:
                _process_groups[ranks] = dist.new_group(list(ranks))


class Mesh:
    """The place and the groups of this rank, one of the first `shape.world` ranks of torch.distributed. Collective over
    all processes, unless `make_groups` was called before."""

    def __init__(self, shape: MeshShape):
        if dist.get_world_size() < shape.world:
            raise ValueError(f"{shape} needs {shape.world} ranks, there are {dist.get_world_size()}")
        make_groups(shape)
        self.shape = shape
        self.rank = dist.get_rank()
        self.at = shape.coordinates(self.rank)  # axis -> coordinate
        self._ranks = {name: shape.ranks_of(*along, self.rank) for name, along in GROUPS.items()}

    def group(self, name: str) -> dist.ProcessGroup:
        return _process_groups[self._ranks[name]]

    def size(self, name: str) -> int:
        return len(self._ranks[name])

    def neighbour(self, stages: int) -> int:
        """The rank in the same place, `stages` pipeline stages further on."""
        return self.rank + stages * (self.shape.world // self.shape.pp)

    @property
    def is_first_stage(self) -> bool:
        return self.at["pp"] == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at["pp"] == self.shape.pp - 1
