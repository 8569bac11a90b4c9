"""A process is known by PID and start time; only that very process is ever signalled."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast_testbed.errors import NotReadyError
from holdfast_testbed.node import processes
from holdfast_testbed.node.processes import Identity
from holdfast_testbed.waiting import wait_for


@pytest.fixture
def daemon(tmp_path: Path) -> Identity:
    (tmp_path / "records").mkdir()
    return processes.start("sleeper", ["sleep", "600"], records=tmp_path / "records", logs=tmp_path)


def test_a_command_with_brackets_and_spaces_is_parsed() -> None:
    line = "42 (a) b (c) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 1 2 3\n"
    stat = processes.parse_stat(line)
    assert (stat.pid, stat.state, stat.parent, stat.start) == (42, "S", 7, 98765)


def test_a_started_process_has_a_record_and_is_nobodys_child(daemon: Identity, tmp_path: Path) -> None:
    try:
        assert processes.read_record(tmp_path / "records" / "sleeper") == daemon
        assert processes.alive(daemon)
        wait_for(lambda: processes.command_line(daemon.pid) == ["sleep", "600"], what="it is sleep", seconds=60)
    finally:
        processes.kill_all([daemon])
    assert not processes.alive(daemon)


def test_another_process_with_the_same_pid_is_left_alone(daemon: Identity) -> None:
    older = Identity(pid=daemon.pid, start=daemon.start - 1)
    try:
        assert not processes.alive(older)
        assert not processes.send(older, signal.SIGKILL)
        processes.kill_all([older])
        assert processes.alive(daemon)
    finally:
        processes.kill_all([daemon])


def test_a_process_that_cannot_record_itself_does_not_start(tmp_path: Path) -> None:
    done = tmp_path / "ran"
    with pytest.raises(NotReadyError, match="is started"):
        processes.start("late", ["touch", done], records=tmp_path / "gone", logs=tmp_path, seconds=0.3)
    assert not done.exists()


def test_half_a_record_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "half").write_text("42 (sleep) S 7 42")
    assert processes.read_record(tmp_path / "half") is None
    assert processes.read_record(tmp_path / "nothing") is None


def test_the_output_of_a_daemon_goes_to_its_log(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    words = ["sh", "-c", "echo hello; echo trouble >&2"]
    processes.start("talker", words, records=tmp_path / "records", logs=tmp_path)
    log = tmp_path / "talker.log"
    wait_for(lambda: log.exists() and log.read_text() == "hello\ntrouble\n", what="it has spoken", seconds=60)
    assert "trouble" in processes.tail(log)
