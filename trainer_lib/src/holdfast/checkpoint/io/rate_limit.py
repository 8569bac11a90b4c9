"""So many bytes a second and so many writes at once. The first is lifted when somebody is in a hurry. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_SLICE: Final = 0.05
# Two keep the disk busy; more were no faster.
WRITERS: Final = 2


def _nothing() -> None:
    """Do not cancel."""


class Pace:
    """Several threads may take from one."""

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
        """Wait until so many bytes may pass; `check` is called meanwhile, and may raise to give them up."""
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._free_at, self._now())
            self._free_at = begin + nbytes / self._rate
        while (left := begin - self._now()) > 0 and not self._lifted.is_set():
            check()
            self._sleep(min(left, _SLICE))

    def lift(self) -> None:
        """From now on all may pass at once."""
        self._lifted.set()


UNHINDERED: Final = Pace()
