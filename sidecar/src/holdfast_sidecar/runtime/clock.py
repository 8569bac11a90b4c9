"""Time as a parameter."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """The two clocks: one to tell others, one to measure by."""

    def now(self) -> datetime:
        """Wall-clock time in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()
