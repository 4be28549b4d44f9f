"""Tests that need no ranks: which tokens a rank holds, grids, packing, file names of checkpoints."""
import pathlib
import sys
import tempfile

import checkpoint
import experts
import launch
import mesh
import pipeline
import shards
from data import GeneratedDocuments, Loader


def equal(got, want):
    assert got == want, f"{got} instead of {want}"


def shards_are_those_of_the_specification():
    equal([shards.shard_of_rows([4, 4], 2, rank) for rank in range(2)], [[0, 1, 4, 5], [2, 3, 6, 7]])
    equal([shards.shard_of_rows([5, 5], 2, rank) for rank in range(2)], [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]])
    equal([len(shards.part(5, 4, rank)) for rank in range(4)], [2, 2, 1, 0])
    equal([shards.zigzag(8, 2, rank) for rank in range(2)], [[0, 1, 6, 7], [2, 3, 4, 5]])
    equal([shards.zigzag(5, 2, rank) for rank in range(2)], [[0, 1], [2, 3, 4]])


def every_token_is_held_once_and_finds_its_place():
    documents = GeneratedDocuments(3, 17)
    rows = [[documents.document(4 * row + index) for index in range(3)] for row in range(5)]
    total = shards.count_tokens(rows)
    for tp in (1, 2, 3):
        for cp in (1, 2, 3):
            for dp in (1, 2, 7):
                shape = mesh.MeshShape(tp=tp, cp=cp, dp=dp)
                held = [shards.shard_micro_batch(rows, shape, shape.coordinates(r), 1) for r in range(shape.world)]
                equal(sum(shard.num_tokens for shard in held), total)
                pairs = sorted((a, b) for shard in held for a, b in zip(shard.tokens.tolist(), shard.targets.tolist()))
                equal(pairs, sorted((a, b) for row in rows for d in row for a, b in zip(d, d[1:])))
                for first in range(0, shape.world, tp):  # a tp group
                    gathered = [token for rank in range(first, first + tp) for token in held[rank].tokens.tolist()]
                    at = shape.coordinates(first)
                    mine = [rows[index] for index in shards.part(len(rows), dp, at["dp"])]
                    placed = [gathered[index] for index in held[first].order.tolist()]
                    equal(placed, shards.held_by(mine, cp, at["cp"]).tokens)


def grids_are_those_of_the_specification():
    shape = mesh.MeshShape(tp=2, cp=2, pp=2, ep=2)
    equal((shape.world, shape.edp), (8, 2))
    equal(shape.coordinates(6), {"tp": 0, "cp": 1, "dp": 0, "pp": 1, "etp": 0, "ep": 0, "edp": 1})
    equal(shape.ranks_of(*mesh.GROUPS["experts"], 6), (6, 7))
    equal(shape.ranks_of(*mesh.GROUPS["edp"], 6), (4, 6))
    equal(shape.ranks_of(*mesh.GROUPS["cp"], 1), (1, 3))
    equal(mesh.MeshShape(tp=2, cp=2, dp=2, pp=2, ep=2).world, 16)
    try:
        mesh.MeshShape(tp=2, ep=4)
    except ValueError as error:
        assert "tp*cp*dp (2*1*1 = 2) must be a multiple of etp*ep (1*4 = 4)" in str(error), error
    else:
        raise AssertionError("experts on more ranks than there are")


def virtual_experts_lie_on_the_ranks_of_their_owner():
    equal(experts.placement(3, mesh.MeshShape(dp=4, etp=2, ep=2)), [0, 1, 0, 1, 2, 3])


def one_forward_one_backward_keeps_few_in_flight():
    for stages in (1, 2, 4):
        for micro_batches in (1, 2, 3, 8):
            for stage in range(stages):
                order = list(pipeline.one_forward_one_backward(stage, stages, micro_batches))
                for direction in ("forward", "backward"):
                    equal([index for kind, index in order if kind == direction], list(range(micro_batches)))
                flying = most = 0
                for kind, _ in order:
                    flying += 1 if kind == "forward" else -1
                    most = max(most, flying)
                equal(most, min(stages - stage, micro_batches))


def data_continues_from_a_position():
    options = dict(seed=5, rows=3, length=20, micro_batches=2, vary_rows=True)
    whole, later = Loader(None, **options), Loader(None, **options)
    steps = [whole.next_step() for _ in range(2)]
    later.position = sum(len(row) for micro_batch in steps[0] for row in micro_batch)
    equal(later.next_step(), steps[1])
    rows = [row for step in steps for micro_batch in step for row in micro_batch]
    assert max(shards.count_tokens([row]) for row in rows) <= 20
    assert len({len(document) for row in rows for document in row}) > 3


def some_ranks_have_no_tokens_at_some_steps():
    shape = mesh.MeshShape(dp=4, ep=4)
    loader = Loader(None, seed=1, rows=4, length=32, micro_batches=2, vary_rows=True)
    counts = [[0] * 4 for _ in range(4)]  # per step and rank
    for step in counts:
        for rows in loader.next_step():
            for rank in range(4):
                step[rank] += shards.shard_micro_batch(rows, shape, shape.coordinates(rank), 1).num_tokens
    assert any(0 in step for step in counts) and all(any(step) for step in counts), counts


def the_newest_complete_checkpoint_is_taken():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        equal(checkpoint.newest(folder), None)
        for file in ("step_00000008.safetensors", "step_00000010.safetensors", "step_00000012.tmp"):
            (folder / file).touch()
        equal(checkpoint.newest(folder), folder / "step_00000010.safetensors")


def a_failed_rank_ends_the_launch():
    program = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    assert not launch.wait(launch.start(2, ["-c", program]), 30)
    assert not launch.wait(launch.start_forks(2, lambda: sys.exit(3)), 30)
    assert launch.wait(launch.start_forks(2, lambda: None), 30)


TESTS = [
    shards_are_those_of_the_specification,
    every_token_is_held_once_and_finds_its_place,
    grids_are_those_of_the_specification,
    virtual_experts_lie_on_the_ranks_of_their_owner,
    one_forward_one_backward_keeps_few_in_flight,
    data_continues_from_a_position,
    some_ranks_have_no_tokens_at_some_steps,
    the_newest_complete_checkpoint_is_taken,
    a_failed_rank_ends_the_launch,
]
