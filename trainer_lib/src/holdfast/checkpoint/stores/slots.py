"""Two slots in shared memory for each rank, of which one is always whole. No torch.

A slot is a file on a memory volume: a page with the sequence and two places for the table of contents, then the
bytes. The sequence is one aligned word, so it changes at once or not at all:

    odd     the bytes are being written, and nothing of the slot counts
    even    the bytes are whole, and the table in place (sequence / 2) mod 2 says what they are

Invariant: a writer that is killed at any instruction leaves the other slot as it was, and its own slot either as it
was after the last change of the sequence, or odd. A table ends in the digest of itself and of its sequence, and the
manifest in it has the digests of the bytes: what is torn is never taken for whole. Adding the manifest to a slot
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from holdfast.checkpoint.files import Buffer
from holdfast.checkpoint.manifest import CHUNK_BYTES, FileRecord, Manifest, decode, encode
from holdfast.checkpoint.names import MANIFEST, CommitName, parse_commit
from holdfast.errors import CheckpointError, DamagedError

SLOTS: Final = 2
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


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where bytes lie in a slot."""

    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a whole slot holds. `number` tells its bytes from all that were there before."""

    name: CommitName
    number: int
    files: Mapping[str, Extent] = field(default_factory=dict)
    manifest: Extent | None = None
    void: bool = False

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return max((one.offset + one.nbytes for one in (*self.files.values(), self.manifest) if one), default=_PAGE)

    def to_json(self) -> dict[str, Any]:
        """As the table has it."""
        return {
            "name": str(self.name),
            "number": self.number,
            "files": {name: [one.offset, one.nbytes] for name, one in self.files.items()},
            "manifest": [self.manifest.offset, self.manifest.nbytes] if self.manifest else None,
            "void": self.void,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Content | None:
        """Read a table."""
        name, manifest = parse_commit(value["name"]), value["manifest"]
        if name is None:
            return None
        return cls(
            name=name,
            number=value["number"],
            files={file: Extent(offset=offset, nbytes=nbytes) for file, (offset, nbytes) in value["files"].items()},
            manifest=Extent(offset=manifest[0], nbytes=manifest[1]) if manifest else None,
            void=value["void"],
        )


class Slot:
    """One slot's file, mapped."""

    def __init__(self, path: Path, *, writable: bool = False, populate: bool = False) -> None:
        self.path = path
        flags = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.capacity = os.fstat(fd).st_size
            if self.capacity < _PAGE:
                raise DamagedError(f"{path.name} is no slot")
            # Mapped at once: a first touch of each page costs more than the copy into it.
            kind = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, self.capacity, flags=kind, prot=access)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        self._sequence = self.view[:_WORD].cast("Q")

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
            table = self._table(sequence)
            if self.sequence == sequence:
                return table
        return None

    def read(self, content: Content, extent: Extent, offset: int, target: memoryview) -> None:
        """Copy bytes out; DamagedError if they are another commit's by now."""
        if offset + target.nbytes > extent.nbytes:
            raise DamagedError(f"it ends before byte {offset + target.nbytes}")
        begin = extent.offset + offset
        target[:] = self.view[begin : begin + target.nbytes]
        self.verify(content)

    def verify(self, content: Content) -> None:
        """DamagedError if the bytes of `content` may not be there any more."""
        now = self.content()
        if now is None or now.number != content.number:
            raise DamagedError(f"{content.name} was overwritten in memory while it was read")

    # Writing

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
        return Content.from_json(json.loads(raw))

    def close(self) -> None:
        """Unmap, as soon as nobody has a view of it any more."""
        self._sequence.release()
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


def _seal(raw: bytes, sequence: int) -> bytes:
    return xxhash.xxh3_128_digest(raw + sequence.to_bytes(_WORD, "little"))


def _padded(nbytes: int) -> int:
    return -(-(nbytes + nbytes // 64) // _STEP) * _STEP


def slot_path(folder: Path, owner: str, index: int) -> Path:
    """The file of one of an owner's slots."""
    return folder / f"{owner}.slot-{index}"


class SlotPair:
    """Both slots of one owner, as their only writer has them. `populate`: map them whole before they are used."""

    def __init__(self, folder: Path, owner: str, *, limit: int | None = None, populate: bool = True) -> None:
        self._populate = populate
        self._folder = folder
        self._owner = owner
        self._limit = limit
        self._lock = _locked(folder / f"{owner}.lock")
        self._slots: dict[int, Slot] = {}
        for leftover in folder.glob(f"{owner}.slot-?.tmp-*"):
            leftover.unlink(missing_ok=True)

    def contents(self) -> list[Content]:
        """What is whole here."""
        found = (self._open(index) for index in range(SLOTS))
        return [one for slot in found if slot and (one := slot.content()) and not one.void]

    def begin(self, name: CommitName, nbytes: int, *, keep: CommitName | None) -> SlotWriter:
        """Overwrite the slot that is not of `keep`. `nbytes` is for all files and the manifest."""
        index = self._victim(keep)
        slot = self._open(index)
        need = _PAGE + nbytes
        if slot is None or slot.capacity < need:
            slot = self._make(index, need)
        return SlotWriter(slot, name)

    def close(self) -> None:
        """Let another writer have them."""
        for slot in self._slots.values():
            slot.close()
        os.close(self._lock)

    def _victim(self, keep: CommitName | None) -> int:
        contents = [slot.content() if (slot := self._open(index)) else None for index in range(SLOTS)]

        def worth(index: int) -> tuple[Any, ...]:
            content = contents[index]
            if content is None or content.void:
                return (0,)
            sealed = content.manifest is not None
            return (1, content.name == keep, content.name.pair, content.name.step, sealed, content.number)

        return min(range(SLOTS), key=worth)

    def _make(self, index: int, need: int) -> Slot:
        """Both at once, so that what does not fit is known before the first commit."""
        self._drop(index)
        missing = [i for i in range(SLOTS) if i == index or self._open(i) is None]
        self._refuse_beyond(_padded(need) * len(missing), need)
        try:
            for i in missing:
                self._slots[i] = Slot.create(slot_path(self._folder, self._owner, i), need, populate=self._populate)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CheckpointError(self._too_small(need, "the volume is full")) from error
        return self._slots[index]

    def _refuse_beyond(self, more: int, need: int) -> None:
        volume = os.statvfs(self._folder)
        if more > volume.f_bavail * volume.f_frsize:
            raise CheckpointError(
                self._too_small(need, f"{_mib(volume.f_bavail * volume.f_frsize)} are free on {self._folder}")
            )
        used = sum(path.stat().st_size for path in self._folder.glob("*.slot-*"))
        if self._limit is not None and used + more > self._limit:
            raise CheckpointError(self._too_small(need, f"{_mib(used)} of {_mib(self._limit)} are in use"))

    def _too_small(self, need: int, why: str) -> str:
        return (
            f"the memory tier is too small: {self._owner} needs two slots of {_mib(_padded(need))}, "
            f"{_mib(SLOTS * _padded(need))} in all, and {why}: raise checkpoint.memory.sizeLimit (or --memory-tier "
            "PATH:SIZE, or the volume) to two slots for each rank of a worker, twice that with copies for a peer"
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
        slot_path(self._folder, self._owner, index).unlink(missing_ok=True)


class SlotWriter:
    """A commit's part on its way into a slot: a plain writable buffer for each file, then the seal."""

    def __init__(self, slot: Slot, name: CommitName) -> None:
        self._slot = slot
        self._content = Content(name=name, number=slot.begin())

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

    def view(self, file: str) -> memoryview:
        """One file's bytes as they are here."""
        extent = self._content.files[file]
        return self._slot.view[extent.offset : extent.offset + extent.nbytes]

    @property
    def files(self) -> tuple[str, ...]:
        """What is in it."""
        return tuple(self._content.files)

    def stage(self) -> None:
        """All bytes are here."""
        self._slot.stage(self._content)

    def seal(self, manifest: Manifest) -> None:
        """Add the manifest: it is a commit."""
        raw = encode(manifest)
        at = -(-self._content.end // PADDING) * PADDING
        if at + len(raw) > self._slot.capacity:
            raise CheckpointError(f"the manifest of {self._content.name} does not fit its slot")
        self._slot.view[at : at + len(raw)] = raw
        self._content = replace(self._content, manifest=Extent(offset=at, nbytes=len(raw)))
        self._slot.amend(self._content)


def fill(target: memoryview, parts: Iterable[Buffer]) -> FileRecord:
    """Copy parts into a buffer that they fill, and digest each chunk while it is warm."""
    whole, digests = xxhash.xxh3_128(), list[str]()
    filled = done = 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            piece = rest[: CHUNK_BYTES - (filled - done)]
            target[filled : filled + piece.nbytes] = piece
            filled, rest = filled + piece.nbytes, rest[piece.nbytes :]
            if filled - done == CHUNK_BYTES:
                digests.append(_digest(target[done:filled], whole))
                done = filled
    if filled > done:
        digests.append(_digest(target[done:filled], whole))
    if filled != target.nbytes:
        raise CheckpointError(f"{filled} bytes came for a file of {target.nbytes}")
    return FileRecord(nbytes=filled, digest=whole.hexdigest(), chunks=tuple(digests))


def _digest(chunk: memoryview, whole: xxhash.xxh3_128) -> str:
    whole.update(chunk)
    return xxhash.xxh3_128_hexdigest(chunk)


def manifest_of(slot: Slot, content: Content) -> Manifest | None:
    """The manifest in a slot, if it has one."""
    if content.manifest is None:
        return None
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
        for path in sorted(folder.glob("*.slot-[01]")):
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
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise CheckpointError(
                    f"another process writes the slots of {path.stem}: end it, or give this one another folder"
                ) from None
            time.sleep(0.01)


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20))} MiB"
