"""A trace of steps: each rank appends a line per completed step, and an observer reads new lines.

A line is one `write` to a file that is opened for appending, so lines of several processes never mix. The clock is
the machine's monotonic one, which all its processes share.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step that one rank completed."""

    time: float
    began: float
    rank: int
    pid: int
    step: int
    size: int
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One injected fault, in a rank that had completed `step` steps."""

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
    """The rank's side of the trace."""

    def __init__(self, path: Path) -> None:
        self._file = _open(path)
        self._began = time.monotonic()

    def begin(self) -> None:
        """Note the start of a step."""
        self._began = time.monotonic()

    def made(self, step: int, *, rank: int, size: int, loss: float | None = None) -> None:
        """Append the completed step."""
        record = StepRecord(
            time=time.monotonic(), began=self._began, rank=rank, pid=os.getpid(), step=step, size=size, loss=loss
        )
        _append(self._file, record)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _append(file: int, line: StepRecord | Injection) -> None:
    os.write(file, json.dumps(asdict(line)).encode() + b"\n")


class JsonLines:
    """A file of JSON lines that others append to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[dict[str, object]]:
        """Return the complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        return [json.loads(line) for line in data[:complete].splitlines()]


class Trace:
    """The observer's side of the trace."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self.records: list[StepRecord] = []

    def read(self) -> Sequence[StepRecord]:
        """Read the marks since the last call."""
        new = [StepRecord(**line) for line in self._lines.read_new()]  # type: ignore[arg-type]
        self.records += new
        return new

    @property
    def step(self) -> int:
        """Return the newest completed step."""
        return max((record.step for record in self.records), default=0)


def first_after(
    records: Sequence[StepRecord], moment: float, *, accept: Callable[[StepRecord], bool] = lambda _: True
) -> StepRecord | None:
    """Return the first step that started after this time.

    A step in flight may still be completed by the remaining ranks.
    """
    return next((record for record in records if record.began > moment and accept(record)), None)


def lost_steps(records: Sequence[StepRecord], moment: float, until: float = math.inf) -> int:
    """Return the number of steps that any rank made again, from a fault at this time on and until `until`."""
    ranks = {record.rank for record in records}
    return max((_made_again(records, moment, until, rank) for rank in ranks), default=0)


def _made_again(records: Sequence[StepRecord], moment: float, until: float, rank: int) -> int:
    """Return by how much the step of a rank fell, in sum. The first step after a fall began in this time."""
    own = [record for record in records if record.rank == rank]
    return sum(
        max(0, before.step + 1 - after.step) for before, after in pairwise(own) if moment < after.began <= until
    )


def steps_of_all(records: Sequence[StepRecord], since: float, *, size: int) -> int:
    """Return the number of steps since then that every rank of a world of this size completed."""
    ranks: dict[int, set[int]] = {}
    for record in reversed(records):
        if record.time < since:
            break
        if record.began >= since and record.size == size:
            ranks.setdefault(record.step, set()).add(record.rank)
    return sum(len(found) == size for found in ranks.values())


def longest_pause(records: Sequence[StepRecord], since: float, until: float) -> float:
    """Return the longest time between two steps of any ranks."""
    times = [since, *(record.time for record in records if since < record.time < until), until]
    return max(later - earlier for earlier, later in pairwise(times))
