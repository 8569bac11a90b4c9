"""A save on a thread of its own: when it has ended, it holds nothing of the training's state."""

from __future__ import annotations

import threading
import time

from holdfast.checkpoint.saving.background import Saving
from holdfast.checkpoint.saving.snapshot import SaveResult


class State:
    """A state that takes a while to free, as a large tensor does."""

    def __init__(self, freed: list[bool]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        time.sleep(0.2)
        self._freed.append(True)


def save_of(state: State, begin: threading.Event, result: SaveResult) -> Saving:
    def work() -> SaveResult:
        begin.wait()
        return result if state else SaveResult(committed=False)

    return Saving(work)


def test_a_save_has_ended_when_its_thread_has_freed_the_tensors() -> None:
    """A thread that frees a tensor while the interpreter exits aborts the process."""
    freed: list[bool] = []
    result, begin = SaveResult(committed=True), threading.Event()
    saving = save_of(State(freed), begin, result)
    begin.set()
    saving.settle(lambda: None)
    assert freed == [True]
    assert saving.result is result
