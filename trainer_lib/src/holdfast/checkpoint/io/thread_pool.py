"""Threads that still work while the interpreter exits, when the executors of the library accept no more. No torch.

The last checkpoint of a script with its own training loop is written at that time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """A pool of `threads` threads. Leaving its context waits for the submitted work."""

    def __init__(self, threads: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._given: list[Future[Any]] = []
        self._begin = begin
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        task: Future[T] = Future()
        self._given.append(task)
        self._tasks.put((task, lambda: call(*args, **kwargs)))
        return task

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            for task in self._given:
                task.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        if self._begin is not None:
            self._begin()
        while (given := self._tasks.get()) is not None:
            task, call = given
            if not task.set_running_or_notify_cancel():
                continue
            try:
                task.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again for the caller of `result`
                task.set_exception(error)
