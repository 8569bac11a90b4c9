"""The operator's clock: the time of day without its jumps.

It measures silence, back-off and deadlines. A clock change must therefore neither make all workers appear silent at
once nor keep a lost one fresh for an hour. Invariant: the clock never goes back, and advances by nine to eleven
tenths of any interval. It corrects its difference from the time of day at that rate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

logger = logging.getLogger(__name__)

_RATE = 0.1
_WORTH_A_WORD = timedelta(seconds=5)


def uptime() -> float:
    """Return seconds on a clock that is never set and also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall() -> datetime:
    return datetime.now(UTC)


class SteadyClock:
    """Starts with the time of day. Thread-safe."""

    def __init__(self, wall: Callable[[], datetime] = wall, uptime: Callable[[], float] = uptime) -> None:
        self._wall, self._uptime = wall, uptime
        self._lock = threading.Lock()
        self._at, self._up = wall(), uptime()
        self._off = timedelta()

    def __call__(self) -> datetime:
        with self._lock:
            up = self._uptime()
            passed = timedelta(seconds=max(0.0, up - self._up))
            off = self._wall() - (self._at + passed)
            if abs(off - self._off) > _WORTH_A_WORD:
                words = "the time of day was set, it is %.0f s from ours now: we follow it slowly"
                logger.warning(words, off.total_seconds())
            made_up = min(max(off, -_RATE * passed), _RATE * passed)
            self._at += passed + made_up
            self._off, self._up = off - made_up, up
            return self._at
