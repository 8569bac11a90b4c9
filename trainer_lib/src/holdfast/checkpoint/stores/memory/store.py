"""The memory of one node as a store: the slots of its ranks, and those that it keeps for others. No torch.

A slot has one rank's part of a checkpoint, so a node may have only some files of it. Other nodes have the rest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.io.memcpy import PROCESSORS
from holdfast.checkpoint.stores.base import NodeStore, OpenSource
from holdfast.checkpoint.stores.memory.slot import Content, Extent, FileRange, Slot, manifest_of, opened
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

_log = logging.getLogger("holdfast.checkpoint.memory")

_MOST_READERS: Final = 8


class SlotSource(OpenSource):
    """A file in a slot. If its bytes are overwritten while it is open, reads raise an error."""

    grain = 1  # any part can be copied separately

    def __init__(self, slot: Slot, content: Content, file: str) -> None:
        self._slot = slot
        self._content = content
        self._file = file
        self._extent: Extent = content.files[file]
        self.nbytes = self._extent.nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        try:
            self._slot.read(self._content, self._extent, offset, target)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self._file}: {error}") from None

    def place(self, offset: int, nbytes: int) -> FileRange:
        """Return the place of the bytes, which are valid only if `verify` succeeds afterwards."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise CorruptCheckpointError(f"{self._file} ends before byte {offset + nbytes}")
        return FileRange(fd=self._slot.fd, offset=self._extent.offset + offset, nbytes=nbytes)

    def verify(self) -> None:
        """Raise `CorruptCheckpointError` if the bytes may have changed."""
        self._slot.verify(self._content)

    def close(self) -> None:
        self._slot.close()


class MemoryStore(NodeStore):
    """All slots in a folder of a memory volume, or those of some jobs.

    An earlier job on the same host may have left slots there.
    """

    readers = min(PROCESSORS, _MOST_READERS)  # reads from memory do not wait, and few threads use all its bandwidth

    def __init__(self, folder: Path, jobs: Collection[str] | None = None) -> None:
        self._folder = folder
        self._jobs = jobs
        self.url = f"memory:{folder}"

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the checkpoints with a manifest here."""
        with self._opened() as slots:
            names = {content.name for _, content in slots if content.manifest is not None}
        return tuple(sorted(names))

    def manifest(self, name: CheckpointName) -> Manifest:
        """Return the manifest from any slot that has a valid one."""
        damage = f"{MANIFEST} is missing"
        with self._opened() as slots:
            for slot, content in slots:
                try:
                    found = manifest_of(slot, content) if content.name == name else None
                except CorruptCheckpointError as error:
                    damage = str(error)
                    continue
                if found is not None:
                    return found
        raise CorruptCheckpointError(damage)

    def open(self, name: CheckpointName, file: str) -> SlotSource:
        """Open one of its files, if this node has it, even if the manifest is elsewhere."""
        for path in sorted(self._folder.glob("*.slot-[0-9]")):
            try:
                slot = Slot(path)
            except (FileNotFoundError, CorruptCheckpointError):
                continue
            content = slot.content()
            if content is not None and self._counts(content) and content.name == name and file in content.files:
                return SlotSource(slot, content, file)
            slot.close()
        raise CorruptCheckpointError(f"{file} is missing in {self.url}")

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Mark the checkpoint as void. Its bytes stay until a later checkpoint needs the slot."""
        try:
            with self._opened(writable=True) as slots:
                for slot, content in slots:
                    if content.name == name:
                        slot.amend(replace(content, void=True))
        except (OSError, CheckpointError):
            return False
        _log.error("%s is corrupt in memory (%s) and is not read again", name, reason)
        return True

    @contextlib.contextmanager
    def _opened(self, *, writable: bool = False) -> Iterator[list[tuple[Slot, Content]]]:
        with opened(self._folder, writable=writable) as slots:
            yield [(slot, content) for slot, content in slots if self._counts(content)]

    def _counts(self, content: Content) -> bool:
        return not content.void and (self._jobs is None or content.job in self._jobs)
