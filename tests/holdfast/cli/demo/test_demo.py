"""The demo keeps its promises when you run it, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[[], subprocess.Popen[str]]
DEADLINE = 240.0


@pytest.fixture
def start(short_path: Path) -> Iterator[Start]:
    """Return a function that starts a demo whose temporary folder is in the folder of the test."""
    begun: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "demo"],
            env={**os.environ, "TMPDIR": str(short_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def left_over(folder: Path) -> list[str]:
    """Return the processes that were started with this temporary folder, and the files in it."""
    found = [str(path) for path in folder.iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in environ:
            found.append(process.name)
    return found


def is_gone(folder: Path) -> bool:
    end = time.monotonic() + DEADLINE
    while left_over(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return left_over(folder) == []


@pytest.mark.thorough
def test_nothing_is_lost_whatever_is_done(start: Start, short_path: Path) -> None:
    """The demo limits the duration of each fault. That holds only on an idle machine, and is not checked here."""
    demo = start()
    said, _ = demo.communicate(timeout=540)
    table = said[said.index("fault  ") :].splitlines()
    rows, checks = table[2:6], table[7:10]
    assert [row.split()[-3:-1] for row in rows] == [["0", "0"]] * 4, said
    assert "never" not in said
    assert [check.split()[0] for check in checks] == ["yes"] * 3, said
    assert said.count("FAULT") == 3
    assert is_gone(short_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_demo_that_was_ended(start: Start, short_path: Path, number: signal.Signals) -> None:
    demo = start()
    end = time.monotonic() + DEADLINE
    while not list(short_path.glob("*/launcher-2.log")):
        assert time.monotonic() < end, "it starts its launchers"
        time.sleep(0.05)
    demo.send_signal(number)
    demo.communicate(timeout=DEADLINE)
    assert demo.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert is_gone(short_path)
