"""Crossdock groups and process groups."""
import gc
import os

import torch
import torch.distributed as dist
from cases import case, raises

import crossdock
from crossdock.torch import Dispatcher, close, group, groups

E, K, D = 4, 1, 2


def round_trip(dispatcher, rank):
    x = torch.full((2, D), float(rank))
    ids = torch.tensor([[0], [E - 1]])
    sent = dispatcher.dispatch(x, ids, torch.ones(2, 1))
    assert torch.equal(dispatcher.combine(sent.rows, sent.handle), x)


@case(1, 2, 4)
def a_process_group_has_one_group(rank, world):
    assert group() is group(dist.group.WORLD)
    assert group().rank == rank and group().size == world
    first, second = Dispatcher(num_experts=E, top_k=K, width=D), Dispatcher(num_experts=E, top_k=K, width=D)
    assert first.group is second.group
    round_trip(first, rank)
    round_trip(second, rank)


@case(4)
def parts_of_the_world_have_their_own(rank, world):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    dispatcher = Dispatcher(mine, num_experts=E, top_k=K, width=D)
    assert dispatcher.group.size == 2 and dispatcher.group.rank == rank % 2
    round_trip(dispatcher, rank)


@case(2, 4)
def process_groups_may_be_destroyed_and_made_again(rank, world):
    kept = len(groups._groups)
    dispatcher = None
    for _ in range(3):
        ranks = dist.new_group(list(range(world)))
        dispatcher = Dispatcher(ranks, num_experts=E, top_k=K, width=D)
        round_trip(dispatcher, rank)
        dist.destroy_process_group(ranks)
        del ranks
        gc.collect()
        round_trip(dispatcher, rank)  # no longer needs the process group
    del dispatcher
    gc.collect()
    assert len(groups._groups) == kept


@case(1, 4)
def a_closed_dispatcher_says_so(rank, world):
    with Dispatcher(num_experts=E, top_k=K, width=D) as dispatcher:
        round_trip(dispatcher, rank)
    dispatcher.close()  # the second time it does nothing
    with raises(RuntimeError, "closed"):
        round_trip(dispatcher, rank)
    round_trip(Dispatcher(num_experts=E, top_k=K, width=D), rank)


@case(1)
def a_group_of_crossdock_is_used_as_it_is(rank, world):
    (alone,) = crossdock.Group.from_threads(1)
    dispatcher = Dispatcher(alone, num_experts=E, top_k=K, width=D)
    assert dispatcher.group is alone
    round_trip(dispatcher, rank)


@case(2, 4)
def a_forked_child_disturbs_nobody(rank, world):
    dispatcher = Dispatcher(num_experts=E, top_k=K, width=D)
    round_trip(dispatcher, rank)
    child = os.fork()
    if child == 0:  # like a DataLoader worker, but worse
        close()
        del dispatcher
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    round_trip(dispatcher, rank)


@case(2)
def an_option_that_cannot_be_used_is_an_error_on_every_rank(rank, world):
    ranks = dist.new_group(list(range(world)))
    for wrong in ({"arrival_deadline": "soon"}, {"num_threads": 2**40}, {"ranks_per_node": "2"}, {"deadline": 3}):
        options = wrong if rank == 1 else {}
        with raises((ValueError, TypeError) if rank == 1 else crossdock.Error, "" if rank == 1 else "rank 1 cannot"):
            group(ranks, **options)
    round_trip(Dispatcher(ranks, num_experts=E, top_k=K, width=D), rank)
    close(ranks)
