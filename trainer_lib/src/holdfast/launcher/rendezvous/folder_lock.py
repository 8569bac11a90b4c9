"""Allows only one run at a time in a checkpoint folder without an operator.

A second run would begin above the claims of the first one, as after a run that is over. Later checkpoints of the
first run would never be read, and would be deleted. A lock ends with its holder, however the holder ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.format.file_names import RUN_LOCK
from holdfast.checkpoint.io.durable_files import make_folder
from holdfast.core.environment import variable
from holdfast.core.errors import UsageError

_log = logging.getLogger("holdfast.launcher")
TIMEOUT_SECONDS = 15.0  # a run that received a signal may be writing its last checkpoint
_POLL_SECONDS = 0.2
_MOST_TOLD = 200


async def hold(folder: Path, me: str, *, timeout: float = TIMEOUT_SECONDS) -> Callable[[], None]:
    """Keep other runs out of `folder` until this process ends, or the returned function is called.

    `me` is the name of this run in the errors of others. Raises UsageError if another run holds the folder for longer
    than `timeout` (seconds). A folder that cannot be locked is left as it is: read-only, another user's, or on a
    file system without locks.
    """
    try:
        make_folder(folder)
        lock = os.open(folder / RUN_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        _log.warning("%s cannot be locked against other runs: %s", folder, error)
        return _release_nothing
    try:
        await _take(lock, folder, timeout)
    except UsageError:
        os.close(lock)
        raise
    except OSError as error:
        _log.warning("%s cannot be locked against other runs: %s", folder, error)
    else:
        with contextlib.suppress(OSError):  # a full disk: the lock still holds, only the holder's name is missing
            os.ftruncate(lock, 0)
            os.pwrite(lock, me.encode(errors="replace")[:_MOST_TOLD], 0)
    return lambda: os.close(lock)


def _release_nothing() -> None:
    """Release nothing: there is no lock."""


async def _take(lock: int, folder: Path, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    deadline, logged = loop.time() + timeout, False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(lock, _MOST_TOLD, 0).decode(errors="replace") or "another run"
        if loop.time() >= deadline:
            raise UsageError(
                f"holdfast run: {other} has its checkpoints in {folder}: stop it, or use another folder for"
                f" this run ({variable('checkpoint_dir')})"
            )
        if not logged:
            _log.warning("%s has its checkpoints in %s: waiting %.0f s for its end", other, folder, timeout)
        logged = True
        await asyncio.sleep(_POLL_SECONDS)
