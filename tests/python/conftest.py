"""Ranks for tests: threads of this process, or processes."""
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "python"
DEADLINE = 60  # seconds; waits end even if a test fails

sys.path.insert(0, str(HERE))
if not os.environ.get("CROSSDOCK_TEST_INSTALLED"):  # otherwise the installed package
    sys.path.insert(0, str(PACKAGE))


def run_threads(size, body, **options):
    """Calls body(group) on `size` threads, one per rank. Returns the results by rank. A rank that returns leaves."""
    import crossdock

    options = {"arrival_deadline": DEADLINE, "progress_deadline": DEADLINE, **options}
    groups = crossdock.Group.from_threads(size, **options)
    results, failures = [None] * size, []

    def run(rank):
        try:
            results[rank] = body(groups[rank])
        except BaseException as failure:
            failures.append(failure)
        groups[rank].leave("it returned")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    if failures:
        raise failures[0]  # the others may fail because of it
    return results


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes:
    """Ranks that are processes: `python3 process_cases.py CASE`."""

    def __init__(self, size, case, *arguments):
        port = free_port()
        self.ranks = []
        for rank in range(size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CROSSDOCK_ARRIVAL_DEADLINE": str(DEADLINE),
                "CROSSDOCK_PROGRESS_DEADLINE": str(DEADLINE),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            command = [sys.executable, str(HERE / "process_cases.py"), case, *arguments]
            self.ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )

    def await_line(self, rank, line):
        """Waits until a rank has printed this line."""
        stream = self.ranks[rank].stdout
        for printed in stream:
            if printed.strip() == line:
                return
        raise AssertionError(f"rank {rank} ended before it printed {line!r}: {self.ranks[rank].stderr.read()}")

    def finish(self):
        """(exit status, output, errors) of every rank."""
        try:
            ended = [rank.communicate(timeout=2 * DEADLINE) for rank in self.ranks]
        finally:
            self.kill()
        return [(rank.returncode, *texts) for rank, texts in zip(self.ranks, ended)]

    def kill(self):
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


@pytest.fixture
def processes():
    """Starts Processes, and ends them after the test."""
    started = []

    def start(*arguments):
        started.append(Processes(*arguments))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()
