"""Ranks that are processes: start, signals, failures, end."""
import json
import signal
import time


def expect_success(ended):
    for rank, (status, output, errors) in enumerate(ended):
        assert status == 0, f"rank {rank}: status {status}\n{output}\n{errors}"
        assert errors == "", f"rank {rank}: {errors}"


def test_processes_meet_by_the_environment(processes):
    expect_success(processes(4, "environment").finish())


def test_processes_meet_by_blobs(processes, tmp_path):
    expect_success(processes(3, "blobs", str(tmp_path)).finish())


def test_ctrl_c_ends_a_wait(processes):
    ranks = processes(2, "interrupted")
    for rank in range(2):
        ranks.await_line(rank, "ready")
    time.sleep(0.3)  # rank 0 waits by now
    ranks.ranks[0].send_signal(signal.SIGINT)
    ended = ranks.finish()
    assert ended[0][0] == 3, ended
    assert ended[0][1].startswith("interrupted"), ended
    assert ended[1][0] == 4 and ended[1][1].split()[1] == "0", ended


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
