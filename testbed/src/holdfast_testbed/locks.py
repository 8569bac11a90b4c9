"""File locks: two runs at the same time must not hurt each other."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_testbed.say import say


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock file `path`; say so when another run holds it. The kernel frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is busy with {what}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
