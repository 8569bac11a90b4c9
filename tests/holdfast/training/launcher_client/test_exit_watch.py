"""A process whose script has ended is reported and ended if its threads block the exit. The time is simulated."""

from __future__ import annotations

import errno
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import pytest

from holdfast.core.protocol import EXIT_PEER_LOST
from holdfast.training.launcher_client.exit_watch import WARN_SECONDS, exit_now, exit_peer_lost, keepers, outlast


class Ended:
    """A script that has ended at time 0. Its thread ends at `thread_ends`."""

    def __init__(self, thread_ends: float) -> None:
        self.now = 0.0
        self._thread_ends = thread_ends

    def keeping(self) -> Sequence[str]:
        return ["flush-metrics (tracker.py:7 in run)"] if self.now < self._thread_ends else []

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("thread_ends", "limit", "named_at", "ended_at"),
    [(0, 300, None, None), (5, 300, None, None), (100, 300, WARN_SECONDS, None), (1e9, 300, WARN_SECONDS, 300.0)],
)
def test_threads_that_block_the_exit_are_named_once_then_ended(
    caplog: pytest.LogCaptureFixture, thread_ends: float, limit: float, named_at: float | None, ended_at: float | None
) -> None:
    script = Ended(thread_ends)
    with caplog.at_level(logging.WARNING):
        left = outlast(script.keeping, limit=limit, clock=lambda: script.now, sleep=script.sleep)
    assert left is (ended_at is not None)
    assert script.now == min(thread_ends, limit)
    warnings = [text for text in caplog.messages if "flush-metrics (tracker.py:7 in run)" in text]
    assert len(warnings) == (named_at is not None)
    assert all("exits in 290 s" in text for text in warnings)


def test_only_blocking_threads_are_named_by_file_and_line() -> None:
    """The interpreter waits for these threads at its exit."""
    all_work, leave = threading.Barrier(3), threading.Event()

    def work() -> None:
        all_work.wait(timeout=240)
        leave.wait()

    threads = [threading.Thread(target=work, name=name, daemon=name == "daemon") for name in ("flush", "daemon")]
    for thread in threads:
        thread.start()
    all_work.wait(timeout=240)
    named = [text for text in keepers() if text.startswith(("flush", "daemon"))]
    leave.set()
    assert len(named) == 1
    assert f"{__file__}:" in named[0]
    assert named[0].endswith(" in work)")


def test_children_that_the_interpreter_waits_for_are_named() -> None:
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=signal.pause, name=name, daemon=name == "daemon") for name in ("child", "daemon")
    ]
    for child in children:
        child.start()
    named = keepers()
    for child in children:
        child.kill()
        child.join()
    assert f"child (process {children[0].pid})" in named
    assert not any("daemon" in text for text in named)


class Full(io.StringIO):
    """Standard output on a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("leave", "status"),
    [(partial(exit_now, 3), 3), (partial(exit_peer_lost, "the launcher closed its socket"), EXIT_PEER_LOST)],
    ids=["exit_now", "the launcher is gone"],
)
def test_process_that_must_end_ends_without_writable_output(
    leave: Callable[[], NoReturn], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(os, "_exit", sys.exit)  # which raises
    with pytest.raises(SystemExit) as ended:
        leave()
    assert ended.value.code == status


def test_so_does_one_whose_script_has_ended() -> None:
    script = """
import sys, threading
from holdfast.training.launcher_client.exit_watch import watch_exit

class Full:
    def flush(self):
        raise OSError(28, "No space left on device")

threading.Thread(target=threading.Event().wait).start()
watch_exit(lambda: None, limit=0, failed=lambda: False)
sys.stdout = Full()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
