"""Starts the processes of a run on this machine, as torchrun does, and ends all of them when one fails."""
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from typing import Callable, Dict, List, Optional, Sequence, Union


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def variables(world: int) -> Dict[str, str]:
    """The variables that torch.distributed reads, except the rank."""
    return {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }


class Fork:
    """A forked process, with the methods of Popen that are used here. It need not import torch again."""

    def __init__(self, function: Callable[[], None], environment: Dict[str, str]):
        def run() -> None:
            os.environ.update(environment)
            function()

        self._process = multiprocessing.get_context("fork").Process(target=run)
        self._process.start()

    def poll(self) -> Optional[int]:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> Optional[int]:
        self._process.join()
        return self._process.exitcode


Process = Union[subprocess.Popen, Fork]


def start(world: int, command: Sequence[str], *, quiet: bool = False) -> List[Process]:
    """Runs `python command` as ranks 0 ... world - 1. `quiet` drops what they print."""
    environment, output = {**os.environ, **variables(world)}, subprocess.DEVNULL if quiet else None
    return [
        subprocess.Popen(
            [sys.executable, "-B", *command], env={**environment, "RANK": str(rank)}, stdout=output, stderr=output
        )
        for rank in range(world)
    ]


def start_forks(world: int, function: Callable[[], None]) -> List[Process]:
    """Runs the function as ranks 0 ... world - 1."""
    environment = variables(world)
    return [Fork(function, {**environment, "RANK": str(rank)}) for rank in range(world)]


def wait(processes: Sequence[Process], seconds: float) -> bool:
    """Whether all succeeded within this time. None is left running; after the first failure the others get 5 s."""
    deadline, failed = time.monotonic() + seconds, False
    try:
        while any(process.poll() is None for process in processes):
            if not failed and any(process.poll() not in (None, 0) for process in processes):
                failed, deadline = True, min(deadline, time.monotonic() + 5)
            if time.monotonic() > deadline:
                end(processes)
            time.sleep(0.02)
    finally:
        end(processes)
    return all(process.wait() == 0 for process in processes)


def end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
