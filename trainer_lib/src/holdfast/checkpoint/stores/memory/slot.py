"""A slot: a file in shared memory that holds one rank's part of a checkpoint. No torch.

A slot is a file on a memory volume. Its first page has the sequence and two places for the table of contents. The
bytes follow. The sequence is one aligned word, so each change is atomic:

    odd     the bytes are being written, and nothing in the slot is valid
    even    the bytes are complete, and the table in place (sequence / 2) mod 2 describes them

Invariant: if a writer is killed at any instruction, the other slots are unchanged. Its own slot is as it was after
the last change of the sequence, or odd. A table ends with the digest of itself and of its sequence, and the manifest
in it has the digests of the bytes. A torn write is therefore never taken for a complete one. To add the manifest to a
complete slot, the writer writes the other table and increases the sequence by two. The sequence is never odd
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import LARGEST, Manifest, decode_as
from holdfast.checkpoint.format.records import whole_number
from holdfast.checkpoint.io.durable_files import open_itself
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

PAGE: Final = 4096
_TABLE: Final = 1024
_TABLES: Final = (PAGE // 4, PAGE // 2)
_DIGEST: Final = 16
_WORD: Final = 8

# A slot is slightly larger than requested: counters grow by digits, and a new file costs its page faults again.
_STEP: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A range of bytes in a slot."""

    offset: int
    nbytes: int

    @classmethod
    def from_json(cls, value: Any) -> Extent:
        """Parse an entry of a table. Raise `ValueError` or `TypeError` if it is not valid."""
        offset, nbytes = map(whole_number, value)
        return cls(offset=offset, nbytes=nbytes)


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """A range of bytes of an open file."""

    fd: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a complete slot, and its checkpoint.

    `number` distinguishes the bytes from all earlier ones. `copied` means that another node has them as well.
    """

    name: CheckpointName
    number: int
    job: str = ""
    files: Mapping[str, Extent] = field(default_factory=dict)
    manifest: Extent | None = None
    void: bool = False
    copied: bool = False

    @property
    def end(self) -> int:
        return max((one.offset + one.nbytes for one in (*self.files.values(), self.manifest) if one), default=PAGE)

    def lies_within(self, capacity: int) -> bool:
        """Return whether everything in the table is within a slot of this length."""
        extents = [*self.files.values(), *([self.manifest] if self.manifest else [])]
        return self.end <= capacity and all(one.offset >= PAGE for one in extents)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": str(self.name),
            "number": self.number,
            "job": self.job,
            "files": {name: [one.offset, one.nbytes] for name, one in self.files.items()},
            "manifest": [self.manifest.offset, self.manifest.nbytes] if self.manifest else None,
            "void": self.void,
            "copied": self.copied,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Content | None:
        """Parse a table. Return None if this release does not know it."""
        try:
            name, manifest = parse_commit(value["name"]), value["manifest"]
            if name is None or name.staging:
                return None
            return cls(
                name=name,
                number=whole_number(value["number"]),
                job=str(value["job"]),
                files={file: Extent.from_json(extent) for file, extent in value["files"].items()},
                manifest=Extent.from_json(manifest) if manifest else None,
                void=bool(value["void"]),
                copied=bool(value.get("copied", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


class Slot:
    """The mapped file of one slot."""

    def __init__(self, path: Path, *, writable: bool = False, populate: bool = False) -> None:
        self.path = path
        self.fd = open_itself(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.capacity = os.fstat(self.fd).st_size
            if self.capacity < PAGE:
                raise CorruptCheckpointError(f"{path.name} is not a slot")
            # Mapped at once: the first access to each page costs more than the copy into it.
            kind = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(self.fd, self.capacity, flags=kind, prot=access)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        self._sequence = self.view[:_WORD].cast("Q")
        self._seen: tuple[int, Content | None] = (0, None)

    @classmethod
    def create(cls, path: Path, capacity: int, *, populate: bool = False) -> Slot:
        """Create a slot with its pages allocated. Raise `OSError` (ENOSPC) if the volume has no capacity."""
        fresh = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, padded(capacity))
            fresh.rename(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(path, writable=True, populate=populate)

    @property
    def sequence(self) -> int:
        """The sequence, which is odd while bytes are written."""
        return self._sequence[0]

    def content(self) -> Content | None:
        """Return the complete content; None if there is none."""
        for _ in range(100):
            sequence = self.sequence
            if sequence % 2 or not sequence:
                return None
            seen = self._seen  # a sequence occurs only once, and so does its table
            table = seen[1] if seen[0] == sequence else self._table(sequence)
            if self.sequence == sequence:
                self._seen = sequence, table
                return table
        return None

    def read(self, content: Content, extent: Extent, offset: int, target: memoryview) -> None:
        """Copy bytes from the slot. Raise `CorruptCheckpointError` if another checkpoint has overwritten them."""
        if offset + target.nbytes > extent.nbytes:
            raise CorruptCheckpointError(f"it ends before byte {offset + target.nbytes}")
        begin, done = extent.offset + offset, 0
        while done < target.nbytes:
            # Not from the mapping, which would fault in each page and block other threads.
            count = os.preadv(self.fd, [target[done:]], begin + done)
            if not count:
                raise CorruptCheckpointError(f"it ends before byte {offset + target.nbytes}")
            done += count
        self.verify(content)

    def verify(self, content: Content) -> None:
        """Raise `CorruptCheckpointError` if the bytes of `content` may have been overwritten."""
        now = self.content()
        if now is None or now.number != content.number:
            raise CorruptCheckpointError(f"{content.name} was overwritten in memory while it was read")

    # Writing

    def empty(self) -> None:
        """Invalidate the content and free its memory, even if other processes have the file open.

        A process that the script forked keeps it open and mapped until it exits. The first page stays, so that
        readers find no content.
        """
        self.begin()
        # a file system without holes, or no bytes after the first page
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_REMOVE, PAGE, self.capacity - PAGE)

    def begin(self) -> int:
        """Invalidate the content, and return the number of the next one."""
        number = self.sequence + 1 + self.sequence % 2
        self._sequence[0] = number
        return number

    def stage(self, content: Content) -> None:
        """Make `content` valid: its bytes are complete."""
        self._switch(content, self.sequence + 1)

    def amend(self, content: Content) -> None:
        """Change the table of the same bytes."""
        self._switch(content, self.sequence + 2)

    def _switch(self, content: Content, sequence: int) -> None:
        raw = json.dumps(content.to_json(), separators=(",", ":")).encode()
        if _WORD + _DIGEST + len(raw) > _TABLE:
            raise CheckpointError(f"the table of {content.name} does not fit in its slot")
        at = _TABLES[sequence // 2 % 2]
        head = len(raw).to_bytes(_WORD, "little") + _seal(raw, sequence)
        self.view[at : at + len(head) + len(raw)] = head + raw
        self._sequence[0] = sequence

    def _table(self, sequence: int) -> Content | None:
        at = _TABLES[sequence // 2 % 2]
        length = int.from_bytes(self.view[at : at + _WORD], "little")
        if length > _TABLE - _WORD - _DIGEST:
            return None
        begin = at + _WORD + _DIGEST
        raw = bytes(self.view[begin : begin + length])
        if self.view[at + _WORD : begin] != _seal(raw, sequence):
            return None
        try:
            content = Content.from_json(json.loads(raw))
        except (ValueError, RecursionError):
            return None
        return content if content is not None and content.lies_within(self.capacity) else None

    def close(self) -> None:
        """Unmap the file as soon as no view of it is left."""
        self._sequence.release()
        self.view.release()
        os.close(self.fd)
        with contextlib.suppress(BufferError):
            self._map.close()


def _seal(raw: bytes, sequence: int) -> bytes:
    return xxhash.xxh3_128_digest(raw + sequence.to_bytes(_WORD, "little"))


def padded(nbytes: int) -> int:
    return -(-(nbytes + nbytes // 64) // _STEP) * _STEP


def remove(path: Path) -> None:
    """Remove a slot and free its memory."""
    with contextlib.suppress(OSError, CorruptCheckpointError):
        slot = Slot(path, writable=True)
        slot.empty()
        slot.close()
    path.unlink(missing_ok=True)


def slot_path(folder: Path, owner: str, index: int) -> Path:
    return folder / f"{owner}.slot-{index}"


def manifest_of(slot: Slot, content: Content) -> Manifest | None:
    """Return the manifest in a slot; None if it has none."""
    if content.manifest is None:
        return None
    if content.manifest.nbytes > LARGEST:
        raise CorruptCheckpointError(
            f"{MANIFEST}: {content.manifest.nbytes} bytes are more than the limit for this file"
        )
    raw = bytearray(content.manifest.nbytes)
    slot.read(content, content.manifest, 0, memoryview(raw))
    return decode_as(bytes(raw), content.name)


@contextlib.contextmanager
def opened(folder: Path, *, writable: bool = False) -> Iterator[list[tuple[Slot, Content]]]:
    """Yield every slot of a folder with complete content, open until the context ends."""
    slots: list[Slot] = []
    try:
        for path in sorted(folder.glob("*.slot-[0-9]")):
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                slots.append(Slot(path, writable=writable))
        yield [(slot, content) for slot in slots if (content := slot.content()) and not content.void]
    finally:
        for slot in slots:
            slot.close()
