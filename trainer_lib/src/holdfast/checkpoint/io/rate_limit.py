"""A limit of bytes per second and of concurrent writes. The rate limit can be lifted for an urgent save. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_SLICE: Final = 0.05
# Two writers keep the disk busy; more were not faster.
WRITERS: Final = 2


def _nothing() -> None:
    """The default check, which never cancels."""


class Pace:
    """A rate limit that several threads may share."""

    def __init__(
        self,
        bytes_per_second: float | None = None,
        writers: int = WRITERS,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.writers = writers
        self._rate = bytes_per_second
        self._now = now
        self._lifted = threading.Event()
        self._sleep = sleep or self._lifted.wait
        self._lock = threading.Lock()
        self._free_at = now()

    def take(self, nbytes: int, check: Callable[[], None] = _nothing) -> None:
        """Wait until `nbytes` more bytes may pass. `check` is called while waiting, and may raise to cancel."""
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._free_at, self._now())
            self._free_at = begin + nbytes / self._rate
        while (left := begin - self._now()) > 0 and not self._lifted.is_set():
            check()
            self._sleep(min(left, _SLICE))

    def lift(self) -> None:
        """Remove the rate limit permanently."""
        self._lifted.set()


UNLIMITED: Final = Pace()
