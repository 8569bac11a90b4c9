"""File locks, so that concurrent runs do not disturb each other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from holdfast_testbed.progress_output import say


@contextmanager
def locked(path: Path, *, what: str, remove: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, and print a message if another run holds it.

    The kernel releases it when its holder ends. With `remove`, the file is deleted afterwards, and waiting runs
    create a new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as lock:
            _take(lock, what)
            if not _is_current(lock, path):
                continue
            try:
                yield
            finally:
                if remove:
                    path.unlink(missing_ok=True)
            return


def _take(lock: TextIO, what: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another run is busy with {what}: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _is_current(lock: TextIO, path: Path) -> bool:
    """Return whether the locked file is still the one that other processes would open."""
    try:
        return os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
