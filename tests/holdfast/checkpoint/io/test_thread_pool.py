"""The threads also work after the interpreter has started to exit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from holdfast.checkpoint.io.thread_pool import Pool

AT_THE_END = """
import atexit
from holdfast.checkpoint.io.thread_pool import Pool

def last():
    with Pool(2, "last") as pool:
        print(sum(task.result() for task in [pool.submit(abs, -number) for number in range(5)]))

atexit.register(last)
"""


def test_it_works_when_the_interpreter_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ended.stdout, ended.stderr) == ("10\n", "")


def test_what_a_task_raises_reaches_who_asks() -> None:
    with Pool(1, "one") as pool:
        task = pool.submit(int, "none")
        with pytest.raises(ValueError, match="none"):
            task.result()


def test_leaving_by_an_exception_does_not_begin_what_waits() -> None:
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(240)

    def leave() -> None:
        with Pool(1, "one") as pool:
            pool.submit(hold)
            waiting.append(pool.submit(hold))
            begun.wait(240)
            go.set()
            raise KeyError("left")

    waiting: list[object] = []
    with pytest.raises(KeyError):
        leave()
    assert not any(thread.name.startswith("one-") for thread in threading.enumerate())
