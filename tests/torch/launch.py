"""Processes of this machine that form a process group."""
import datetime
import os
import pathlib
import subprocess
import sys
import time

PATIENCE = 600.0  # seconds; nothing takes this long, even on a slow and busy machine


def start_ranks(world, command):
    """One process per rank, each with its rank as the last argument."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return [subprocess.Popen([sys.executable, "-B", *command, str(rank)], env=environment) for rank in range(world)]


def wait_for(ranks, deadline, grace=None):
    """Returns their exit codes. Kills all of them at the deadline, or `grace` seconds after the first has failed."""
    end = time.monotonic() + deadline
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if grace is not None and any(rank.poll() not in (None, 0) for rank in ranks):
                end, grace = min(end, time.monotonic() + grace), None
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.wait() for rank in ranks]


def wait_for_file(path):
    end = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.01)


def connect(rank, world, folder):
    """Makes the default process group. Rank 0 listens on a port that the system chooses, and writes it to a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    path = pathlib.Path(folder) / "port"
    timeout = datetime.timedelta(seconds=PATIENCE)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, timeout, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    else:
        wait_for_file(path)
        store = dist.TCPStore("127.0.0.1", int(path.read_text()), world, False, timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
