"""Rate limits of a pod: a number of requests or bytes at once, and a number per second after that. Pure except for a
lock.

Invariant: the requests of one pod use no quota of another. The memory is bounded by ``keys``.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """The bucket of one key."""

    a_second: float
    at_once: int


class Rates:
    """A bucket for each key: full at first, and again after a silence of the key. Thread-safe."""

    def __init__(self, rate: RateLimit, *, keys: int = 50_000) -> None:
        self._rate = rate
        self._keys = keys
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, now: float, amount: float = 1.0) -> int:
        """Return 0 if granted, else the seconds after which it would be. A refusal uses nothing of the bucket."""
        with self._lock:
            left, since = self._buckets.pop(key, (float(self._rate.at_once), now))
            left = min(float(self._rate.at_once), left + max(0.0, now - since) * self._rate.a_second)
            granted = left >= amount
            self._buckets[key] = (left - amount if granted else left, now)
            if len(self._buckets) > self._keys:
                self._buckets.popitem(last=False)
        return 0 if granted else max(1, math.ceil((amount - left) / self._rate.a_second))
