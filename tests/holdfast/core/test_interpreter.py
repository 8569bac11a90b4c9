"""Garbage collection is paused, and afterwards has the settings of the script again. An exit waits for threads."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from holdfast.core.interpreter import uncollected


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_while_many_objects_are_made() -> None:
    with uncollected():
        before = collections()
        kept = [[number] for number in range(100_000)]
        assert collections() == before
    assert len(kept) == 100_000
    assert gc.isenabled()


def test_an_error_leaves_it_on() -> None:
    with pytest.raises(ValueError, match="no"), uncollected():
        raise ValueError("no")
    assert gc.isenabled()


def test_a_script_that_collects_by_itself_goes_on_to() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_a_thread_beside_the_main_one_changes_nothing() -> None:
    seen: list[bool] = []

    def look() -> None:
        with uncollected():
            seen.append(gc.isenabled())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [True]
    assert gc.isenabled()


def leave(seconds: float, work: str) -> str:
    """Run an interpreter that exits while a thread works, and waits this long at most. Return its output."""
    script = f"""
import threading
from holdfast.core import interpreter
interpreter.EXIT_SECONDS = {seconds}
def work():
    {work}
interpreter.start_thread(work, name="holdfast-saving")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_exit_waits_for_the_work_of_threads() -> None:
    assert leave(200.0, "threading.Event().wait(0.5), print('saved')") == "saved\n"


def test_exit_does_not_wait_for_a_thread_that_is_blocked() -> None:
    assert leave(0.1, "threading.Event().wait()") == ""
