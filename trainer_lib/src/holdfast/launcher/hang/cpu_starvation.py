"""CPU starvation: the time a process was runnable but not scheduled. This time does not count as a hang."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_REMEMBERED = 1024


def cpu_times(pid: int) -> tuple[float, float]:
    """Return the seconds that the main thread of a process has run, and was runnable but not scheduled.

    These are the first numbers of `/proc/PID/schedstat`; 0.0 if the kernel does not count them or the process ended.
    """
    try:
        ran, waited, *_ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return _ticks(pid), 0.0


def cpu_wait(pid: int) -> float:
    """Return the seconds since its start that the main thread of a process was runnable but not scheduled."""
    return cpu_times(pid)[1]


def _ticks(pid: int) -> float:
    """Return the seconds that the main thread has run, from a file that every kernel has; 0.0 without it."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(kw_only=True)
class Starvation:
    """Keeps readings of processes, to compute the starvation of each in a time span. Pure."""

    _known: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)

    def note(self, waits: Mapping[int, float], now: float) -> None:
        """Add the current readings, by process ID. Processes that are not in `waits` have ended."""
        self._known = {pid: self._known.get(pid, deque(maxlen=_REMEMBERED)) for pid in waits}
        for pid, wait in waits.items():
            self._known[pid].append((now, wait))

    def seconds(self, pid: int, since: float) -> float:
        """Return the observed starvation in seconds since a time."""
        known = self._known.get(pid)
        if not known:
            return 0.0
        begin = next((wait for at, wait in reversed(known) if at <= since), known[0][1])
        return max(0.0, known[-1][1] - begin)
