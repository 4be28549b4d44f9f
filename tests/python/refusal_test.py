"""An argument that Python cannot use on one rank: the same error on every rank, with the reason, and the group stays usable."""
import ctypes

import numpy as np
import pytest
from case import CONFIG, Case
from conftest import run_threads
from layer_test import gradients, layer_of, of_rank, parameters, tokens

import crossdock
from crossdock._tensor import Marshal

CULPRIT = 1


def expect_refusal(group, words, call):
    """`call` must raise the same error everywhere; it is given whether this rank has the wrong argument."""
    with pytest.raises(crossdock.Error, match=words) as raised:
        call(group.rank == CULPRIT)
    assert raised.value.code == crossdock.ErrorCode.INVALID_ARGUMENT, raised.value
    assert raised.value.culprit == CULPRIT and str(raised.value).startswith(f"rank {CULPRIT}: ")
    assert (raised.value.__cause__ is not None) == (group.rank == CULPRIT)
    assert not group.is_poisoned


class NoConversion:
    """An array that fails when a call reads it."""

    def __dlpack__(self, **_):
        raise BufferError("not today")

    def __dlpack_device__(self):
        return (1, 0)


class Unspeakable(ValueError):
    """An error that has no text."""

    def __str__(self):
        raise RuntimeError("no words")


class NoText:
    """A number that fails with such an error."""

    def __eq__(self, other):
        raise Unspeakable()


# Their fields do not fit in the library's.
WRONG_TENSORS = (
    crossdock.Tensor(0, "fp32", (3, 2)),
    crossdock.Tensor(-1, crossdock.DType.F32, (3, 2)),
    crossdock.Tensor(2**64, crossdock.DType.F32, (3, 2)),
    crossdock.Tensor(0, crossdock.DType.F32, (3.0, 2)),
    crossdock.Tensor(0, crossdock.DType.F32, (3, 2), device="cuda"),
)

DISPATCHER_CALLS = {
    "plan": lambda dispatcher, own, case, **wrong: dispatcher.plan(
        **{"expert_ids": case.expert_ids, "weights": case.weights, **wrong}
    ),
    "dispatch": lambda dispatcher, own, case, **wrong: dispatcher.dispatch(**{"plan": own, "x": case.x, **wrong}),
    "begin_dispatch": lambda dispatcher, own, case, **wrong: dispatcher.begin_dispatch(
        **{"plan": own, "x": case.x, **wrong}
    ),
    "dispatch_backward": lambda dispatcher, own, case, **wrong: dispatcher.dispatch_backward(
        **{"plan": own, "grad_rows": rows_of(own), **wrong}
    ),
    "combine": lambda dispatcher, own, case, **wrong: dispatcher.combine(**{"plan": own, "y": rows_of(own), **wrong}),
    "begin_combine": lambda dispatcher, own, case, **wrong: dispatcher.begin_combine(
        **{"plan": own, "y": rows_of(own), **wrong}
    ),
    "combine_backward": lambda dispatcher, own, case, **wrong: dispatcher.combine_backward(
        **{"plan": own, "grad_out": case.x, "y": rows_of(own), **wrong}
    ),
    "collect_routes": lambda dispatcher, own, case, **wrong: dispatcher.collect_routes(
        **{"plan": own, "rows": np.zeros(own.capacity_rows, np.float32), **wrong}
    ),
}


def rows_of(plan):
    return np.zeros((plan.capacity_rows, CONFIG["width"]), np.float32)


@pytest.mark.parametrize(
    "call, wrong, words",
    (
        ("plan", {"expert_ids": [[0, 1]]}, "expert_ids: must be a numpy array, .*, got list"),
        *(("plan", {"expert_ids": tensor}, "expert_ids: ") for tensor in WRONG_TENSORS),
        *(("plan", {"mask": tensor}, "mask: ") for tensor in WRONG_TENSORS),
        ("plan", {"weights": NoConversion()}, "weights: BufferError: not today"),
        ("dispatch", {"x": "tokens"}, "x: must be a numpy array, .*, got str"),
        ("dispatch", {"num_chunks": 2**40}, r"num_chunks must be in \[-2147483648, 2147483647\], got 1099511627776"),
        ("dispatch", {"num_chunks": None}, "num_chunks"),
        ("dispatch", {"num_chunks": 1.5}, "num_chunks"),
        ("dispatch", {"num_chunks": NoText()}, "Unspeakable"),
        ("dispatch", {"on_chunk": 7}, "on_chunk must be a function, got int"),
        ("dispatch", {"row_weights": "yes"}, "row_weights: must be a numpy array, .*, got str"),
        ("begin_dispatch", {"num_chunks": "two"}, "num_chunks"),
    ),
)
def test_arguments_of_a_dispatcher(call, wrong, words):
    def body(group):
        case = Case(group.rank)
        dispatcher = crossdock.Dispatcher(group, **CONFIG)
        plan = dispatcher.plan(case.expert_ids, case.weights)
        make = DISPATCHER_CALLS[call]
        expect_refusal(group, words, lambda is_wrong: make(dispatcher, plan, case, **(wrong if is_wrong else {})))
        dispatcher.dispatch(plan, case.x)

    run_threads(2, body)


@pytest.mark.parametrize("wrong", (*WRONG_TENSORS, NoConversion(), "values"))
def test_arguments_of_sums(wrong):
    def body(group):
        values, part = np.arange(4.0), np.zeros(2)
        expect_refusal(
            group, "array 1: ", lambda is_wrong: group.all_reduce(values, wrong if is_wrong else part)
        )
        expect_refusal(
            group, "array 0: ", lambda is_wrong: group.reduce_scatter(wrong if is_wrong else values, part)
        )
        expect_refusal(
            group, "array 1: ", lambda is_wrong: group.reduce_scatter(values, wrong if is_wrong else part)
        )
        group.reduce_scatter(values, part)
        assert part.tolist() == [4 * group.rank, 4 * group.rank + 2]

    run_threads(2, body)


@pytest.mark.parametrize("call", [name for name in DISPATCHER_CALLS if name != "plan"])
@pytest.mark.parametrize("kind", ("None", "string", "closed"))
def test_plans_that_cannot_be_used(call, kind):
    """The ranks then differ in the plan of the call, which is an error on all of them too."""

    def body(group):
        case = Case(group.rank)
        dispatcher = crossdock.Dispatcher(group, **CONFIG)
        plan = dispatcher.plan(case.expert_ids, case.weights)
        closed = dispatcher.plan(case.expert_ids, case.weights)
        closed.close()
        wrong = {"None": None, "string": "plan", "closed": closed}[kind]
        with pytest.raises(crossdock.Error, match="rank 1 ") as raised:
            DISPATCHER_CALLS[call](dispatcher, plan, case, **({"plan": wrong} if group.rank == CULPRIT else {}))
        assert raised.value.code == crossdock.ErrorCode.MISMATCH and raised.value.culprit == CULPRIT
        assert isinstance(raised.value.__cause__, TypeError) == (group.rank == CULPRIT and kind != "closed")
        dispatcher.dispatch(plan, case.x)

    run_threads(2, body)


@pytest.mark.parametrize(
    "wrong, words",
    (
        ({"jitter_seed": -1}, r"jitter_seed must be in \[0, 18446744073709551615\], got -1"),
        ({"jitter_seed": 2**64}, r"jitter_seed must be in .*, got 18446744073709551616"),
        ({"jitter_seed": None}, "jitter_seed"),
        ({"jitter_seed": 0.5}, "jitter_seed"),
        ({"num_sequences": 2**64 + 1}, "num_sequences must be in .*, got 18446744073709551617"),
        ({"total_sequences": 2**64 + 1}, "total_sequences must be in .*, got 18446744073709551617"),
        ({"total_sequences": "3"}, "total_sequences"),
        ({"x": [[1.0]]}, "x: must be a numpy array, .*, got list"),
        ({"weights": None}, "AttributeError: .NoneType. object has no attribute"),
        ({"weights": ("gate", "experts")}, "AttributeError: .tuple. object has no attribute"),
        ({"weights": parameters()._replace(experts=7)}, "iter"),
        ({"earlier": "the last one"}, "earlier must be a LayerSaved, got str"),
        ({"decision": "the last one"}, "decision must be a LayerSaved, got str"),
    ),
)
def test_arguments_of_a_forward(wrong, words):
    def body(group):
        layer, weights, x = layer_of(group), of_rank(parameters(), group.rank, 2), tokens(group.rank)
        right = {"x": x, "weights": weights}
        expect_refusal(group, words, lambda is_wrong: layer.forward(**{**right, **(wrong if is_wrong else {})}))
        layer.forward(x, weights)

    run_threads(2, body)


@pytest.mark.parametrize(
    "wrong, words",
    (
        ({"grad_losses": "much"}, "grad_losses"),
        ({"accumulate": "yes"}, "accumulate"),
        ({"delay_dw": 2**40}, "delay_dw must be in .*, got 1099511627776"),
        ({"weights": None}, "AttributeError: .NoneType. object has no attribute"),
        ({"grads": None}, "AttributeError: .NoneType. object has no attribute"),
        ({"grad_out": [[1.0]]}, "grad_out: must be a numpy array, .*, got list"),
    ),
)
def test_arguments_of_a_backward(wrong, words):
    def body(group):
        layer, weights, x = layer_of(group), of_rank(parameters(), group.rank, 2), tokens(group.rank)
        saved = layer.forward(x, weights).saved
        right = {"x": x, "weights": weights, "grad_out": x, "saved": saved, "grads": gradients(weights)}
        expect_refusal(group, words, lambda is_wrong: layer.backward(**{**right, **(wrong if is_wrong else {})}))
        layer.backward(**right)

    run_threads(2, body)


@pytest.mark.parametrize("wrong", (None, "saved"))
def test_saved_values_that_cannot_be_used(wrong):
    def body(group):
        layer, weights, x = layer_of(group), of_rank(parameters(), group.rank, 2), tokens(group.rank)
        saved = layer.forward(x, weights).saved
        with pytest.raises(crossdock.Error, match="rank 1 ") as raised:
            layer.backward(x, weights, x, wrong if group.rank == CULPRIT else saved, gradients(weights))
        assert raised.value.code == crossdock.ErrorCode.MISMATCH
        layer.backward(x, weights, x, saved, gradients(weights))

    run_threads(2, body)


def test_values_saved_by_another_layer():
    def body(group):
        layer, other = layer_of(group), layer_of(group, router={"scaling": 2.0})
        weights, x = of_rank(parameters(), group.rank, 2), tokens(group.rank)
        saved = other.forward(x, weights).saved
        for call in (
            lambda: layer.backward(x, weights, x, saved, gradients(weights)),
            lambda: layer.forward(x, weights, decision=saved),
        ):
            with pytest.raises(crossdock.Error, match="rank 0: (saved|decision) must come from a router with"):
                call()
        other.backward(x, weights, x, saved, gradients(weights))

    run_threads(2, body)


def test_a_refusal_does_not_outlive_its_call():
    (group,) = crossdock.Group.from_threads(1)
    layer, weights, x = layer_of(group), parameters(), tokens(0)
    closed = layer_of(group)
    closed.close()
    with pytest.raises(crossdock.Error, match="^the layer has been closed$"):
        closed.forward(x, weights, jitter_seed=-1)
    layer.forward(x, weights)
    group.all_reduce(x)


@pytest.mark.parametrize("error", (KeyboardInterrupt, ctypes.ArgumentError))
def test_a_refusal_does_not_outlive_a_call_that_was_not_made(error):
    def call():
        raise error

    (group,) = crossdock.Group.from_threads(1)
    with Marshal() as marshal:
        raise ValueError("a wrong argument")
    with pytest.raises(error):
        marshal.call(group.rank, call)
    group.all_reduce(np.zeros(2))
