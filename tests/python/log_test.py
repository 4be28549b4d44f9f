"""Lines that say what the ranks choose, and why."""
import subprocess
import sys

import pytest

import crossdock

MAKE_GROUPS = """
import crossdock
groups = crossdock.Group.from_threads(2)
for group in groups:
    group.close()
"""


def lines_of(monkeypatch, level):
    """What a callback gets when two ranks make their groups."""
    monkeypatch.setenv("CROSSDOCK_LOG", level)
    lines = []
    for group in crossdock.Group.from_threads(2, on_log=lines.append):
        group.close()
    return lines


def test_a_callback_gets_the_shared_choices_once(monkeypatch):
    (line,) = lines_of(monkeypatch, "")
    assert line == "rank 0 of 2: ranks: 2, nodes: 1, communicator: threads"
    assert lines_of(monkeypatch, "info") == [line]


def test_debug_adds_those_of_each_rank(monkeypatch):
    lines = lines_of(monkeypatch, "debug")
    assert [line.split(",")[0] for line in lines[1:]] == ["rank 0 of 2: on node 0", "rank 1 of 2: on node 0"]


def test_a_callback_that_raises_changes_nothing():
    def refuse(line):
        raise ValueError("ignored")

    for group in crossdock.Group.from_threads(2, on_log=refuse):
        group.check()
        group.close()


def test_an_interrupted_callback_ends_the_call():
    def interrupted(line):
        raise KeyboardInterrupt("in a callback")

    with pytest.raises(KeyboardInterrupt, match="in a callback"):
        crossdock.Group.from_threads(1, on_log=interrupted)
    crossdock.Group.from_threads(1)[0].close()


def printed(monkeypatch, level):
    monkeypatch.setenv("CROSSDOCK_LOG", level)
    return subprocess.run([sys.executable, "-c", MAKE_GROUPS], capture_output=True, text=True, timeout=120, check=True)


def test_the_variable_prints_to_standard_error(monkeypatch):
    result = printed(monkeypatch, "info")
    assert result.stderr == "crossdock: rank 0 of 2: ranks: 2, nodes: 1, communicator: threads\n"
    assert result.stdout == ""
    assert printed(monkeypatch, "").stderr == ""


def test_other_values_are_refused(monkeypatch):
    monkeypatch.setenv("CROSSDOCK_LOG", "loud")
    with pytest.raises(ValueError, match='CROSSDOCK_LOG must be info or debug, got "loud"'):
        crossdock.Group.from_threads(1)
    monkeypatch.delenv("CROSSDOCK_LOG")
    with pytest.raises(TypeError, match="on_log must be a function or None, got str"):
        crossdock.Group.from_threads(1, on_log="loud")
