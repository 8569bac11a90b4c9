"""The process pool under test, which leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_bench import DEADLINE, PATIENCE, Bench, children

from holdfast.launcher.process import child, spawn_pool


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """No process of the pool is left when the next test counts its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spawn_pool, "_FORK_SECONDS", PATIENCE)
    before = children()
    yield Bench(tmp_path)
    end = time.monotonic() + DEADLINE
    while ours := set(children()) - set(before):
        assert time.monotonic() < end, f"{ours} do not end"
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@pytest.fixture
def hears_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last output of a child is awaited, however late the thread that reads it runs."""
    monkeypatch.setattr(child, "_DRAIN_LOOKS", round(PATIENCE / child._DRAIN_SECONDS))
