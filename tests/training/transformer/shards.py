"""Which tokens a rank holds: the one place that turns local positions into global ones.

A micro-batch has rows; a row is packed with sequences of unequal length. Rows are divided over dp. Every sequence is
cut into 2·cp chunks, and rank c of cp holds chunks c and 2·cp - 1 - c, so that all do the same causal work ("zigzag").
A rank's part of each row is then cut into tp parts. Any part may be empty.
"""
import dataclasses
from typing import List, Sequence, Tuple

import torch

from mesh import Mesh, MeshShape

Row = List[bytes]  # documents; n + 1 bytes are n tokens and their targets


def part(length: int, parts: int, index: int) -> range:
    """The index-th of `parts` parts of ⌈length / parts⌉; the last ones may be shorter or empty."""
    size = -(-length // parts)
    return range(min(index * size, length), min((index + 1) * size, length))


def even_part(count: int, parts: int, index: int) -> range:
    """The index-th of `parts` parts that differ by at most one, the longer ones first."""
    each, more = divmod(count, parts)
    start = index * each + min(index, more)
    return range(start, start + each + (1 if index < more else 0))


def zigzag(length: int, cp: int, index: int) -> List[int]:
    """The positions of a sequence that rank `index` of cp holds."""
    return [*part(length, 2 * cp, index), *part(length, 2 * cp, 2 * cp - 1 - index)]


def shard_of_rows(row_lengths: Sequence[int], parts: int, index: int) -> List[int]:
    """Cuts every row separately. Returns positions in the tensor of all rows, concatenated."""
    found, start = [], 0
    for length in row_lengths:
        found += [start + position for position in part(length, parts, index)]
        start += length
    return found


def places_of_gathered(row_lengths: Sequence[int], parts: int) -> List[int]:
    """Place in the tensor of all rows of each token of the concatenated shards."""
    return [place for index in range(parts) for place in shard_of_rows(row_lengths, parts, index)]


@dataclasses.dataclass
class Held:
    """Tokens that a rank of cp holds before the cut into tp parts."""

    row_lengths: List[int]
    tokens: List[int]
    targets: List[int]
    sequences: List[int]  # number of each token's sequence
    positions: List[int]  # in its sequence


def held_by(rows: Sequence[Row], cp: int, index: int) -> Held:
    held = Held([], [], [], [], [])
    sequence = 0
    for row in rows:
        before = len(held.tokens)
        for document in row:
            mine = zigzag(len(document) - 1, cp, index)
            held.tokens += [document[position] for position in mine]
            held.targets += [document[position + 1] for position in mine]
            held.sequences += [sequence] * len(mine)
            held.positions += mine
            sequence += 1
        held.row_lengths.append(len(held.tokens) - before)
    return held


@dataclasses.dataclass
class Shard:
    """One rank's part of a micro-batch. T tokens here, T_cp on the ranks of its tp group together."""

    tokens: torch.Tensor  # [T]
    targets: torch.Tensor  # [T]
    tp_counts: List[int]  # tokens of each rank of tp
    places: torch.Tensor  # [T_cp] of each gathered token, see places_of_gathered
    order: torch.Tensor  # [T_cp] the inverse: the gathered token at each place
    positions: torch.Tensor  # [T_cp]
    cp_counts: List[int]  # tokens of each rank of cp
    key_positions: torch.Tensor  # [Σ cp_counts]
    visible: torch.Tensor  # [T_cp, Σ cp_counts] bool: keys that a query may see
    micro_batch_tokens: int  # on all ranks of the stage
    step_tokens: int  # the same, of all micro-batches of the step

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


def shard_micro_batch(rows: Sequence[Row], shape: MeshShape, at: dict, step_tokens: int) -> Shard:
    """The part held by the rank at these coordinates."""
    mine = [rows[index] for index in part(len(rows), shape.dp, at["dp"])]
    of_cp = [held_by(mine, shape.cp, index) for index in range(shape.cp)]
    held = of_cp[at["cp"]]
    local = shard_of_rows(held.row_lengths, shape.tp, at["tp"])
    places = integers(places_of_gathered(held.row_lengths, shape.tp))
    sequences, positions = integers(held.sequences), integers(held.positions)
    key_sequences = integers([sequence for each in of_cp for sequence in each.sequences])
    key_positions = integers([position for each in of_cp for position in each.positions])
    visible = (sequences[:, None] == key_sequences) & (positions[:, None] >= key_positions)
    return Shard(
        tokens=integers([held.tokens[index] for index in local]),
        targets=integers([held.targets[index] for index in local]),
        tp_counts=[len(shard_of_rows(held.row_lengths, shape.tp, index)) for index in range(shape.tp)],
        places=places,
        order=torch.argsort(places),
        positions=positions,
        cp_counts=[len(each.tokens) for each in of_cp],
        key_positions=key_positions,
        visible=visible,
        micro_batch_tokens=count_tokens(rows),
        step_tokens=step_tokens,
    )


def integers(values: List[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def count_tokens(rows: Sequence[Row]) -> int:
    return sum(len(document) - 1 for row in rows for document in row)


def shard_step(micro_batches: Sequence[Sequence[Row]], mesh: Mesh) -> Tuple[List[Shard], int]:
    """This rank's part of every micro-batch, and the tokens of the step on all ranks."""
    step_tokens = sum(count_tokens(rows) for rows in micro_batches)
    return [shard_micro_batch(rows, mesh.shape, mesh.at, step_tokens) for rows in micro_batches], step_tokens
