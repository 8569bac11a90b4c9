"""A folder as a store: a shared volume that all ranks see, or a node-local disk. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder import publish as commit
from holdfast.checkpoint.folder.claims import highest_generation, list_claims, remove_claims, write_claim
from holdfast.checkpoint.folder.upload_marker import uploading_checkpoint
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.durable_files import (
    Buffer,
    make_folder,
    open_one_more,
    open_regular,
    sync_folder,
    write_file,
)
from holdfast.checkpoint.io.huge_pages import PAGE, address_of
from holdfast.checkpoint.stores.base import OpenSource, ShardWriter, needed_by
from holdfast.checkpoint.stores.memory.slot import FileRange
from holdfast.core import linux
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

_log = logging.getLogger("holdfast.checkpoint.stores.folder")

# Smaller files are read through the page cache.
_LEAST_DIRECT: Final = 1 << 20


class FolderSource(OpenSource):
    """An open file, which is read without the page cache if the file system supports it."""

    grain = PAGE  # parts may be read separately, and complete pages directly from the disk

    def __init__(self, path: Path) -> None:
        self._path = path
        with catalog.reading(path):
            self._fd = open_regular(path)
            self.nbytes = os.fstat(self._fd).st_size
        self._direct = _open_direct(path) if self.nbytes >= _LEAST_DIRECT else -1
        if self._direct >= 0:
            linux.advise(self._fd, "RANDOM")  # only single pages are read through this descriptor

    @property
    def staged(self) -> bool:
        """Whether a disk read into few pieces, followed by a copy, is faster."""
        return self._direct >= 0

    def place(self, offset: int, nbytes: int) -> FileRange:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise CorruptCheckpointError(f"{self._path.name} ends before byte {offset + nbytes}")
        return FileRange(fd=self._fd, offset=offset, nbytes=nbytes)

    def verify(self) -> None:
        """Do nothing: no writer overwrites a checkpoint in a folder."""

    def forget(self) -> None:
        """Drop the cached pages, so that the next read uses the disk, or the server of a network volume."""
        with contextlib.suppress(OSError):
            linux.advise(self._fd, "DONTNEED")

    def read_into(self, offset: int, target: memoryview) -> None:
        with catalog.reading(self._path):
            if self._direct >= 0 and offset % PAGE == 0 and address_of(target) % PAGE == 0:
                pages = target.nbytes // PAGE * PAGE
                done = _read_direct(self._direct, offset, target[:pages])
                offset, target = offset + done, target[done:]
            self._fill(offset, target)

    def _fill(self, offset: int, rest: memoryview) -> None:
        while rest.nbytes:
            count = os.preadv(self._fd, [rest], offset)
            if count == 0:
                raise CorruptCheckpointError(f"{self._path.name} ends before byte {offset + rest.nbytes}")
            rest, offset = rest[count:], offset + count

    def close(self) -> None:
        os.close(self._fd)
        if self._direct >= 0:
            os.close(self._direct)


def _open_direct(path: Path) -> int:
    """Open a file with O_DIRECT. Return -1 if the system or the file system does not support it."""
    if not linux.O_DIRECT:
        return -1
    try:
        return open_one_more(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | linux.O_DIRECT)
    except OSError:
        return -1


def _read_direct(fd: int, offset: int, target: memoryview) -> int:
    """Read complete pages, and return the number of bytes.

    The caller reads the rest through the page cache, which also reports errors.
    """
    done = 0
    while done < target.nbytes:
        try:
            count = os.preadv(fd, [target[done:]], offset + done)
        except OSError:
            break
        done += count // PAGE * PAGE
        if count == 0 or count % PAGE:
            break
    return done


class FolderIncoming:
    """A checkpoint that is written in a staging folder."""

    def __init__(self, root: Path, name: CheckpointName) -> None:
        make_folder(root)
        self._root = root
        self._staging = commit.begin(root, name)

    def write(self, file: str, parts: Iterable[Buffer]) -> FileRecord:
        return write_file(self._root / self._staging / file, parts)

    def publish(self, manifest: Manifest) -> None:
        commit.publish(self._root, self._staging, manifest)

    def discard(self) -> None:
        commit.discard(self._root, self._staging)


class FolderStore:
    def __init__(self, root: Path, *, shared: bool = True) -> None:
        """Open the folder. With `shared`, it is a volume that all ranks see; otherwise a node-local disk."""
        self._root = root
        self.shared = shared
        self.url = str(root)

    def commits(self) -> tuple[CheckpointName, ...]:
        return catalog.list_commits(self._root)

    def claims(self) -> tuple[Claim, ...]:
        return list_claims(self._root)

    def keep_claim(self, claim: Claim) -> None:
        """Write a claim exclusively. Writing the same claim again is not an error."""
        make_folder(self._root)
        write_claim(self._root, claim, again=True)

    def sweep(self, below: CheckpointName) -> None:
        """Remove the unfinished work of attempts before this checkpoint's."""
        catalog.clean(self._root, own=below.attempt_id)

    def manifest(self, name: CheckpointName) -> Manifest:
        return catalog.read_manifest(self._root, name)

    def open(self, name: CheckpointName, file: str) -> FolderSource:
        return FolderSource(self._root / str(name) / file)

    def receive(self, name: CheckpointName, content: str) -> FolderIncoming:
        """Begin a checkpoint, in a folder that no other writer uses."""
        return FolderIncoming(self._root, name)

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Move a corrupt checkpoint to `quarantine/`, unless another one needs its intact part."""
        needing = needed_by(self, name)
        if needing is not None:
            _log.error("%s is corrupt (%s) and is not moved: %s depends on it", name, reason, needing)
            return False
        return catalog.quarantine(self._root, name, reason)

    def delete(self, name: CheckpointName) -> None:
        catalog.delete(self._root, [name])

    # The shared tier of a job

    def prepare(self) -> None:
        make_folder(self._root)

    def exists(self, name: CheckpointName) -> bool:
        return commit.exists(self._root, name)

    def highest_generation(self) -> int:
        return highest_generation(self._root)

    def write_claim(self, claim: Claim, *, again: bool = False) -> None:
        write_claim(self._root, claim, again=again)

    def remove_claims(self, claims: Iterable[Claim]) -> None:
        remove_claims(self._root, claims)

    def clean(self, own: AttemptId) -> None:
        catalog.clean(self._root, own=own)

    def set_aside(self, name: CheckpointName, reason: str) -> None:
        try:
            catalog.move_to_quarantine(self._root, name, reason)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be moved to quarantine: {error.strerror}") from error

    def uploading(self) -> CheckpointName | None:
        return uploading_checkpoint(self._root)

    def begin(self, name: CheckpointName) -> str:
        make_folder(self._root)
        if self.exists(name):
            sync_folder(self._root)  # the last try may have failed after the rename
            return ""
        if (self._root / str(name)).exists():
            catalog.quarantine(self._root, name, "MANIFEST.json is missing")
        return commit.begin(self._root, name)

    def writer(self, staging: str) -> ShardWriter:
        return partial(commit.write_shard, self._root / staging)

    def publish(self, staging: str, manifest: Manifest) -> None:
        commit.publish(self._root, staging, manifest)

    def discard(self, staging: str) -> None:
        commit.discard(self._root, staging)
