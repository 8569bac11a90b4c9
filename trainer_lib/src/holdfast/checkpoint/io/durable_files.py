"""Durable writes of files and names. No torch."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import stat
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.direct_writer import DirectFile, aligned
from holdfast.checkpoint.io.huge_pages import allocate
from holdfast.checkpoint.io.rate_limit import WRITERS
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.core.errors import CorruptCheckpointError

_FILE_MODE: Final = 0o644
RIGHT: Final = f".tmp-{0:032x}"
"""The suffix of a file that reserves another name. Such a file counts as a leftover of writing that name."""
_NOT_SUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})
# Buffers of 8 MiB: one is being filled, one waits for each writer, and one more keeps the writers busy.
_WINDOWS: Final = WRITERS + 2

Buffer = bytes | bytearray | memoryview


class DigestingFile:
    """A new file, which is written in pieces of 8 MiB and digested at the same time. `close` makes it durable.

    In a file of several pieces, the threads write earlier pieces while the current one is filled and digested.
    """

    def __init__(self, path: Path) -> None:
        self._file = DirectFile(path)
        # pages are allocated on use, because most files are small
        self._window = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        self._filled = 0
        self._written = 0
        self._digester = ChunkDigester()
        self._writers: Pool | None = None
        self._leaving = contextlib.ExitStack()
        self._leaving.callback(self._file.close)
        self._flying: deque[tuple[Future[None], memoryview]] = deque()

    def write(self, data: Buffer) -> None:
        source = memoryview(data).cast("B")
        while source.nbytes:
            if self._filled == CHUNK_BYTES:
                self._send()
            part = source[: CHUNK_BYTES - self._filled]
            self._window[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            source = source[part.nbytes :]

    def close(self) -> FileRecord:
        """Write the rest, and wait until the disk has all of it."""
        try:
            begin, chunk = self._written, self._window
            self._digest()
            self._write(chunk, begin, self._written - begin)
            for written, _ in self._flying:
                written.result()
            self._file.finish(self._written)
        finally:
            self.abandon()
        return self._digester.record()

    def abandon(self) -> None:
        self._leaving.close()

    def _send(self) -> None:
        """Submit the full buffer to the writers, and continue with another one."""
        if self._writers is None:
            self._file.enable_direct()
            self._writers = self._leaving.enter_context(Pool(WRITERS, "holdfast-writer"))
        written = self._writers.submit(self._write, self._window, self._written, self._filled)
        self._flying.append((written, self._window))
        self._digest()
        if len(self._flying) < _WINDOWS:
            self._window = allocate(CHUNK_BYTES)
            return
        written, self._window = self._flying.popleft()
        written.result()

    def _digest(self) -> None:
        chunk, self._filled = self._window[: self._filled], 0
        if chunk.nbytes:
            self._digester.update(chunk)
            self._written += chunk.nbytes

    def _write(self, window: memoryview, begin: int, nbytes: int) -> None:
        done, end = 0, nbytes if self._writers is None else aligned(nbytes)
        while done < end:
            done += self._file.write_some(window[done:end], begin + done)


def write_file(path: Path, parts: Iterable[Buffer]) -> FileRecord:
    file = DigestingFile(path)
    try:
        for part in parts:
            file.write(part)
        return file.close()
    finally:
        file.abandon()


def write_json(path: Path, document: Any) -> FileRecord:
    return write_file(path, [encode_json(document)])


def encode_json(document: Any) -> bytes:
    """Encode a document as canonical JSON with a final newline."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def create_durably(path: Path, data: bytes) -> None:
    """Write and fsync a new small file, without a digest."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        rest = memoryview(data)
        while rest.nbytes:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, if the file system supports it: some network shares do not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(fd)


def move_exclusively(source: Path, target: Path) -> None:
    """Rename a durable file within its folder. Raise `FileExistsError` if the name is taken.

    A reader that sees the new name sees the complete file. Without hard links, a separate file reserves the name. If
    the process is killed in between, that file remains, and no process can use the name.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        # A network file system may succeed and lose the reply; the repeated request then finds the name taken.
        if not source.samefile(target):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_exclusively(source, target)
        return
    source.unlink()


def _rename_exclusively(source: Path, target: Path) -> None:
    right = target.with_name(f"{target.name}{RIGHT}")
    data = source.read_bytes()
    os.close(os.open(right, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE))
    try:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)
        if target.read_bytes() != data:  # the mount is exclusive only within its own host
            raise FileExistsError(errno.EEXIST, "another process has written it", str(target))
    finally:
        right.unlink()


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, each with a durable name in its own parent."""
    made = [path]
    while not made[-1].exists():
        made.append(made[-1].parent)
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for holder in made[1:]:
        with contextlib.suppress(PermissionError):  # a folder that this process may write in, but not read
            sync_folder(holder)


def read_regular(path: Path, most: int) -> bytes:
    """Read all of a regular file of at most `most` bytes.

    The file must not be a link, device or pipe, and its folder must not be a link.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > most:
            raise CorruptCheckpointError(f"{path.name}: {size} bytes are more than the limit for this file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(size)  # Python allocates as much memory as is requested
    finally:
        os.close(fd)


def open_regular(path: Path) -> int:
    """Open a file of a checkpoint for reading.

    Raise `CorruptCheckpointError` if the file is a link, device or pipe, or if its folder is a link.
    """
    if path.parent.is_symlink():
        raise CorruptCheckpointError(f"{path.parent.name} is a symbolic link, which a checkpoint's folder never is")
    return open_itself(path, os.O_RDONLY)


def open_itself(path: Path, access: int) -> int:
    """Open a file in any folder. Raise `CorruptCheckpointError` if it is a link, device, pipe or folder."""
    try:
        fd = open_one_more(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptCheckpointError(
                f"{path.name} is a symbolic link or a pipe, which a checkpoint never contains"
            ) from error
        if error.errno == errno.EISDIR:
            raise CorruptCheckpointError(f"{path.name} is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptCheckpointError(f"{path.name} is not a regular file")
    return fd


def open_one_more(path: Path, flags: int) -> int:
    """Open a file. If the soft limit of open files is reached, raise it to the hard limit.

    A restore keeps every file of a checkpoint open, which are two for each rank that wrote it.
    """
    try:
        return os.open(path, flags)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, flags)
