"""Reading and writing in the run directory, which is shared with the trainer's container."""

import os
import stat
from pathlib import Path

from holdfast_sidecar.constants import MAX_FILE_BYTES
from holdfast_sidecar.errors import MalformedError

Stamp = tuple[int, int, int]
"""Inode, modification time in ns, and size: they change when a file is replaced."""


def stamp(path: Path) -> Stamp | None:
    """Return the file's stamp, or None if it is absent or unreadable."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def read_small(path: Path) -> bytes | None:
    """Return a regular file's bytes, or None.

    The trainer's container may place anything there, so FIFOs, links and too large files are refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MalformedError(f"{path.name} is not a regular file")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise MalformedError(f"{path.name} is larger than {MAX_FILE_BYTES} bytes")
    return data


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by rename. The launcher may run as another user, so the file is readable by all in the pod."""
    _write_beside(path, data).replace(path)


def create_atomically(path: Path, data: bytes) -> bool:
    """Create a complete file. Return False if one exists."""
    beside = _write_beside(path, data)
    try:
        os.link(beside, path)
    except FileExistsError:
        return False
    finally:
        beside.unlink()
    return True


def _write_beside(path: Path, data: bytes) -> Path:
    beside = path.with_name(f".{path.name}.sidecar")
    # Each name has one writer, so the rest of a killed predecessor is overwritten.
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)
        file.write(data)
    return beside
