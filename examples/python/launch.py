"""Starts the processes of a run on this machine, as torchrun does, and ends all of them when one fails."""
import os
import socket
import subprocess
import sys
import time
from typing import List, Sequence


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(world: int, command: Sequence[str], *, quiet: bool = False) -> List[subprocess.Popen]:
    """Runs `python command` as ranks 0 ... world - 1. `quiet` drops what they print."""
    output = subprocess.DEVNULL if quiet else None
    environment = dict(os.environ, OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    environment["WORLD_SIZE"] = str(world)
    return [
        subprocess.Popen(
            [sys.executable, "-B", *command], env={**environment, "RANK": str(rank)}, stdout=output, stderr=output
        )
        for rank in range(world)
    ]


def wait(processes: Sequence[subprocess.Popen], seconds: float) -> bool:
    """Whether all ended well in this time. None is left; the others get 5 s after the first that fails."""
    deadline, failed = time.monotonic() + seconds, False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() not in (None, 0) for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            end(processes)
        time.sleep(0.02)
    return all(process.returncode == 0 for process in processes)


def end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def run(world: int, command: Sequence[str], seconds: float = 600) -> bool:
    processes = start(world, command)
    try:
        return wait(processes, seconds)
    finally:
        end(processes)
