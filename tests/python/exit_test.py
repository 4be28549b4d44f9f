"""The interpreter exits while daemon threads use the library: without a signal, whatever they do."""
import concurrent.futures
import os
import subprocess
import sys

import pytest

THREADS = """
import sys, threading, time
import numpy as np
import crossdock
from case import CONFIG, Case

groups = crossdock.Group.from_threads(2, num_threads=1)
started = threading.Semaphore(0)

def start(body):
    for group in groups:
        threading.Thread(target=body, args=(group,), daemon=True).start()
    for _ in groups:
        started.acquire()

def prepare(group):
    case, dispatcher = Case(group.rank), crossdock.Dispatcher(group, **CONFIG)
    return case, dispatcher, dispatcher.plan(case.expert_ids, case.weights)
"""

LONG_CALLBACK = """
def body(group):
    case, dispatcher, plan = prepare(group)

    def on_chunk(*_):
        started.release()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            sum(range(1000))

    dispatcher.dispatch(plan, case.x, on_chunk=on_chunk)

start(body)
"""

SLEEPING_CALLBACK = LONG_CALLBACK.replace("sum(range(1000))", "time.sleep(0.001)")

STEPS = """
def body(group):
    case, dispatcher, plan = prepare(group)
    started.release()
    while True:
        plan = dispatcher.plan(case.expert_ids, case.weights)
        rows = dispatcher.dispatch(plan, case.x, on_chunk=lambda *_: None).rows
        dispatcher.combine(plan, rows)

start(body)
time.sleep(DELAY)
"""

# Errors do not stop these ranks: they make new groups and go on.
STUBBORN_STEPS = """
def body(group):
    started.release()
    while True:
        try:
            (own,) = crossdock.Group.from_threads(1, num_threads=1)
            case, dispatcher, plan = prepare(own)
            while True:
                dispatcher.dispatch(plan, case.x, on_chunk=lambda *_: None)
        except crossdock.Error:
            pass

start(body)
time.sleep(DELAY)
"""

WAITS = """
group = crossdock.Group.from_all_gather(lambda blob: [blob], 0)
others = crossdock.Group.from_threads(2)

def body(_):
    dispatcher = crossdock.Dispatcher(others[0], **CONFIG)
    started.release()
    dispatcher.plan()  # rank 1 never arrives

groups = groups[:1]
start(body)
time.sleep(DELAY)
"""


def exit_status(script, delay):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", f"DELAY = {delay}\n{THREADS}\n{script}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr[-2000:]


@pytest.mark.parametrize(
    "script, repetitions",
    ((LONG_CALLBACK, 2), (SLEEPING_CALLBACK, 2), (STEPS, 10), (STUBBORN_STEPS, 8), (WAITS, 2)),
    ids=("long callback", "sleeping callback", "steps", "stubborn steps", "waits"),
)
def test_an_exit_ends_without_a_signal(script, repetitions):
    delays = [0.03 + 0.005 * number for number in range(repetitions)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda delay: exit_status(script, delay), delays))
    assert [status for status, _ in ended] == [0] * repetitions, [errors for status, errors in ended if status]
