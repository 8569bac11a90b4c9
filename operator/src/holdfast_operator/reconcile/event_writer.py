"""Events of passes, told by a few threads of their own, one pass of a job after the other and jobs in turn.

A pass never waits for them, and neither does a job for what another one has to tell.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import Context, copy_context

logger = logging.getLogger(__name__)

WriteEvents = Callable[[], None]


class EventWriter:
    """Thread-safe. Lines that are logged of it are about what they were in the pass."""

    def __init__(self, *, threads: int = 2, most: int = 5_000) -> None:
        self._most = most
        self._condition = threading.Condition()
        self._waiting: OrderedDict[str, deque[tuple[Context, WriteEvents]]] = OrderedDict()
        self._busy: set[str] = set()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"events-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        """Tell from now on."""
        for thread in self._threads:
            thread.start()

    def add(self, key: str, tell: WriteEvents) -> None:
        """Have this told, after what waits of the same key. While far too much waits it is dropped."""
        with self._condition:
            full = sum(map(len, self._waiting.values())) >= self._most
            if not full:
                self._waiting.setdefault(key, deque()).append((copy_context(), tell))
                self._condition.notify()
        if full:
            logger.warning("%d passes wait to be told of: the events of one more are left out", self._most)

    def stop(self, seconds: float = 2.0) -> None:
        """Have what waits told, for so long, and end the threads."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)

    def alive(self) -> bool:
        """Whether all its threads work, or have not begun."""
        return all(thread.ident is None or thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            key, context, tell = found
            context.run(_told, tell)
            with self._condition:
                self._busy.discard(key)
                self._condition.notify()

    def _next(self) -> tuple[str, Context, WriteEvents] | None:
        with self._condition:
            while True:
                key = next((key for key in self._waiting if key not in self._busy), None)
                if key is not None:
                    return key, *self._taken(key)
                if self._stopped and not self._waiting:
                    return None
                self._condition.wait()

    def _taken(self, key: str) -> tuple[Context, WriteEvents]:
        """The oldest of this key, which is last in turn then."""
        tells = self._waiting.pop(key)
        oldest = tells.popleft()
        if tells:
            self._waiting[key] = tells
        self._busy.add(key)
        return oldest


def _told(tell: WriteEvents) -> None:
    try:
        tell()
    except Exception:
        logger.exception("events were not written")
