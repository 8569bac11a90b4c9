"""Write memory to a new file at the speed of the disk, and compute its digests. No torch.

Threads write 8 MiB each, without the page cache where the file system allows it. One thread writes as soon as the
memory is filled; the others start when all of it is filled. At that point the caller's thread digests the same
memory: reading it earlier would slow down the copy, during which training is paused. Some file systems have no
O_DIRECT (a tmpfs, some network file systems) and report EINVAL at the request or at the first write. The file then
continues through the page cache. In both cases the file is fsynced before its record is returned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.fill_progress import FILLED, Filling
from holdfast.checkpoint.io.rate_limit import UNLIMITED, Pace
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.core.errors import CheckpointError
from holdfast.core.linux import O_DIRECT

# The alignment of file offsets, lengths and memory for O_DIRECT: a page, which is at least a block of any disk.
ALIGNMENT: Final = 4096
# The threads that write and digest yield the processors to training.
_NICE: Final = 10
_FILE_MODE: Final = 0o644


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def step_back() -> None:
    """Lower the priority of this thread, so that training runs first.

    SCHED_BATCH is not used, because its threads delay the disk by each other's time slices (decision 0087).
    """
    if sys.platform != "linux":  # on other systems, a thread's ID is not a process ID
        return
    with contextlib.suppress(OSError):  # a sandbox may not support the call
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class DirectFile:
    """A new file that several threads write in parts.

    After `enable_direct`, writes bypass the page cache if possible.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        self._direct = False

    def enable_direct(self) -> None:
        """Bypass the page cache. From now on, memory, offsets and lengths must be complete pages."""
        self._direct = self._bypass_cache(True)

    def write_some(self, data: memoryview, offset: int) -> int:
        """Write at `offset`, and return the number of bytes written."""
        direct = self._direct  # read before the call, because another writer may meet the same error first
        try:
            return os.pwrite(self._fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            self._direct = self._bypass_cache(False)
            return 0

    def finish(self, nbytes: int) -> None:
        """Truncate the file to its length, and wait until the disk has all of it."""
        try:
            if nbytes % ALIGNMENT:
                os.ftruncate(self._fd, nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        os.close(self._fd)

    def _bypass_cache(self, enabled: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | O_DIRECT if enabled else flags & ~O_DIRECT)
        except OSError:
            return False
        return enabled and O_DIRECT != 0


@dataclass(kw_only=True)
class ImageWriter:
    """Writes the first `nbytes` of `image` to a new file. `image` begins at a page and consists of complete pages.

    A byte is read only after `filling` has reached it. `check` is called regularly, and may raise to cancel the file.
    `seen` receives all blocks while they are digested. `pace` limits the rate.
    """

    path: Path
    image: memoryview
    nbytes: int
    filling: Filling = FILLED
    check: Callable[[], None] = lambda: None
    seen: Callable[[memoryview], None] = lambda _: None
    pace: Pace = UNLIMITED
    _stopped: bool = field(default=False, init=False)

    def run(self) -> FileRecord:
        """Write, digest and fsync the file.

        An `OSError` names the file. Raise `CheckpointError` if the image will never be filled.
        """
        with closing(DirectFile(self.path)) as self._file:
            self._file.enable_direct()
            begins = range(0, self.nbytes, CHUNK_BYTES)
            if len(begins) == 1:
                self._write(0)
                record = self._digest(begins)
            else:
                record = self._write_concurrently(begins)
            self._file.finish(self.nbytes)
        return record

    def _write_concurrently(self, begins: range) -> FileRecord:
        writers = self.pace.writers
        with Pool(writers, "holdfast-writer", step_back) as pool:
            # One thread follows the copy. Two threads would slow it down, without any gain.
            waits = [pool.submit(self._filled, begins[-1]) for _ in range(writers - 1)]
            writes = [pool.submit(self._write, begin) for begin in begins]
            try:
                record = self._digest(begins)
                for wait in waits:
                    wait.result()
                for write in writes:
                    write.result()
            except BaseException:
                self._stopped = True
                raise
        return record

    def _digest(self, begins: range) -> FileRecord:
        digester = ChunkDigester(self.seen)
        self._filled(begins[-1])
        for begin in begins:
            digester.update(self._filled(begin))
        return digester.record()

    def _filled(self, begin: int) -> memoryview:
        """Wait until the chunk at `begin` is filled, and return it."""
        end = min(begin + CHUNK_BYTES, self.nbytes)
        self.filling.wait(end, self._leave)
        return self.image[begin:end]

    def _leave(self) -> None:
        self.check()
        if self._stopped:
            raise CheckpointError("the file was abandoned")

    def _write(self, begin: int) -> None:
        end = begin + aligned(self._filled(begin).nbytes)
        self.pace.take(end - begin, self._leave)
        while begin < end and not self._stopped:
            self.check()
            begin += self._file.write_some(self.image[begin:end], begin)
