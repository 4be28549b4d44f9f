#!/usr/bin/env python3
"""Processes that die, are interrupted, and exit in any order: failures.py"""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from launch import PATIENCE, connect, start_ranks, wait_for, wait_for_file

E, K, D, WORLD = 8, 2, 16, 4
NOTICE = 60.0  # seconds; a rank that is silent but alive would be abandoned after 600


def make_dispatcher():
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


def killed(rank, folder):
    """Under torchrun. Rank 2 dies in a dispatch in which ranks 0 and 1 wait for rank 3, which arrives later."""
    import torch.distributed as dist

    import crossdock

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the survivors; here they report first
    dist.init_process_group("gloo")
    dispatcher = make_dispatcher()
    for _ in range(5):
        step(dispatcher)

    def die():
        time.sleep(0.5)  # the main thread is in the dispatch
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        threading.Thread(target=die, daemon=True).start()
    if rank == 3:
        wait_for_file(folder / "died")
        time.sleep(0.2)
    arrived = time.time()
    try:
        step(dispatcher)
    except crossdock.Error as error:
        (folder / f"{rank}").write_text(f"{arrived}\n{time.time()}\n{error.culprit}\n{error}")
        os._exit(0)
    sys.exit("the death of rank 2 went unnoticed")


def exits(rank, folder):
    """The process group is made again; then each rank ends in its own way, with tensors, plans and graphs alive."""
    import torch.distributed as dist

    from crossdock.torch import close, group

    global kept
    connect(rank, WORLD, folder)
    first = make_dispatcher()
    step(first)
    dist.barrier()
    dist.destroy_process_group()
    (folder / "again").mkdir(exist_ok=True)
    connect(rank, WORLD, folder / "again")
    dispatcher = make_dispatcher()
    assert dispatcher.group is group() and dispatcher.group is not first.group
    kept = [first, step(first), dispatcher, step(dispatcher)]
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
    elif rank == 1:
        close()
        dist.destroy_process_group()
    elif rank == 2:
        dispatcher.close()
    time.sleep(0.2 * rank)


def raises(rank, folder):
    """Rank 1 ends with an exception; the others continue and get an error that names it."""
    import crossdock

    connect(rank, WORLD, folder)
    dispatcher = make_dispatcher()
    for count in range(1000):
        if rank == 1 and count == 5:
            raise SystemExit(0)
        try:
            step(dispatcher)
        except crossdock.Error as error:
            assert error.culprit == 1, error
            os._exit(0)
    sys.exit("the end of rank 1 went unnoticed")


def interrupted(rank, folder):
    """Ctrl-C ends a dispatch in which rank 0 waits for the others; they get an error that names it."""
    import crossdock

    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    connect(rank, WORLD, folder)
    dispatcher = make_dispatcher()
    step(dispatcher)
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            step(dispatcher)
        except KeyboardInterrupt:
            (folder / "interrupted").touch()
            os._exit(0)
        sys.exit("rank 0 was not interrupted")
    wait_for_file(folder / "interrupted")
    try:
        step(dispatcher)
    except crossdock.Error as error:
        assert error.culprit == 0, error
        os._exit(0)
    sys.exit("the end of rank 0 went unnoticed")


# ---- Launches and checks ----


def run_killed(folder):
    command = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    arguments = [__file__, "killed", str(folder)]
    torchrun = subprocess.Popen(command + arguments, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        log = torchrun.communicate(timeout=PATIENCE)[1]
    finally:
        torchrun.terminate()  # it ends its workers
    for rank in (0, 1, 3):
        assert (folder / f"{rank}").exists(), f"rank {rank} has not reported:\n{log}"
        arrived, noticed, culprit, text = (folder / f"{rank}").read_text().split("\n", 3)
        waited = float(noticed) - max(float(arrived), float((folder / "died").read_text()))
        print(f"    rank {rank}, after {waited:.2f} s: {text}")
        assert waited < NOTICE and culprit == "2", text


def run_to_the_end(name, folder):
    codes = wait_for(start_ranks(WORLD, [__file__, name, str(folder)]), PATIENCE)
    assert codes == [0] * WORLD, codes


ROLES = {"killed": killed, "exits": exits, "raises": raises, "interrupted": interrupted}


def main():
    if len(sys.argv) > 1:
        name, folder, *rank = sys.argv[1:]
        return ROLES[name](int(rank[0] if rank else os.environ["RANK"]), pathlib.Path(folder))
    for name in ROLES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"  {name}", flush=True)
            if name == "killed":
                run_killed(pathlib.Path(folder))
            else:
                run_to_the_end(name, folder)
    print("failures: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
