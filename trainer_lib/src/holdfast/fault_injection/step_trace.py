"""A trace of steps: each rank appends a line when a step is made, whoever watches reads what came.

A line is one `write` to a file that is opened for appending, so lines of several processes never mix. The clock is
the machine's monotonic one, the same in all its processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One rank made one step."""

    time: float
    began: float
    rank: int
    pid: int
    step: int
    size: int
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault that happened, to a rank that had made `step` steps."""

    number: int
    kind: str
    rank: int
    pid: int
    step: int
    time: float
    wall: float

    @classmethod
    def of(cls, number: int, kind: str, *, rank: int, pid: int, step: int) -> Injection:
        """Return a mark with the present time."""
        return cls(number=number, kind=kind, rank=rank, pid=pid, step=step, time=time.monotonic(), wall=time.time())

    def append_to(self, path: Path) -> None:
        """Append the mark to the file."""
        file = _open(path)
        _append(file, self)
        os.close(file)


class Recorder:
    """The side of a rank process."""

    def __init__(self, path: Path) -> None:
        self._file = _open(path)
        self._began = time.monotonic()

    def begin(self) -> None:
        """A step begins now."""
        self._began = time.monotonic()

    def made(self, step: int, *, rank: int, size: int, loss: float | None = None) -> None:
        """The step is made."""
        mark = Mark(
            time=time.monotonic(), began=self._began, rank=rank, pid=os.getpid(), step=step, size=size, loss=loss
        )
        _append(self._file, mark)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _append(file: int, line: Mark | Injection) -> None:
    os.write(file, json.dumps(asdict(line)).encode() + b"\n")


class Lines:
    """A file of JSON lines that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def fresh(self) -> list[dict[str, object]]:
        """The whole lines that came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in data[:whole].splitlines()]


class Trace:
    """The observer's side of the trace."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self.marks: list[Mark] = []

    def read(self) -> Sequence[Mark]:
        """What came since the last call."""
        fresh = [Mark(**line) for line in self._lines.fresh()]  # type: ignore[arg-type]
        self.marks += fresh
        return fresh

    @property
    def step(self) -> int:
        """The newest step that was made."""
        return max((mark.step for mark in self.marks), default=0)


def first_after(
    marks: Sequence[Mark], moment: float, *, wanted: Callable[[Mark], bool] = lambda _: True
) -> Mark | None:
    """The first step that began after a moment. One that was in flight then may still be made by who is left."""
    return next((mark for mark in marks if mark.began > moment and wanted(mark)), None)


def lost_steps(marks: Sequence[Mark], moment: float) -> int:
    """How many steps that were made had to be made again after a fault at that moment, by any rank."""
    return max((_made_again(marks, moment, rank) for rank in {mark.rank for mark in marks}), default=0)


def _made_again(marks: Sequence[Mark], moment: float, rank: int) -> int:
    own = [mark for mark in marks if mark.rank == rank]
    found = first_after(own, moment)
    if found is None:
        return 0
    made = max((mark.step for mark in own if mark.time < found.time), default=0)
    return max(0, made + 1 - found.step)


def steps_of_all(marks: Sequence[Mark], since: float, *, size: int) -> int:
    """How many steps that began since then were made by every rank of a world of that size."""
    ranks: dict[int, set[int]] = {}
    for mark in reversed(marks):
        if mark.time < since:
            break
        if mark.began >= since and mark.size == size:
            ranks.setdefault(mark.step, set()).add(mark.rank)
    return sum(len(found) == size for found in ranks.values())


def longest_pause(marks: Sequence[Mark], since: float, until: float) -> float:
    """The longest time between two steps, whoever made them."""
    times = [since, *(mark.time for mark in marks if since < mark.time < until), until]
    return max(later - earlier for earlier, later in pairwise(times))
