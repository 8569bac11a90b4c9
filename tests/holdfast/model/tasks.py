"""Run several processes of the real code in one test process, one at a time, with pauses and faults at chosen places.

A task is one call of the checkpoint code on a thread of its own. Only one task runs at any moment. A task pauses
before an operation that changes the shared volume or the bucket, when its budget of operations is used up. A task
that never continues is a process that was killed at this place; one that continues later is a process whose operation
was stuck in the network. The seams are functions of `os` and the operations of a bucket, so code that writes in a new
way needs no change here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.stores.objects.bucket import Stat
from holdfast.core.errors import CorruptCheckpointError, UnavailableError

VOLUME, BUCKET = "volume", "bucket"
_READS = ("open", "listdir", "stat", "lstat")
_WRITES = ("link", "rename", "replace", "mkdir", "unlink", "rmdir")
_PART_BYTES = 8 << 20
_HERE = threading.local()


class KilledError(BaseException):
    """Unwind a paused task after the last check."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The operations `first` to `first + count - 1` of a task in one place fail."""

    place: str
    first: int
    count: int
    error: int = errno.ESTALE


@dataclass
class Outages:
    """The places that cannot be reached now."""

    volume: Path
    away: set[str] = field(default_factory=set)

    def error(self, place: str, number: int = errno.ESTALE) -> Exception:
        """Return what an operation there raises."""
        if place == BUCKET:
            return UnavailableError("no network", cause="Network")
        return OSError(number, os.strerror(number))


class Task:
    """One call on its own thread."""

    def __init__(self, outages: Outages, act: Callable[[Task], Any], fault: Fault | None = None) -> None:
        self.paused = self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.pauses = True
        self.met: Counter[str] = Counter()  # faults, by place
        self._outages = outages
        self._fault = fault
        self._operations = {VOLUME: 0, BUCKET: 0}
        self._budget: int | None = None
        self._killed = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def go(self, operations: int | None) -> None:
        """Run until the task has made this number of storage changes, or to its end."""
        self._budget = operations
        self._turn.release()
        self._back.acquire()

    def kill(self) -> None:
        """End the thread. None of its later operations reaches the storage."""
        if not self.ended:
            self._killed = True
            self.go(None)
        self._thread.join()

    def touches(self, place: str, *, changes: bool) -> None:
        """Pause, or raise the error that a process would get here."""
        if self._killed:
            raise KilledError
        if changes and self.pauses:
            self._pause()
        self._operations[place] += 1
        number, fault = self._operations[place], self._fault
        hit = fault is not None and fault.place == place and fault.first <= number < fault.first + fault.count
        if hit or place in self._outages.away:
            self.met[place] += 1
            raise self._outages.error(place, fault.error if hit and fault is not None else errno.ESTALE)

    def _pause(self) -> None:
        if self._budget is None:
            return
        if self._budget == 0:
            self.paused = True
            self._back.release()
            self._turn.acquire()
            self.paused = False
            if self._killed:
                raise KilledError
        if self._budget is not None:
            self._budget -= 1

    def _run(self, act: Callable[[Task], Any]) -> None:
        _HERE.task = self
        self._turn.acquire()
        try:
            if not self._killed:
                self.result = act(self)
        except BaseException as error:  # noqa: BLE001 - reported by the one that started the task
            self.error = error
        finally:
            self.ended = True
            _HERE.task = None
            self._back.release()


def current() -> Task | None:
    """Return the task whose thread this is."""
    return getattr(_HERE, "task", None)


@contextlib.contextmanager
def seams(outages: Outages) -> Iterator[None]:
    """Pass the operations of a task below the volume's folder through `Task.touches`."""
    real = {name: getattr(os, name) for name in (*_READS, *_WRITES)}
    below = f"{outages.volume}"

    def passing(name: str) -> Callable[..., Any]:
        act, changes = real[name], name in _WRITES

        def call(*args: Any, **more: Any) -> Any:
            task = current()
            if task is not None and args and isinstance(args[0], str | os.PathLike):
                path = os.fspath(args[0])
                if isinstance(path, str) and path.startswith(below):
                    task.touches(VOLUME, changes=changes)
            return act(*args, **more)

        return call

    for name in real:
        setattr(os, name, passing(name))
    try:
        yield
    finally:
        for name, act in real.items():
            setattr(os, name, act)


class Bucket:
    """A bucket that keeps its objects in a dictionary."""

    url = "mem://bucket"
    lacks: tuple[str, ...] = ()
    part_bytes = _PART_BYTES
    in_flight = 1

    def __init__(self, outages: Outages) -> None:
        self.objects: dict[str, bytes] = {}
        self._outages = outages

    def folders(self, prefix: str) -> list[str]:
        self._asked()
        below = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def keys(self, prefix: str) -> list[str]:
        self._asked()
        return sorted(key for key in self.objects if key.startswith(prefix))

    def stat(self, key: str) -> Stat:
        self._asked()
        data = self._get(key)
        return Stat(nbytes=len(data), tag=str(hash(data)))

    def read(self, key: str, most: int) -> bytes:
        self._asked()
        data = self._get(key)
        if len(data) > most:
            raise CorruptCheckpointError(f"{key} is too large")
        return data

    def read_into(self, key: str, stat: Stat, offset: int, target: memoryview) -> None:
        self._asked()
        data = self._get(key)[offset : offset + target.nbytes]
        if len(data) < target.nbytes:
            raise CorruptCheckpointError(f"{key} ends early")
        target[:] = data

    def create(self, key: str, data: bytes) -> bool:
        self._asked(changes=True)
        return self.objects.setdefault(key, bytes(data)) == data

    def put(self, key: str, data: bytes) -> None:
        self._asked(changes=True)
        self.objects[key] = bytes(data)

    def upload(self, key: str, blocks: Iterable[memoryview]) -> None:
        data = b"".join(map(bytes, blocks))
        self._asked(changes=True)
        self.objects[key] = data

    def copy(self, source: str, target: str) -> None:
        self._asked(changes=True)
        self.objects[target] = self._get(source)

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._asked(changes=True)
        for key in keys:
            self.objects.pop(key, None)

    def unfinished(self, prefix: str) -> list[str]:
        self._asked()
        return []

    def abandon(self, prefix: str) -> None:
        self._asked(changes=True)

    def _get(self, key: str) -> bytes:
        if key not in self.objects:
            raise CorruptCheckpointError(f"{key} is missing")
        return self.objects[key]

    def _asked(self, *, changes: bool = False) -> None:
        task = current()
        if task is not None:
            task.touches(BUCKET, changes=changes)
        elif BUCKET in self._outages.away:
            raise self._outages.error(BUCKET)
