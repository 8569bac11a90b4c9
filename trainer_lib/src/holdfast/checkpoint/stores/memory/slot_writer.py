"""Write a rank's part of a checkpoint into a slot. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest, encode
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.checkpoint.stores.memory.slot import Content, Extent, FileRange, Slot
from holdfast.core.errors import CheckpointError

# Each file begins at a page; this is the most that the alignment needs.
PADDING: Final = 4096


class SlotWriter:
    """Writes a rank's part of a checkpoint into a slot: a writable buffer for each file, and then the seal."""

    def __init__(self, slot: Slot, name: CheckpointName, job: str) -> None:
        self._slot = slot
        self._content = Content(name=name, number=slot.begin(), job=job)

    def buffer(self, file: str, nbytes: int) -> memoryview:
        """Return the buffer of one file, to be filled before `stage`."""
        at = -(-self._content.end // PADDING) * PADDING
        if at + nbytes > self._slot.capacity:
            raise CheckpointError(f"{file} ({nbytes} bytes) does not fit in the slot of {self._content.name}")
        self._content = replace(self._content, files={**self._content.files, file: Extent(offset=at, nbytes=nbytes)})
        return self._slot.view[at : at + nbytes]

    def write(self, file: str, parts: Iterable[Buffer], nbytes: int) -> FileRecord:
        """Copy one file into the slot, and digest it at the same time."""
        target, digester, filled = self.buffer(file, nbytes), ChunkDigester(), 0
        for part in parts:
            data = memoryview(part).cast("B")
            target[filled : filled + data.nbytes] = data
            filled += data.nbytes
            digester.follow(target, filled)
        if filled != nbytes:
            raise CheckpointError(f"{filled} bytes arrived for a file of {nbytes}")
        return digester.record()

    def place(self, file: str) -> FileRange:
        extent = self._content.files[file]
        return FileRange(fd=self._slot.fd, offset=extent.offset, nbytes=extent.nbytes)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._content.files)

    def stage(self) -> None:
        """Mark all bytes as complete."""
        self._slot.stage(self._content)

    def seal(self, manifest: Manifest, *, copied: bool = False) -> None:
        """Add the manifest, which makes the content part of a checkpoint."""
        raw = encode(manifest)
        at = -(-self._content.end // PADDING) * PADDING
        if at + len(raw) > self._slot.capacity:
            raise CheckpointError(f"the manifest of {self._content.name} does not fit in its slot")
        self._slot.view[at : at + len(raw)] = raw
        self._content = replace(self._content, manifest=Extent(offset=at, nbytes=len(raw)), copied=copied)
        self._slot.amend(self._content)
