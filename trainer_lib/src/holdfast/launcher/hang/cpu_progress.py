"""CPU progress: whether the main thread of a process still runs, or has stopped in a lock or a system call. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# The main thread makes progress if it runs for this share of the time. A thread that polls for its data or for a lock
# runs for less, and a thread that launches the kernels of a GPU for more.
_SHARE: Final = 0.01
_LEAST_SECONDS: Final = 0.01
_PAUSE_SECONDS: Final = 1.0


@dataclass(kw_only=True)
class CpuProgress:
    """The time of the last progress of each process."""

    _last: dict[int, tuple[float, float]] = field(default_factory=dict)  # by process ID: time, and its CPU seconds
    _looked: float | None = None

    def note(self, ran: Mapping[int, float], now: float) -> None:
        """Add the CPU seconds of each main thread. Processes that are not in `ran` have ended."""
        gap = 0.0 if self._looked is None else now - self._looked
        pause = gap if gap > _PAUSE_SECONDS else 0.0  # neither this process nor, most likely, the others ran
        self._looked = now
        self._last = {pid: self._noted(pid, seconds, now, pause) for pid, seconds in ran.items()}

    def _noted(self, pid: int, seconds: float, now: float, pause: float) -> tuple[float, float]:
        at, before = self._last.get(pid, (now, seconds))
        at = min(now, at + pause)
        progress = seconds - before >= max(_LEAST_SECONDS, _SHARE * (now - at))
        return (now, seconds) if progress else (at, before)

    def last(self, pid: int) -> float:
        """Return the time of the last progress; 0.0 for an unknown process."""
        return self._last.get(pid, (0.0, 0.0))[0]
