"""Two or three slots in shared memory for each rank, of which one is always whole. No torch.

A slot is a file on a memory volume: a page with the sequence and two places for the table of contents, then the
bytes. The sequence is one aligned word, so it changes at once or not at all:

    odd     the bytes are being written, and nothing of the slot counts
    even    the bytes are whole, and the table in place (sequence / 2) mod 2 says what they are

Invariant: a writer that is killed at any instruction leaves the other slots as they were, and its own slot either as
it was after the last change of the sequence, or odd. A table ends in the digest of itself and of its sequence, and
the manifest in it has the digests of the bytes: what is torn is never taken for whole. Adding the manifest to a slot
whose bytes are whole writes the other table and moves the sequence on by two; it never goes through odd.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import (
    CHUNK_BYTES,
    LARGEST,
    FileRecord,
    Manifest,
    decode,
    encode,
    whole_number,
)
from holdfast.checkpoint.io.direct_writer import BLOCK_BYTES
from holdfast.checkpoint.io.durable_files import Buffer, open_itself
from holdfast.core.errors import CheckpointError, DamagedError, NoRoomError

_PAGE: Final = 4096
_TABLE: Final = 1024
_TABLES: Final = (_PAGE // 4, _PAGE // 2)
_DIGEST: Final = 16
_WORD: Final = 8
# Each file begins at a page, and what it takes to get there.
PADDING: Final = 4096
# A slot is made a little larger than asked for: counters grow by digits, and a new file costs its page faults.
_STEP: Final = 1 << 20
_OTHER_WRITER_SECONDS: Final = 10.0
_NUMBERS: Final = {2: "two", 3: "three"}


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where bytes lie in a slot."""

    offset: int
    nbytes: int

    @classmethod
    def from_json(cls, value: Any) -> Extent:
        """As a table has it; ValueError or TypeError for anything else."""
        offset, nbytes = map(whole_number, value)
        return cls(offset=offset, nbytes=nbytes)


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes of an open file."""

    fd: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a whole slot holds, and of whose commit. `number` tells its bytes from all that were there before;
    `copied` says that another node has them as well."""

    name: CheckpointName
    number: int
    job: str = ""
    files: Mapping[str, Extent] = field(default_factory=dict)
    manifest: Extent | None = None
    void: bool = False
    copied: bool = False

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return max((one.offset + one.nbytes for one in (*self.files.values(), self.manifest) if one), default=_PAGE)

    def lies_within(self, capacity: int) -> bool:
        """Whether a slot of this length has room for all that is said to be there."""
        extents = [*self.files.values(), *([self.manifest] if self.manifest else [])]
        return self.end <= capacity and all(one.offset >= _PAGE for one in extents)

    def to_json(self) -> dict[str, Any]:
        """As the table has it."""
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
        """Read a table; None if it is of nothing that this release knows."""
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
    """One slot's file, mapped."""

    def __init__(self, path: Path, *, writable: bool = False, populate: bool = False) -> None:
        self.path = path
        self.fd = open_itself(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            self.capacity = os.fstat(self.fd).st_size
            if self.capacity < _PAGE:
                raise DamagedError(f"{path.name} is no slot")
            # Mapped at once: a first touch of each page costs more than the copy into it.
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
        """A new slot whose pages are there already; OSError (ENOSPC) if the volume has no room for them."""
        fresh = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _padded(capacity))
            fresh.rename(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(path, writable=True, populate=populate)

    @property
    def sequence(self) -> int:
        """Odd while bytes are written."""
        return self._sequence[0]

    def content(self) -> Content | None:
        """What is whole in it; None if nothing is."""
        for _ in range(100):
            sequence = self.sequence
            if sequence % 2 or not sequence:
                return None
            seen = self._seen  # a sequence comes once, and so does its table
            table = seen[1] if seen[0] == sequence else self._table(sequence)
            if self.sequence == sequence:
                self._seen = sequence, table
                return table
        return None

    def read(self, content: Content, extent: Extent, offset: int, target: memoryview) -> None:
        """Copy bytes out; DamagedError if they are another commit's by now."""
        if offset + target.nbytes > extent.nbytes:
            raise DamagedError(f"it ends before byte {offset + target.nbytes}")
        begin, done = extent.offset + offset, 0
        while done < target.nbytes:
            # Not out of the mapping: that would fault in each page, and keep other threads from running.
            count = os.preadv(self.fd, [target[done:]], begin + done)
            if not count:
                raise DamagedError(f"it ends before byte {offset + target.nbytes}")
            done += count
        self.verify(content)

    def verify(self, content: Content) -> None:
        """DamagedError if the bytes of `content` may not be there any more."""
        now = self.content()
        if now is None or now.number != content.number:
            raise DamagedError(f"{content.name} was overwritten in memory while it was read")

    # Writing

    def empty(self) -> None:
        """Nothing here counts any more, and its memory is free, whoever holds the file: a process that the script
        forked has it open and mapped for as long as it lives. The first page stays: who reads it finds it void."""
        self.begin()
        with contextlib.suppress(OSError, ValueError):  # a file system without holes, or nothing behind the page
            self._map.madvise(mmap.MADV_REMOVE, _PAGE, self.capacity - _PAGE)

    def begin(self) -> int:
        """From now on nothing here counts; the number of what comes."""
        number = self.sequence + 1 + self.sequence % 2
        self._sequence[0] = number
        return number

    def stage(self, content: Content) -> None:
        """The bytes are whole: it counts from now on."""
        self._switch(content, self.sequence + 1)

    def amend(self, content: Content) -> None:
        """Say something else of the same bytes."""
        self._switch(content, self.sequence + 2)

    def _switch(self, content: Content, sequence: int) -> None:
        raw = json.dumps(content.to_json(), separators=(",", ":")).encode()
        if _WORD + _DIGEST + len(raw) > _TABLE:
            raise CheckpointError(f"the table of {content.name} does not fit its slot")
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
        """Unmap, as soon as nobody has a view of it any more."""
        self._sequence.release()
        self.view.release()
        os.close(self.fd)
        with contextlib.suppress(BufferError):
            self._map.close()


def _seal(raw: bytes, sequence: int) -> bytes:
    return xxhash.xxh3_128_digest(raw + sequence.to_bytes(_WORD, "little"))


def _padded(nbytes: int) -> int:
    return -(-(nbytes + nbytes // 64) // _STEP) * _STEP


def remove(path: Path) -> None:
    """Remove a slot, and what it takes."""
    with contextlib.suppress(OSError, DamagedError):
        slot = Slot(path, writable=True)
        slot.empty()
        slot.close()
    path.unlink(missing_ok=True)


def slot_path(folder: Path, owner: str, index: int) -> Path:
    """The file of one of an owner's slots."""
    return folder / f"{owner}.slot-{index}"


class SlotSet:
    """The slots of one owner, as their only writer has them. `count` is how many there are to be from now on.

    `populate`: map them whole before they are used.
    """

    def __init__(
        self, folder: Path, owner: str, *, limit: int | None = None, populate: bool = True, count: int = 2
    ) -> None:
        self.count = count
        self._populate = populate
        self._folder = folder
        self._owner = owner
        self._limit = limit
        self._lock = _locked(folder / f"{owner}.lock")
        self._slots: dict[int, Slot] = {}
        for leftover in folder.glob(f"{owner}.slot-?.tmp-*"):
            leftover.unlink(missing_ok=True)

    def begin(
        self, name: CheckpointName, nbytes: int, *, keep: Collection[CheckpointName], job: str = "", promised: int = 0
    ) -> SlotWriter:
        """Overwrite a slot that is none of `keep`. `nbytes` is for all files and the manifest.

        `promised`: bytes that others hold until this commit stands. What fits only then is made only then.
        """
        index = self._victim(keep)
        slot = self._open(index)
        need = _PAGE + nbytes
        if slot is None or slot.capacity < need:
            slot = self._make(index, need, promised)
        return SlotWriter(slot, name, job)

    def copied(self) -> frozenset[CheckpointName]:
        """The commits of which another node has these bytes as well."""
        contents = [slot.content() for index in self._indices() if (slot := self._open(index)) is not None]
        return frozenset(one.name for one in contents if one is not None and one.copied and not one.void)

    def close(self) -> None:
        """Let another writer have them."""
        for slot in self._slots.values():
            slot.close()
        os.close(self._lock)

    def _indices(self) -> list[int]:
        """Those of a time when there were more are used on: what they hold may be all that is left."""
        there = (int(path.name[-1]) for path in self._folder.glob(f"{self._owner}.slot-[0-9]"))
        return sorted({*range(self.count), *there})

    def _victim(self, keep: Collection[CheckpointName]) -> int:
        indices = self._indices()
        contents = {index: slot.content() if (slot := self._open(index)) else None for index in indices}

        def worth(index: int) -> tuple[Any, ...]:
            content = contents[index]
            if content is None or content.void:
                return (0,)
            sealed = content.manifest is not None
            return (1, content.name in keep, content.name.pair, content.name.step, sealed, content.number)

        return min(indices, key=worth)

    def _make(self, index: int, need: int, promised: int) -> Slot:
        """All at once, so that what does not fit is known before the first commit."""
        self._drop(index)
        missing = [i for i in self._indices() if i == index or self._open(i) is None]
        lacks = self._lacks(_padded(need) * len(missing))
        if lacks and not self._lacks(_padded(need) * len(missing) - promised):
            missing, lacks = [index], self._lacks(_padded(need))
        if lacks:
            raise self._too_small(need, lacks)
        try:
            for i in missing:
                self._slots[i] = Slot.create(slot_path(self._folder, self._owner, i), need, populate=self._populate)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._too_small(need, "the volume is full") from error
        return self._slots[index]

    def _lacks(self, more: int) -> str:
        """Why so much more does not fit; nothing if it does."""
        volume = os.statvfs(self._folder)
        if more > volume.f_bavail * volume.f_frsize:
            return f"{_mib(volume.f_bavail * volume.f_frsize)} are free on {self._folder}"
        used = sum(path.stat().st_size for path in self._folder.glob("*.slot-*"))
        if self._limit is not None and used + more > self._limit:
            return f"{_mib(used)} of {_mib(self._limit)} are in use"
        return ""

    def _too_small(self, need: int, why: str) -> NoRoomError:
        count = _NUMBERS.get(self.count, str(self.count))
        return NoRoomError(
            f"the memory tier is too small: {self._owner} needs {count} slots of {_mib(_padded(need))}, "
            f"{_mib(self.count * _padded(need))} in all, and {why}: raise checkpoint.memory.sizeLimit (or "
            "--memory-tier PATH:SIZE, or the volume) to two slots for each rank of a worker, two more with copies "
            "for a peer, and one more where only some commits are copied"
        )

    def _open(self, index: int) -> Slot | None:
        if index not in self._slots:
            try:
                path = slot_path(self._folder, self._owner, index)
                self._slots[index] = Slot(path, writable=True, populate=self._populate)
            except (FileNotFoundError, DamagedError):
                return None
        return self._slots[index]

    def _drop(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            slot.close()
        remove(slot_path(self._folder, self._owner, index))


class SlotWriter:
    """A commit's part on its way into a slot: a plain writable buffer for each file, then the seal."""

    def __init__(self, slot: Slot, name: CheckpointName, job: str) -> None:
        self._slot = slot
        self._content = Content(name=name, number=slot.begin(), job=job)

    def buffer(self, file: str, nbytes: int) -> memoryview:
        """Room for one file, to be filled before `stage`."""
        at = -(-self._content.end // PADDING) * PADDING
        if at + nbytes > self._slot.capacity:
            raise CheckpointError(f"{file} ({nbytes} bytes) does not fit the slot of {self._content.name}")
        self._content = replace(self._content, files={**self._content.files, file: Extent(offset=at, nbytes=nbytes)})
        return self._slot.view[at : at + nbytes]

    def write(self, file: str, parts: Iterable[Buffer], nbytes: int) -> FileRecord:
        """Copy one file in, digested on the way."""
        return fill(self.buffer(file, nbytes), parts)

    def place(self, file: str) -> FileRange:
        """Where one file's bytes are."""
        extent = self._content.files[file]
        return FileRange(fd=self._slot.fd, offset=extent.offset, nbytes=extent.nbytes)

    @property
    def files(self) -> tuple[str, ...]:
        """What is in it."""
        return tuple(self._content.files)

    def stage(self) -> None:
        """All bytes are here."""
        self._slot.stage(self._content)

    def seal(self, manifest: Manifest, *, copied: bool = False) -> None:
        """Add the manifest: it is a commit."""
        raw = encode(manifest)
        at = -(-self._content.end // PADDING) * PADDING
        if at + len(raw) > self._slot.capacity:
            raise CheckpointError(f"the manifest of {self._content.name} does not fit its slot")
        self._slot.view[at : at + len(raw)] = raw
        self._content = replace(self._content, manifest=Extent(offset=at, nbytes=len(raw)), copied=copied)
        self._slot.amend(self._content)


class Digests:
    """The digests of a buffer that is filled from its beginning on, taken while what was filled is still warm.

    `seen` gets all of it, block by block, and may raise.
    """

    def __init__(self, target: memoryview, seen: Callable[[memoryview], None] = lambda _: None) -> None:
        self._target = target
        self._seen = seen
        self._whole = xxhash.xxh3_128()
        self._chunks: list[str] = []
        self._done = 0

    def up_to(self, filled: int) -> None:
        """So much is there by now."""
        while self._done < filled:
            end = min(self._done + CHUNK_BYTES, self._target.nbytes)
            if end > filled:
                return
            chunk, own = self._target[self._done : end], xxhash.xxh3_128()
            for at in range(0, chunk.nbytes, BLOCK_BYTES):
                block = chunk[at : at + BLOCK_BYTES]
                self._whole.update(block)
                own.update(block)
                self._seen(block)
            self._chunks.append(own.hexdigest())
            self._done = end

    def record(self) -> FileRecord:
        """Of all of it."""
        if self._done != self._target.nbytes:
            raise CheckpointError(f"{self._done} bytes came for a file of {self._target.nbytes}")
        return FileRecord(nbytes=self._done, digest=self._whole.hexdigest(), chunks=tuple(self._chunks))


def fill(target: memoryview, parts: Iterable[Buffer]) -> FileRecord:
    """Copy parts into a buffer that they fill."""
    digests, filled = Digests(target), 0
    for part in parts:
        data = memoryview(part).cast("B")
        target[filled : filled + data.nbytes] = data
        filled += data.nbytes
        digests.up_to(filled)
    return digests.record()


def manifest_of(slot: Slot, content: Content) -> Manifest | None:
    """The manifest in a slot, if it has one."""
    if content.manifest is None:
        return None
    if content.manifest.nbytes > LARGEST:
        raise DamagedError(f"{MANIFEST}: {content.manifest.nbytes} bytes are more than it can have")
    raw = bytearray(content.manifest.nbytes)
    slot.read(content, content.manifest, 0, memoryview(raw))
    manifest = decode(bytes(raw))
    if (manifest.step, manifest.pair) != (content.name.step, content.name.pair):
        raise DamagedError(f"{MANIFEST} is that of step {manifest.step}, attempt {manifest.pair}")
    return manifest


@contextlib.contextmanager
def opened(folder: Path, *, writable: bool = False) -> Iterator[list[tuple[Slot, Content]]]:
    """Every slot of a folder that holds something whole, until the block ends."""
    slots: list[Slot] = []
    try:
        for path in sorted(folder.glob("*.slot-[0-9]")):
            with contextlib.suppress(FileNotFoundError, DamagedError):
                slots.append(Slot(path, writable=writable))
        yield [(slot, content) for slot in slots if (content := slot.content()) and not content.void]
    finally:
        for slot in slots:
            slot.close()


def _locked(path: Path) -> int:
    """One writer at a time; one that was killed has let go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _OTHER_WRITER_SECONDS
    while True:
        try:
            # Of this process, not of the descriptor: a child that the script forked must not hold it any longer.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                os.close(fd)
                raise CheckpointError(
                    f"another process writes the slots of {path.stem}: end it, or give this one another folder"
                ) from None
            time.sleep(0.01)


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20))} MiB"
