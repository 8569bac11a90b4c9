"""Time in which a process wanted to run and had no CPU: nobody hangs who only waits for his turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_REMEMBERED = 1024


def cpu_wait(pid: int) -> float:
    """Seconds, since its start, that the main thread of a process stood in line for a CPU.

    The second number of `/proc/PID/schedstat`; 0.0 where the kernel does not count them, or the process is gone.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(kw_only=True)
class Starvation:
    """Remembers what was read of processes, to say how much of a span each stood in line. Pure."""

    _known: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)

    def note(self, waits: Mapping[int, float], now: float) -> None:
        """Take in what was read just now, by process; the others are gone."""
        self._known = {pid: self._known.get(pid, deque(maxlen=_REMEMBERED)) for pid in waits}
        for pid, wait in waits.items():
            self._known[pid].append((now, wait))

    def seconds(self, pid: int, since: float) -> float:
        """How long it stood in line since then, as far as that was seen."""
        known = self._known.get(pid)
        if not known:
            return 0.0
        begin = known[0][1]
        for at, wait in known:
            if at > since:
                break
            begin = wait
        return max(0.0, known[-1][1] - begin)
