"""Reads a trace as it grows, and contains the rules for recovery and loss; pure but for `Trace.read`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Line:
    """A record of a script: a step that it trained, or an order that it executes."""

    time: int  # nanoseconds of the machine's monotonic clock
    what: str
    began: int
    rank: int
    pid: int
    step: int
    world: str

    @classmethod
    def parse(cls, text: str) -> Line:
        """Parse one line."""
        time, what, began, rank, pid, step, world = text.split()
        return cls(
            time=int(time), what=what, began=int(began), rank=int(rank), pid=int(pid), step=int(step), world=world
        )


@dataclass
class Trace:
    """All lines of a job so far."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _offset: int = 0
    _rest: str = ""

    def read(self) -> list[Line]:
        """Return the new lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            file.seek(self._offset)
            text = file.read()
            self._offset = file.tell()
        *whole, self._rest = (self._rest + text).split("\n")
        fresh = [Line.parse(one) for one in whole]
        self.lines += fresh
        return fresh

    @property
    def steps(self) -> list[Line]:
        """Return the trained steps in the order of their records."""
        return [line for line in self.lines if line.what == "step"]

    @property
    def step(self) -> int:
        """Return the newest step."""
        return max((line.step for line in self.lines), default=0)


def latest(lines: Sequence[Line]) -> dict[int, Line]:
    """Return each rank's last step in the newest world."""
    steps = [line for line in lines if line.what == "step"]
    if not steps:
        return {}
    newest = steps[-1].world
    return {line.rank: line for line in steps[-200:] if line.world == newest}


def healthy_steps(lines: Sequence[Line], *, since: int, full: int) -> int:
    """Return how many steps began after `since` and were trained by all ranks of a full world."""
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for line in lines:
        if line.what == "step" and line.began >= since:
            ranks[line.world, line.step].add(line.rank)
    return sum(len(found) == full for found in ranks.values())


def resumed(lines: Sequence[Line], *, fault: int) -> Line | None:
    """Return the first step without the fault's victim.

    A survivor may still finish the step in progress. A step therefore counts if it began after the fault, or in
    another world than the last one before it.
    """
    steps = [line for line in lines if line.what == "step"]
    before = [line for line in steps if line.time < fault]
    world = before[-1].world if before else ""
    return next((line for line in steps if line.time > fault and (line.began > fault or line.world != world)), None)


def lost_steps(lines: Sequence[Line], *, fault: int) -> int:
    """Return how many steps any rank had to train again."""
    steps = [line for line in lines if line.what == "step"]
    return max((_made_again(steps, fault, rank) for rank in {line.rank for line in steps}), default=0)


def _made_again(steps: Sequence[Line], fault: int, rank: int) -> int:
    own = [line for line in steps if line.rank == rank]
    found = next((line for line in own if line.began > fault), None)
    if found is None:
        return 0
    made = max((line.step for line in own if line.time < found.time), default=0)
    return max(0, made + 1 - found.step)
