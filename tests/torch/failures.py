#!/usr/bin/env python3
"""Processes that die, and processes that exit in any order: failures.py"""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from run import free_port

E, K, D, WORLD = 8, 2, 16, 4
NOTICE = 5.0  # seconds until the survivors know, on a busy machine


def connect(rank, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    from crossdock.torch import Dispatcher

    return Dispatcher(num_experts=E, top_k=K, width=D)


def step(dispatcher, tokens=5):
    import torch

    x = torch.randn(tokens, D, requires_grad=True)
    ids = torch.rand(tokens, E).argsort(dim=1)[:, :K]
    sent = dispatcher.dispatch(x, ids, torch.rand(tokens, K))
    out = dispatcher.combine(sent.rows * 2, sent.handle)
    out.sum().backward()
    return sent, out


# ---- What a rank does ----


def killed(rank, port, folder):
    """Rank 2 dies between its calls; the others are in a dispatch, or come to one."""
    import crossdock

    dispatcher = connect(rank, port)
    for count in range(1000):
        if rank == 2 and count == 20:
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(dispatcher)
        except crossdock.Error as error:
            (folder / f"{rank}").write_text(f"{time.time()}\n{error.culprit}\n{error}")
            os._exit(0)
    sys.exit("the death of rank 2 went unnoticed")


def exits(rank, port, folder):
    """Each rank ends in its own way, with tensors, plans and graphs that are still alive."""
    import torch.distributed as dist

    from crossdock.torch import close

    global kept
    dispatcher = connect(rank, port)
    kept = [dispatcher, step(dispatcher)]
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
    elif rank == 1:
        close()
        dist.destroy_process_group()
    elif rank == 2:
        dispatcher.close()
    time.sleep(0.2 * rank)


def raises(rank, port, folder):
    """Rank 1 ends with an exception; the others, which go on, get an error that names it."""
    import crossdock

    dispatcher = connect(rank, port)
    for count in range(1000):
        if rank == 1 and count == 5:
            raise SystemExit(0)
        try:
            step(dispatcher)
        except crossdock.Error as error:
            assert error.culprit == 1, error
            os._exit(0)
    sys.exit("the end of rank 1 went unnoticed")


# ---- Checks ----


def check_killed(folder, codes):
    assert codes[2] == -signal.SIGKILL and all(code == 0 for code in codes[:2] + codes[3:]), codes
    died = float((folder / "died").read_text())
    for rank in (0, 1, 3):
        when, culprit, text = (folder / f"{rank}").read_text().split("\n", 2)
        print(f"    rank {rank}, after {float(when) - died:.2f} s: {text}")
        assert float(when) - died < NOTICE and culprit == "2", text


def check_exits(folder, codes):
    assert codes == [0] * WORLD, codes


ROLES = {"killed": (killed, check_killed), "exits": (exits, check_exits), "raises": (raises, check_exits)}


def launch(name, folder):
    port = free_port()
    command = [sys.executable, __file__, name, str(folder), str(port)]
    ranks = [subprocess.Popen(command + [str(rank)]) for rank in range(WORLD)]
    try:
        deadline = time.monotonic() + 120
        return [rank.wait(timeout=max(1.0, deadline - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def main():
    if len(sys.argv) > 1:
        name, folder, port, rank = sys.argv[1:]
        return ROLES[name][0](int(rank), int(port), pathlib.Path(folder))
    for name, (_, check) in ROLES.items():
        with tempfile.TemporaryDirectory() as folder:
            print(f"  {name}")
            check(pathlib.Path(folder), launch(name, folder))
    print("failures: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
