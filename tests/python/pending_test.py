"""Calls that have begun and are dropped, closed or finished."""
import gc
import pathlib
import resource
import weakref

import numpy as np
import pytest
from case import CONFIG, Case
from conftest import run_threads

import crossdock

MIB = 2**20


def planned(group):
    case = Case(group.rank)
    dispatcher = crossdock.Dispatcher(group, **CONFIG)
    return case, dispatcher, dispatcher.plan(case.expert_ids, case.weights)


def bytes_of(group):
    return group.pool_bytes + group.window_bytes


def drop(pending):
    del pending


def raise_before_finish(pending):
    with pytest.raises(KeyError):
        with pending:
            raise KeyError("between begin and finish")


@pytest.mark.parametrize("end", (drop, raise_before_finish, lambda pending: pending.close()))
def test_a_call_that_is_not_finished_releases_its_memory(end):
    def body(group):
        case, dispatcher, plan = planned(group)
        expected = np.array(dispatcher.dispatch(plan, case.x).rows)

        def begin_and_end():
            end(dispatcher.begin_dispatch(plan, case.x, row_weights=True))
            end(dispatcher.begin_combine(plan, expected))

        begin_and_end()
        held = bytes_of(group)
        for _ in range(20):
            begin_and_end()
        assert bytes_of(group) == held
        np.testing.assert_array_equal(dispatcher.dispatch(plan, case.x).rows, expected)

    run_threads(2, body)


def test_a_closed_call_cannot_be_finished():
    (group,) = crossdock.Group.from_threads(1)
    case, dispatcher, plan = planned(group)
    pending = dispatcher.begin_dispatch(plan, case.x)
    pending.close()
    pending.close()
    assert list(pending.chunks()) == []
    with pytest.raises(ValueError, match="finished already"):
        pending.finish()
    with dispatcher.begin_dispatch(plan, case.x) as pending:
        rows = pending.finish().rows
    assert len(rows) == plan.capacity_rows


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("finishes", (False, True))
def test_a_call_outlives_what_it_was_made_with(finishes):
    width, tokens = 1024, 4096  # 16 MiB of rows
    x, ids = np.ones((tokens, width), np.float32), np.zeros((tokens, 1), np.int32)
    weights = np.ones((tokens, 1), np.float32)

    def begin_and_close():
        (group,) = crossdock.Group.from_threads(1)
        dispatcher = crossdock.Dispatcher(group, num_experts=1, top_k=1, width=width)
        plan = dispatcher.plan(ids, weights)
        pending = dispatcher.begin_dispatch(plan, x)
        plan.close()
        dispatcher.close()
        group.close()
        if finishes:
            with pytest.raises(crossdock.Error, match="^the dispatcher has been closed$"):
                pending.finish()

    begin_and_close()
    gc.collect()
    held = resident_bytes()
    for _ in range(12):
        begin_and_close()
    gc.collect()
    assert resident_bytes() - held < 64 * MIB


@pytest.mark.parametrize("operation", ("dispatch", "combine"))
def test_inputs_live_until_the_call_ends(operation):
    (group,) = crossdock.Group.from_threads(1)
    case, dispatcher, plan = planned(group)
    rows = dispatcher.dispatch(plan, case.x).rows
    given = np.array(case.x if operation == "dispatch" else rows)
    alive = weakref.ref(given)
    begin = dispatcher.begin_dispatch if operation == "dispatch" else dispatcher.begin_combine
    pending = begin(plan, given)
    del given
    gc.collect()
    assert alive() is not None
    pending.finish()
    del pending
    gc.collect()
    assert alive() is None
