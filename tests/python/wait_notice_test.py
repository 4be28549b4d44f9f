"""Long waits for other ranks are announced, once."""
import os
import pty
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import DEADLINE, HERE, free_port

import crossdock


def late_call(**options):
    """Rank 1 calls once rank 0 has been told that it waits for it. Returns the first notice."""
    notices, noticed = [], threading.Event()

    def on_wait(notice):
        notices.append(notice)
        noticed.set()
        raise ValueError("ignored")

    groups = crossdock.Group.from_threads(2, on_wait=on_wait, notice_after=0.1, arrival_deadline=DEADLINE, **options)

    def run(rank):
        if rank == 1:
            noticed.wait(DEADLINE)
        groups[rank].all_reduce(np.ones(3))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return notices[0]


def test_a_callback_learns_of_a_long_wait():
    notice = late_call()
    assert (notice.rank, notice.size, notice.awaited) == (0, 2, (1,))
    assert (notice.operation, notice.sequence) == ("all_reduce", 1)
    assert notice.waited >= 0.1 and 0 < notice.left < DEADLINE
    assert notice.text.startswith("rank 0 of 2: waiting for rank 1 in all_reduce (call 1) for ")


def test_other_values_are_refused():
    with pytest.raises(TypeError, match="on_wait must be a function, None or False, got str"):
        crossdock.Group.from_threads(1, on_wait="loud")


def environment(rank, port):
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_terminal_shows_for_whom_the_set_up_waits(has_terminal):
    port = free_port()
    ours, theirs = pty.openpty() if has_terminal else os.pipe()
    command = [sys.executable, str(HERE / "process_cases.py"), "late_in_set_up"]
    first = subprocess.Popen(command, env=environment(0, port), stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    if has_terminal:
        while not shown.endswith(b"\n"):
            shown += os.read(ours, 1000)
    second = subprocess.Popen(command, env=environment(1, port), stdout=subprocess.DEVNULL)
    assert first.wait(DEADLINE) == 0 and second.wait(DEADLINE) == 0
    if has_terminal:
        assert shown.startswith(b"crossdock: rank 0 of 2: waiting for rank 1 to start for "), shown
    else:
        assert os.read(ours, 1000) == b""
    os.close(ours)
