"""A keyed work queue: each key waits at most once and is processed by at most one thread.

A key that is added during its pass runs once more afterwards. A failed key returns after a jittered, doubling pause.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Key:
    due: float | None = None
    active: bool = False
    failures: int = 0


@dataclass(order=True)
class _Entry:
    due: float
    number: int
    key: str = field(compare=False)


class KeyedQueue:
    """Thread-safe. ``get`` blocks; each key it returns must be given to ``done``."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        base_seconds: float = 0.2,
        max_seconds: float = 60.0,
        waited: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._base, self._max = base_seconds, max_seconds
        self._waited = waited
        self._condition = threading.Condition()
        self._keys: dict[str, _Key] = {}
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()
        self._closed = False

    def add(self, key: str, after: float = 0.0) -> None:
        """Schedule the key after this many seconds, or earlier if it is already scheduled."""
        due = self._clock() + max(0.0, after)
        with self._condition:
            state = self._keys.setdefault(key, _Key())
            if state.due is not None and state.due <= due:
                return
            state.due = due
            if not state.active:
                self._push(due, key)

    def get(self) -> str | None:
        """Return the next key that is due; None after ``close``."""
        with self._condition:
            while not self._closed:
                key, wait = self._due()
                if key is not None:
                    return key
                self._condition.wait(wait)
            return None

    def done(self, key: str, *, failed: bool = False, requeue_after: float | None = None) -> None:
        """End the key's pass. A failed one returns after a pause."""
        with self._condition:
            state = self._keys[key]
            state.active = False
            state.failures = state.failures + 1 if failed else 0
            if failed:
                self._schedule(state, self._clock() + self._pause(state.failures))
            elif requeue_after is not None:
                self._schedule(state, self._clock() + requeue_after)
            if state.due is not None:
                self._push(state.due, key)
            else:
                del self._keys[key]

    def forget(self, key: str) -> None:
        """Drop this key."""
        with self._condition:
            state = self._keys.get(key)
            if state is not None:
                state.due = None
                if not state.active:
                    del self._keys[key]

    def depth(self) -> int:
        """Return the number of due keys that wait for a thread."""
        now = self._clock()
        with self._condition:
            return sum(
                1 for state in self._keys.values() if not state.active and state.due is not None and state.due <= now
            )

    def close(self) -> None:
        """Close the queue and wake all threads in ``get``."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _due(self) -> tuple[str | None, float | None]:
        now = self._clock()
        while self._heap:
            entry = self._heap[0]
            state = self._keys.get(entry.key)
            if state is None or state.active or state.due != entry.due:
                heapq.heappop(self._heap)
                continue
            if entry.due > now:
                return None, entry.due - now
            heapq.heappop(self._heap)
            state.active, state.due = True, None
            self._waited(now - entry.due)
            return entry.key, None
        return None, None

    def _schedule(self, state: _Key, due: float) -> None:
        state.due = due if state.due is None else min(state.due, due)

    def _pause(self, failures: int) -> float:
        full = min(self._max, self._base * 2.0 ** min(failures - 1, 20))
        return float(full * (0.5 + 0.5 * self._jitter()))

    def _push(self, due: float, key: str) -> None:
        heapq.heappush(self._heap, _Entry(due, next(self._numbers), key))
        self._condition.notify()
