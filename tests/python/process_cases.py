"""One rank in the tests of processes. Usage: process_cases.py CASE [ARGUMENT]..."""
import json
import os
import pathlib
import signal
import sys
import threading
import time
import warnings

import crossdock

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 0))


def step(group, dispatcher=None):
    """One dispatch and combine; checks the result."""
    import numpy as np
    from case import CONFIG, Case, apply_experts, combined

    dispatcher = dispatcher or crossdock.Dispatcher(group, **CONFIG)
    case = Case(group.rank)
    plan = dispatcher.plan(case.expert_ids, case.weights)
    out = dispatcher.combine(plan, apply_experts(group, plan, dispatcher.dispatch(plan, case.x).rows))
    np.testing.assert_array_equal(out, combined(case))
    return dispatcher


def environment():
    with crossdock.Group.from_environment() as group:
        assert (group.rank, group.size, group.communicator) == (RANK, SIZE, "sockets")
        assert group.num_nodes == 1 and group.node == 0
        step(group)


def mpi():
    try:
        group = crossdock.Group.from_mpi()
    except crossdock.Error as error:
        sys.exit(error.code.name)
    assert group.communicator == "mpi" and group.size == 2
    step(group)


def blobs(folder):
    """Exchanges blobs through files; any all-gather would do."""

    def all_gather(blob):
        own = pathlib.Path(folder, f"{RANK}.tmp")
        own.write_bytes(blob)
        own.rename(pathlib.Path(folder, f"{RANK}.blob"))
        files = [pathlib.Path(folder, f"{rank}.blob") for rank in range(SIZE)]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [file.read_bytes() for file in files]

    group = crossdock.Group.from_all_gather(all_gather, RANK)
    step(group)
    half = group.subgroup([0, 1] if RANK < 2 else [2])
    assert (half.size, half.rank) == ((2, RANK) if RANK < 2 else (1, 0))
    step(half)


def interrupted():
    """Rank 0 waits for the others, which do not arrive until it has been interrupted."""
    group = crossdock.Group.from_environment()
    dispatcher = step(group)
    print("ready", flush=True)
    if RANK == 0:
        try:
            step(group, dispatcher)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.exit(3)
    time.sleep(2)
    try:
        step(group, dispatcher)
    except crossdock.Error as error:
        print(error.code.name, error.culprit, flush=True)
        sys.exit(4)


def signalled(raised):
    """A handler of the program raises while rank 0 waits, before the notice of the wait. Rank 1 arrives after the notice."""

    class Stop(BaseException):
        pass

    def handle(*_):
        raise {"Stop": Stop, "TimeoutError": TimeoutError}[raised]

    signal.signal(signal.SIGTERM, handle)
    notices = []
    group = crossdock.Group.from_environment(on_wait=notices.append, notice_after=1)
    dispatcher = step(group)
    print("ready", flush=True)
    if RANK == 1:
        time.sleep(4)
        try:
            step(group, dispatcher)
        except crossdock.Error as error:
            print(error, flush=True)
        return
    try:
        step(group, dispatcher)
    except (Stop, TimeoutError) as exception:
        print(type(exception).__name__, len(notices), flush=True)


def interrupted_in_set_up():
    """Rank 1 never joins."""
    print("ready", flush=True)
    if RANK == 1:
        time.sleep(2)
        return
    try:
        crossdock.Group.from_environment()
    except KeyboardInterrupt:
        sys.exit(3)


def missing_in_set_up():
    """Rank 2 does not take part."""
    if RANK == 2:
        return
    try:
        crossdock.Group.from_environment(setup_deadline=12)
    except crossdock.Error as error:
        print(error.code.name, error.culprit, error, flush=True)


def refused_in_set_up():
    """Rank 1 has an address that does not exist."""
    try:
        crossdock.Group.from_environment(address="nowhere" if RANK == 1 else None)
    except crossdock.Error as error:
        print(error, flush=True)


def late_in_set_up():
    crossdock.Group.from_environment(setup_notice_after=0.2).close()


def handled():
    """The program's own handler replaces KeyboardInterrupt; the call then raises Error."""
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    group = crossdock.Group.from_environment()
    dispatcher = step(group)
    print("ready", flush=True)
    if RANK == 1:
        time.sleep(2)
    try:
        step(group, dispatcher)
    except crossdock.Error as error:
        print(error.code.name, error.culprit, bool(seen), flush=True)
        sys.exit(4)


def killed():
    """Rank 1 dies in the middle of the steps; the others name it immediately and continue without it."""
    group = crossdock.Group.from_environment()
    dispatcher = step(group)
    print("ready", flush=True)
    begin = time.monotonic()
    try:
        while True:
            begin = time.monotonic()
            step(group, dispatcher)
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except crossdock.Error as error:
        took = time.monotonic() - begin
        assert error.culprit == 1 and error.code == crossdock.ErrorCode.PEER_FAILED, error
        assert group.is_poisoned and took < 10, took
        survivors = group.subgroup([rank for rank in range(SIZE) if rank != 1])
        survivors.check()
        print(json.dumps({"text": str(error), "survivors": survivors.size}), flush=True)
        dispatcher = crossdock.Dispatcher(survivors, num_experts=2, top_k=1, width=4)
        import numpy as np

        plan = dispatcher.plan(np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32))
        dispatcher.combine(plan, dispatcher.dispatch(plan, np.ones((2, 4), np.float32)).rows)


def forked():
    """A child that exits does not affect the peers; calls in it are refused."""
    group = crossdock.Group.from_environment()
    dispatcher = step(group)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about forks in processes with threads
    child = os.fork()
    if child == 0:
        try:
            group.check()
            sys.exit(1)
        except crossdock.Error as error:
            sys.exit(0 if error.code == crossdock.ErrorCode.UNSUPPORTED else 2)  # runs the finalizers
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    step(group, dispatcher)


def leftovers():
    """The interpreter exits with everything still open, in reference cycles and in modules."""
    group = crossdock.Group.from_environment()
    dispatcher = step(group)
    import numpy as np

    plan = dispatcher.plan(np.zeros((1, 2), np.int32) - 1, np.ones((1, 2), np.float32))
    cycle = [group, dispatcher, plan, dispatcher.allocate_rows(plan, "fp32")]
    cycle.append(cycle)
    sys.modules["json"].leftovers = cycle
    crossdock.leftovers = [plan, np.from_dlpack(dispatcher.allocate_rows(plan, "fp32"))]


def threads_at_the_end():
    """The interpreter exits while a thread waits for a rank that never arrives."""
    group = crossdock.Group.from_environment()
    dispatcher = step(group)
    if RANK == 0:
        threading.Thread(target=step, args=(group, dispatcher), daemon=True).start()
    time.sleep(0.5 if RANK == 0 else 1.5)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    globals()[sys.argv[1]](*sys.argv[2:])
