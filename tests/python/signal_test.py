"""Exceptions and signals in callbacks and finalizers: they reach the caller."""
import gc
import signal
import sys
import threading
import time

import numpy as np
import pytest
from case import CONFIG, Case
from conftest import DEADLINE, run_threads
from layer_test import layer_of, parameters, tokens

import crossdock


def planned(group):
    case = Case(group.rank)
    dispatcher = crossdock.Dispatcher(group, **CONFIG)
    return case, dispatcher, dispatcher.plan(case.expert_ids, case.weights)


class Unspeakable(Exception):
    """An exception that has no text."""

    def __str__(self):
        raise RuntimeError("no words")


class Interrupting(Exception):
    """An exception whose text is interrupted."""

    def __str__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "raised, text",
    (
        (OSError("a file named \udcff"), "OSError: a file named ?"),
        (UnicodeError("\ud800"), "UnicodeError: ?"),
        (Unspeakable(), "Unspeakable without a text"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit("early"), "GeneratorExit: early"),
        (StopIteration("late"), "StopIteration: late"),
    ),
    ids=lambda value: "" if isinstance(value, BaseException) else None,
)
@pytest.mark.parametrize("num_chunks", (1, 2))
def test_any_exception_of_on_chunk_is_raised_here_and_is_an_error_elsewhere(raised, text, num_chunks):
    def body(group):
        case, dispatcher, plan = planned(group)

        def on_chunk(arrived, first, last):
            if group.rank == 1:
                raise raised

        with pytest.raises(BaseException) as caught:
            dispatcher.dispatch(plan, case.x, num_chunks=num_chunks, on_chunk=on_chunk)
        return caught.value

    other, own = run_threads(2, body)
    assert own is raised
    assert isinstance(other, crossdock.Error) and other.culprit == 1 and text in str(other)


def test_a_signal_while_an_exception_of_on_chunk_is_described_is_raised():
    def body(group):
        case, dispatcher, plan = planned(group)

        def on_chunk(arrived, first, last):
            raise Interrupting

        with pytest.raises(KeyboardInterrupt) as caught:
            dispatcher.dispatch(plan, case.x, on_chunk=on_chunk)
        assert isinstance(caught.value.__context__, Interrupting) or caught.value.__context__ is None

    run_threads(1, body)


def await_call(thread):
    """Waits until a thread has been inside a function of the library for a while."""
    seen, since = None, time.monotonic()
    deadline = since + DEADLINE
    while time.monotonic() < deadline:
        frame = sys._current_frames()[thread]
        place = (frame.f_code.co_name, id(frame), frame.f_lasti)
        if place != seen:
            seen, since = place, time.monotonic()
        elif place[0] == "call" and time.monotonic() - since > 0.1:
            return
        time.sleep(0.01)
    raise AssertionError("the thread makes no call")


class Stop(BaseException):
    """What a program's own signal handler raises."""


@pytest.mark.parametrize("kind", (KeyboardInterrupt, Stop))
def test_a_signal_before_the_first_line_of_on_chunk_is_raised(kind):
    """The main thread, rank 0, waits in the call when the signal arrives. The next Python code is on_chunk's."""

    def handle(*_):
        raise kind

    groups = crossdock.Group.from_threads(2, arrival_deadline=DEADLINE, progress_deadline=DEADLINE)
    main = threading.get_ident()
    failures, calls = [], []

    def other():
        try:
            case, dispatcher, plan = planned(groups[1])
            await_call(main)
            signal.pthread_kill(main, signal.SIGINT)
            dispatcher.dispatch(plan, case.x, on_chunk=lambda *_: None)
        except BaseException as failure:
            failures.append(failure)
        groups[1].leave("it returned")

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=other)
    try:
        thread.start()
        case, dispatcher, plan = planned(groups[0])
        with pytest.raises(kind):
            dispatcher.dispatch(plan, case.x, on_chunk=lambda *_: calls.append(1))
    finally:
        signal.signal(signal.SIGINT, before)
        groups[0].leave("it returned")
        thread.join()
    assert not calls
    assert len(failures) == 1 and isinstance(failures[0], crossdock.Error) and failures[0].culprit == 0, failures
    assert kind.__name__ in str(failures[0])


class Timers:
    """Runs a step again and again until a timer interrupts it, many times, and counts the signals that did not raise."""

    def __init__(self, repetitions, longest):
        self.delays = [0.0005 + longest * number / repetitions for number in range(repetitions)]

    def count_lost(self, step):
        def handle(*_):
            raise Stop

        lost = 0
        before = signal.signal(signal.SIGALRM, handle)
        gc.collect()
        gc.disable()  # Python's own weak sets, of threads for example, lose signals
        try:
            for delay in self.delays:
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    while signal.getitimer(signal.ITIMER_REAL)[0] > 0:
                        step()
                    time.sleep(1)  # the timer is off a moment before its signal arrives
                    lost += 1
                except Stop:
                    pass
        finally:
            gc.enable()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return lost


def test_signals_at_any_time_in_on_chunk_are_raised():
    def step():
        (group,) = crossdock.Group.from_threads(1, num_threads=1)  # the last one has failed
        case, dispatcher, plan = planned(group)
        for _ in range(20):
            dispatcher.dispatch(plan, case.x, num_chunks=2, on_chunk=lambda *_: None)

    assert Timers(60, 0.002).count_lost(step) == 0


def droppables():
    """A name and an object of each kind that a finalizer frees."""
    (group,) = crossdock.Group.from_threads(1)
    case, dispatcher, plan = planned(group)
    layer, weights, x = layer_of(group), parameters(), tokens(0)
    experts = crossdock.Experts(num_local_experts=1, width=2, inner=2)
    rows = dispatcher.dispatch(plan, case.x).rows
    yield "array", dispatcher.allocate_rows(plan, "fp32")
    yield "result", dispatcher.dispatch(plan, case.x).rows
    yield "pending dispatch", dispatcher.begin_dispatch(plan, case.x)
    yield "pending combine", dispatcher.begin_combine(plan, rows)
    yield "plan", dispatcher.plan(case.expert_ids, case.weights)
    yield "dispatcher", crossdock.Dispatcher(group, **CONFIG)
    yield "saved values", layer.forward(x, weights).saved
    yield "layer", layer_of(group)
    yield "experts", experts
    yield "capsule", dispatcher.allocate_rows(plan, "fp32").__dlpack__()
    yield "consumed capsule", np.from_dlpack(dispatcher.allocate_rows(plan, "fp32"))
    yield "bootstrap", crossdock.Bootstrap("127.0.0.1")
    yield "group", crossdock.Group.from_threads(1)[0]


def test_finalizers_run_no_python_code():
    """So no signal handler can run in them, whose exception would be discarded."""
    found = {}
    made = dict(droppables())
    for name in list(made):
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
        del made[name]
        sys.setprofile(None)
        if calls:
            found[name] = calls
    assert not found


def test_no_signal_is_lost_in_a_busy_loop():
    """Most of the time goes to arrays and plans that are made and dropped."""
    (group,) = crossdock.Group.from_threads(1)
    case, dispatcher, plan = planned(group)

    def step():
        dispatcher.allocate_rows(plan, "fp32")
        dispatcher.plan(case.expert_ids, case.weights)

    assert Timers(150, 0.0005).count_lost(step) == 0


def test_an_interrupted_call_gives_the_signal_back_whatever_its_error_says():
    """A wait has taken the signal, but another rank's failure came first."""
    from crossdock import _interrupt

    (group,) = crossdock.Group.from_threads(1)
    dispatcher = crossdock.Dispatcher(group, num_experts=1, top_k=1, width=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        assert _interrupt._answer() == 0
        _interrupt._taken[1] = 1
        with pytest.raises(KeyboardInterrupt):
            dispatcher.plan(np.zeros((1, 2)), np.zeros((1, 2)))
        with pytest.raises(crossdock.Error):
            dispatcher.plan(np.zeros((1, 2)), np.zeros((1, 2)))
    finally:
        signal.signal(signal.SIGINT, before)
