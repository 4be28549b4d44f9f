"""Ranks that are processes: start, signals, failures, end."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import DEADLINE, HERE


def expect_success(ended):
    for rank, (status, output, errors) in enumerate(ended):
        assert status == 0, f"rank {rank}: status {status}\n{output}\n{errors}"
        assert errors == "", f"rank {rank}: {errors}"


def test_processes_meet_by_the_environment(processes):
    expect_success(processes(4, "environment").finish())


def test_all_processes_name_the_one_that_is_missing(processes):
    for rank, (_, output, errors) in enumerate(processes(3, "missing_in_set_up").finish()):
        expected = f"TIMEOUT 2 rank {rank} of 3: waited 12 s for rank 2 to start" if rank != 2 else ""
        assert output.startswith(expected) and errors == "", (rank, output, errors)


def test_all_processes_learn_why_one_cannot_take_part(processes):
    ended = processes(3, "refused_in_set_up").finish()
    reason = ended[1][1]
    assert "nowhere" in reason, ended
    for rank in (0, 2):
        assert ended[rank][1] == f"rank {rank} of 3: rank 1 gave up: {reason}", ended


def test_processes_meet_by_blobs(processes, tmp_path):
    expect_success(processes(3, "blobs", str(tmp_path)).finish())


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_processes_of_mpi():
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_tcp_if_include", "lo", "-n", "2"]
    command += [sys.executable, str(HERE / "process_cases.py"), "mpi"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE)
    if done.returncode != 0 and "UNSUPPORTED" in done.stderr:
        pytest.skip("the library has no MPI")
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_wait(processes):
    ranks = processes(2, "interrupted")
    for rank in range(2):
        ranks.await_line(rank, "ready")
    time.sleep(0.3)  # rank 0 is waiting by now
    ranks.ranks[0].send_signal(signal.SIGINT)
    ended = ranks.finish()
    assert ended[0][0] == 3, ended
    assert ended[0][1].startswith("interrupted"), ended
    assert ended[1][0] == 4 and ended[1][1].split()[1] == "0", ended


@pytest.mark.parametrize("raised", ("Stop", "TimeoutError"))
def test_a_signal_before_the_notice_of_a_wait_is_raised(processes, raised):
    ranks = processes(2, "signalled", raised)
    for rank in range(2):
        ranks.await_line(rank, "ready")
    time.sleep(0.3)
    ranks.ranks[0].send_signal(signal.SIGTERM)
    ended = ranks.finish()
    assert ended[0][0] == 0 and ended[0][1].startswith(raised) and ended[0][2] == "", ended


def test_ctrl_c_ends_the_set_up(processes):
    ranks = processes(2, "interrupted_in_set_up")
    ranks.await_line(0, "ready")
    time.sleep(0.3)
    ranks.ranks[0].send_signal(signal.SIGINT)
    assert [status for status, *_ in ranks.finish()] == [3, 0]


def test_a_handler_of_the_program_runs_before_the_error(processes):
    ranks = processes(2, "handled")
    for rank in range(2):
        ranks.await_line(rank, "ready")
    time.sleep(0.3)
    ranks.ranks[0].send_signal(signal.SIGINT)
    ended = ranks.finish()
    assert ended[0][0] == 4 and ended[0][1].split() == ["COMMUNICATION", "0", "True"], ended
    assert ended[1][0] == 4 and ended[1][1].split()[1:] == ["0", "False"], ended


def test_survivors_name_a_killed_rank_and_continue(processes):
    ended = processes(3, "killed").finish()
    assert ended[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        status, output, errors = ended[rank]
        assert status == 0, errors
        report = json.loads(output.splitlines()[-1])
        assert "rank 1" in report["text"] and report["survivors"] == 2


def test_a_forked_child_disturbs_nobody(processes):
    expect_success(processes(2, "forked").finish())


def test_the_interpreter_ends_with_everything_open(processes):
    expect_success(processes(2, "leftovers").finish())


def test_the_interpreter_ends_while_a_thread_waits(processes):
    ended = processes(2, "threads_at_the_end").finish()
    assert [status for status, *_ in ended] == [0, 0], ended
