"""The newest queue of waiting gangs, computed at intervals that depend on its length.

A slightly old queue is safe: each gang in it has its own place, and a later gang does not use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta

from holdfast_operator.scheduling.gang_queue import GangQueue, GangQueueInput

# Each gang takes about a millisecond, so the interval limits the share of time that queues take.
_AGE_FOR_EACH_GANG = timedelta(milliseconds=5)


class GangQueueCache:
    """The newest queue. Thread-safe."""

    def __init__(self, read: Callable[[], GangQueueInput]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known = GangQueueInput()
        self._line: GangQueue | None = None
        self._looked_at: datetime | None = None

    def of(self, key: str, now: datetime) -> GangQueue | None:
        """Return the queue that may contain this job. None: the job is newer than the queue, so ask again later."""
        with self._lock:
            if self._looked_at is None or now - self._looked_at >= _AGE_FOR_EACH_GANG * len(self._known.rivals):
                self._look(now)
            return self._line if key in self._known.jobs else None

    def _look(self, now: datetime) -> None:
        known = self._read()
        if self._line is None or known != self._known or self._line.outlived(now):
            self._known, self._line = known, GangQueue(known, now)
        self._looked_at = now
