"""Dispatchers with numpy arrays, ranks as threads."""
import gc

import numpy as np
import pytest
from case import CONFIG, D, E, K, Case, apply_experts, combined, local_experts
from conftest import run_threads

import crossdock

STRATEGIES = ("direct", "hierarchical", "alltoall", "allgather", "auto")


def planned(group, **options):
    case = Case(group.rank)
    dispatcher = crossdock.Dispatcher(group, **{**CONFIG, **options})
    return case, dispatcher, dispatcher.plan(case.expert_ids, case.weights)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", (1, 3, 4))
def test_tokens_go_to_their_experts_and_results_return(strategy, size):
    def body(group):
        case, dispatcher, plan = planned(group, strategy=strategy, alignment=8)
        sent = dispatcher.dispatch(plan, case.x, row_weights=True)
        assert sent.rows.shape == (plan.capacity_rows, D) and sent.row_weights.shape == (plan.capacity_rows,)
        assert plan.num_tokens == case.T and plan.num_local_experts == len(local_experts(group.rank, size))
        assert plan.num_rows() == plan.capacity_rows == plan.segment_starts[-1]
        assert plan.tokens_per_expert() == list(plan.segment_counts)
        y = apply_experts(group, plan, sent.rows)
        np.testing.assert_array_equal(dispatcher.combine(plan, y), combined(case))
        routes = dispatcher.collect_routes(plan, sent.row_weights)
        np.testing.assert_array_equal(routes, case.weights * case.kept)
        np.testing.assert_array_equal(plan.weights, case.weights * case.kept)

    run_threads(size, body)


def test_backward_is_the_transpose_of_forward():
    def body(group):
        case, dispatcher, plan = planned(group)
        y = dispatcher.dispatch(plan, case.x).rows
        grads = dispatcher.combine_backward(plan, case.grad_out, y)
        np.testing.assert_array_equal(
            grads.grad_weights, (case.x * case.grad_out).sum(axis=1, keepdims=True) * case.kept
        )
        grad_x = dispatcher.dispatch_backward(plan, grads.grad_rows)
        np.testing.assert_array_equal(grad_x, case.grad_out * (case.weights * case.kept).sum(axis=1, keepdims=True))
        unweighted = dispatcher.combine(plan, y, weighted=False)
        np.testing.assert_array_equal(unweighted, case.x * case.kept.sum(axis=1, keepdims=True))

    run_threads(3, body)


def test_given_outputs_are_returned_with_the_same_values():
    def body(group):
        case, dispatcher, plan = planned(group, alignment=8)
        R = plan.capacity_rows
        rows, row_weights = np.full((R, D), -7, np.float32), np.full(R, -7, np.float32)
        sent = dispatcher.dispatch(plan, case.x, rows=rows, row_weights=row_weights)
        assert sent.rows is rows and sent.row_weights is row_weights and sent.row_scales is None
        provided = dispatcher.dispatch(plan, case.x, row_weights=True)
        np.testing.assert_array_equal(rows, provided.rows)
        np.testing.assert_array_equal(row_weights, provided.row_weights)
        out = np.full((case.T, D), -7, np.float32)
        assert dispatcher.combine(plan, rows, out=out) is out
        np.testing.assert_array_equal(out, dispatcher.combine(plan, rows))
        grad_rows, grad_weights = np.full((R, D), -7, np.float32), np.full((case.T, K), -7, np.float32)
        grads = dispatcher.combine_backward(plan, case.grad_out, rows, grad_rows=grad_rows, grad_weights=grad_weights)
        assert grads.grad_rows is grad_rows and grads.grad_weights is grad_weights
        grad_x = np.full((case.T, D), -7, np.float32)
        assert dispatcher.dispatch_backward(plan, grad_rows, grad_x=grad_x) is grad_x
        routes = np.full((case.T, K), -7, np.float32)
        assert dispatcher.collect_routes(plan, row_weights, routes=routes) is routes

    run_threads(2, body)


def test_results_outlive_what_made_them():
    def body(group):
        case, dispatcher, plan = planned(group)
        rows = dispatcher.dispatch(plan, case.x).rows
        counts, expected = plan.segment_counts, rows.copy()
        dispatcher.combine(plan, rows)  # no rank closes before all have dispatched
        del plan
        dispatcher.close()
        group.close()
        gc.collect()
        np.testing.assert_array_equal(rows, expected)
        assert counts.sum() == len(rows)

    run_threads(2, body)


def test_results_are_memory_of_the_library_and_are_used_again():
    def body(group):
        case, dispatcher, plan = planned(group)
        rows = dispatcher.dispatch(plan, case.x).rows
        assert isinstance(rows.base, crossdock.Array) and not rows.flags.owndata
        held = group.pool_bytes + group.window_bytes
        del rows
        for _ in range(20):
            dispatcher.dispatch(plan, case.x)
        assert group.pool_bytes + group.window_bytes == held

    run_threads(1, body)


def test_numpy_inputs_of_any_strides_are_taken():
    def body(group):
        case, dispatcher, plan = planned(group)
        expected = dispatcher.dispatch(plan, case.x).rows
        wide = np.repeat(case.x, 2, axis=1)
        np.testing.assert_array_equal(dispatcher.dispatch(plan, wide[:, ::2]).rows, expected)
        np.testing.assert_array_equal(dispatcher.dispatch(plan, np.asfortranarray(case.x)).rows, expected)
        ids = case.expert_ids.astype(np.int64)
        again = dispatcher.plan(np.asfortranarray(ids), case.weights)
        np.testing.assert_array_equal(dispatcher.dispatch(again, case.x).rows, expected)

    run_threads(2, body)


@pytest.mark.parametrize(
    "given, reason",
    [
        ("text", TypeError),
        (np.zeros((4, D), np.complex64), TypeError),
        (np.zeros((1, 1, 1, 1, 1), np.float32), ValueError),
    ],
)
def test_what_python_refuses_is_the_same_error_on_every_rank(given, reason):
    def body(group):
        case, dispatcher, plan = planned(group)
        with pytest.raises(crossdock.Error) as raised:
            dispatcher.dispatch(plan, given if group.rank == 2 else case.x)
        assert raised.value.code == crossdock.ErrorCode.INVALID_ARGUMENT and raised.value.culprit == 2
        assert raised.value.operation == "dispatch" and raised.value.sequence > 0
        assert isinstance(raised.value.__cause__, reason if group.rank == 2 else type(None))
        dispatcher.dispatch(plan, case.x)  # the group stays usable
        assert not group.is_poisoned
        return str(raised.value)

    texts = run_threads(3, body)
    assert len(set(texts)) == 1 and "rank 2" in texts[0]


def test_an_output_that_cannot_be_written_is_refused():
    def body(group):
        case, dispatcher, plan = planned(group)
        rows = dispatcher.dispatch(plan, case.x).rows
        out = np.zeros((case.T, D), np.float32)
        out.flags.writeable = False
        for given in (out, np.zeros((case.T, 2 * D), np.float32)[:, ::2], np.zeros((case.T + 1, D), np.float32)):
            with pytest.raises(crossdock.Error) as raised:
                dispatcher.combine(plan, rows, out=given)
            assert raised.value.code == crossdock.ErrorCode.INVALID_ARGUMENT
        np.testing.assert_array_equal(plan.weights.flags.writeable, False)  # memory of the plan

    run_threads(1, body)


def test_errors_are_those_of_the_library():
    def body(group):
        dispatcher = crossdock.Dispatcher(group, num_experts=5, top_k=12, width=D)
        case = Case(group.rank)
        with pytest.raises(crossdock.Error) as raised:
            dispatcher.plan(case.expert_ids, case.weights)
        assert str(raised.value) == "rank 0: num_experts (5) must be at least top_k (12)"
        assert raised.value.code.text == "invalid argument"

    run_threads(2, body)


def test_dense_maps_and_masks():
    def body(group):
        case = Case(group.rank)
        dispatcher = crossdock.Dispatcher(group, **CONFIG, max_routes_per_token=E)
        routes = np.zeros((case.T, E), bool)
        weights = np.zeros((case.T, E), np.float32)
        for t, k in zip(*np.nonzero(case.kept)):
            routes[t, case.expert_ids[t, k]] = True
            weights[t, case.expert_ids[t, k]] = case.weights[t, k]
        plan = dispatcher.plan(map=routes, weights=weights)
        assert plan.top_k == E
        out = dispatcher.combine(plan, apply_experts(group, plan, dispatcher.dispatch(plan, case.x).rows))
        np.testing.assert_array_equal(out, combined(case))
        masked = dispatcher.plan(map=routes, weights=weights, mask=np.ones(case.T, bool))
        rows = dispatcher.dispatch(masked, case.x).rows
        assert masked.num_rows() == 0 and len(rows) == 0
        np.testing.assert_array_equal(dispatcher.combine(masked, rows), np.zeros_like(case.x))

    run_threads(2, body)


def test_dropped_routes_are_counted():
    def body(group):
        dispatcher = crossdock.Dispatcher(group, num_experts=2, top_k=1, width=D, capacity_factor=1.0)
        plan = dispatcher.plan(np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32))
        assert plan.dropped() == [2, 0]
        with pytest.raises(ValueError, match="capacity_factor must be positive, got 0; None: no capacity"):
            crossdock.Dispatcher(group, num_experts=2, top_k=1, width=D, capacity_factor=0.0)

    run_threads(2, body)


def test_two_halves_give_the_results_of_one_call():
    def body(group):
        case, dispatcher, plan = planned(group)
        expected = dispatcher.dispatch(plan, case.x, row_weights=True)
        pending = dispatcher.begin_dispatch(plan, case.x.copy(), row_weights=True, num_chunks=2)
        [(arrived, first, last)] = pending.chunks()
        assert (first, last) == (0, plan.num_local_experts)
        np.testing.assert_array_equal(arrived.rows, expected.rows)
        sent = pending.finish()
        assert list(pending.chunks()) == []
        np.testing.assert_array_equal(sent.rows, expected.rows)
        np.testing.assert_array_equal(sent.row_weights, expected.row_weights)
        with pytest.raises(ValueError):
            pending.finish()
        out = np.empty_like(case.x)
        assert dispatcher.begin_combine(plan, sent.rows, out=out).finish() is out
        np.testing.assert_array_equal(out, dispatcher.combine(plan, expected.rows))

    run_threads(3, body)


def test_arrays_of_chunks_keep_their_memory():
    def body(group):
        case, dispatcher, plan = planned(group)
        expected = np.array(dispatcher.dispatch(plan, case.x).rows)
        kept = []
        dispatcher.dispatch(plan, case.x, num_chunks=2, on_chunk=lambda arrived, *_: kept.append(arrived.rows))
        pending = dispatcher.begin_dispatch(plan, case.x)
        kept += [arrived.rows for arrived, *_ in pending.chunks()]
        pending.finish()
        del pending
        for _ in range(4):
            dispatcher.dispatch(plan, case.x + 1)
        for rows in kept:
            np.testing.assert_array_equal(rows, expected)

    run_threads(3, body)


def test_chunks_are_complete_when_they_are_announced():
    def body(group):
        case, dispatcher, plan = planned(group)
        expected = dispatcher.dispatch(plan, case.x).rows
        seen = []

        def on_chunk(arrived, first, last):
            begin, end = plan.segment_starts[first], plan.segment_starts[last]
            np.testing.assert_array_equal(arrived.rows[begin:end], expected[begin:end])
            seen.extend(range(first, last))

        rows = dispatcher.dispatch(plan, case.x, num_chunks=2, on_chunk=on_chunk).rows
        np.testing.assert_array_equal(rows, expected)
        assert seen == list(range(plan.num_local_experts))

    run_threads(2, body)


def test_an_exception_in_on_chunk_is_raised_here_and_is_an_error_elsewhere():
    def body(group):
        case, dispatcher, plan = planned(group)

        def on_chunk(arrived, first, last):
            if group.rank == 1:
                raise KeyError("lost")

        with pytest.raises(KeyError if group.rank == 1 else crossdock.Error) as raised:
            dispatcher.dispatch(plan, case.x, on_chunk=on_chunk)
        return str(raised.value)

    assert "KeyError: 'lost'" in run_threads(2, body)[0]


def test_a_closed_dispatcher_is_an_error():
    def body(group):
        case, dispatcher, plan = planned(group)
        assert dispatcher.strategy in STRATEGIES
        dispatcher.close()
        dispatcher.close()
        calls = (
            lambda: dispatcher.plan(case.expert_ids, case.weights),
            lambda: dispatcher.dispatch(plan, case.x),
            lambda: dispatcher.strategy,
            lambda: dispatcher.set_stream(1),
        )
        for call in calls:
            with pytest.raises(crossdock.Error, match="^the dispatcher has been closed$"):
                call()

    run_threads(1, body)


def test_a_closed_plan_is_an_error():
    def body(group):
        case, dispatcher, plan = planned(group)
        plan.close()
        plan.close()
        for call in (lambda: plan.num_tokens, plan.num_rows, plan.dropped):
            with pytest.raises(crossdock.Error, match="^the plan has been closed$"):
                call()
        with pytest.raises(crossdock.Error, match="the plan is empty or closed"):
            dispatcher.dispatch(plan, case.x)

    run_threads(1, body)


def test_a_released_array_is_an_error():
    def body(group):
        _, dispatcher, plan = planned(group)
        rows = dispatcher.allocate_rows(plan, "fp32")
        rows.release()
        with pytest.raises(ValueError, match="the array has been released"):
            rows.dtype
        with pytest.raises(crossdock.Error) as raised:
            dispatcher.combine(plan, rows)
        assert str(raised.value.__cause__) == "the array has been released"

    run_threads(1, body)


INT32 = r"\[-2147483648, 2147483647\]"
INT64 = r"\[-9223372036854775808, 9223372036854775807\]"


@pytest.mark.parametrize(
    "option, words",
    (
        ({"num_experts": 2**64 + E}, f"num_experts must be in {INT64}, got 18446744073709551621"),
        ({"width": -(2**63) - 1}, f"width must be in {INT64}, got -9223372036854775809"),
        ({"placement": [0, 0, 0, 0, 2**32]}, rf"placement\[4\] must be in {INT32}, got 4294967296"),
    ),
)
def test_integers_that_a_field_cannot_hold_are_refused(option, words):
    def body(group):
        with pytest.raises(ValueError, match=words):
            crossdock.Dispatcher(group, **{**CONFIG, **option})

    run_threads(1, body)


def test_a_count_that_its_field_cannot_hold_is_the_same_error_on_every_rank():
    def body(group):
        case, dispatcher, plan = planned(group)
        with pytest.raises(crossdock.Error, match="num_chunks must be") as raised:
            dispatcher.dispatch(plan, case.x, num_chunks=2**32 + 1 if group.rank == 1 else 1)
        assert raised.value.culprit == 1
        if group.rank == 1:
            assert str(raised.value.__cause__) == "num_chunks must be in [-2147483648, 2147483647], got 4294967297"
        dispatcher.dispatch(plan, case.x)  # the group stays usable

    run_threads(2, body)


@pytest.mark.parametrize(
    "option", ({"drop_policy": "none"}, {"nonfinite": "keep"}, {"placement": [0]}, {"partial_sums": "bf16"}, {"copies": "one"})
)
def test_options_without_a_meaning_are_refused(option):
    def body(group):
        with pytest.raises(ValueError, match=next(iter(option))):
            crossdock.Dispatcher(group, **CONFIG, **option)

    run_threads(1, body)
