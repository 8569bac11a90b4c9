"""Writes the events of passes in order, in a thread of its own, so that no pass waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Full, Queue

logger = logging.getLogger(__name__)

WriteEvents = Callable[[], None]


class EventWriter:
    """Thread-safe. Log lines about an event have the context of its pass."""

    def __init__(self, *, most: int = 5_000) -> None:
        self._queue: Queue[tuple[Context, WriteEvents] | None] = Queue(most)
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, write: WriteEvents) -> None:
        """Queue the events of one pass; a full queue drops them."""
        try:
            self._queue.put_nowait((copy_context(), write))
        except Full:
            logger.warning("event queue is full (%d passes); dropping the events of one pass", self._queue.maxsize)

    def stop(self, seconds: float = 2.0) -> None:
        """Write the queued events for about this long, and end the thread."""
        if self._thread.ident is None:
            return
        with suppress(Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(seconds)

    def alive(self) -> bool:
        """Return whether the thread runs, or has not started."""
        return self._thread.ident is None or self._thread.is_alive()

    def _work(self) -> None:
        while (queued := self._queue.get()) is not None:
            context, write = queued
            context.run(_write, write)


def _write(write: WriteEvents) -> None:
    try:
        write()
    except Exception:
        logger.exception("events were not written")
