"""Threads that still work while the interpreter exits, when the executors of the library accept no more. No torch.

The last checkpoint of a script with its own training loop is written at that time.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Pool:
    """A pool of `threads` threads. Leaving its context waits for the submitted work.

    A pool that is started without a context ends its threads when nothing refers to it any more.
    """

    def __init__(self, threads: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._given: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks, begin), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        task: Future[T] = Future()
        self._given.add(task)
        self._tasks.put((task, lambda: call(*args, **kwargs)))
        return task

    def start(self) -> Self:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            for task in self._given:
                task.cancel()
        self._end()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)


def _work(tasks: _Tasks, begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    while (given := tasks.get()) is not None:
        task, call = given
        if not task.set_running_or_notify_cancel():
            continue
        try:
            task.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again for the caller of `result`
            task.set_exception(error)
        del given, task, call  # an idle thread keeps nothing of the last task
