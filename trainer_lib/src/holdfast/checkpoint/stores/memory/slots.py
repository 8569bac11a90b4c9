"""The slots of one owner: which one is overwritten next, and how much memory they may use. No torch.

Each rank has two or three slots, of which one is always complete. Only one process at a time writes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.stores.memory.slot import PAGE, Slot, padded, remove, slot_path
from holdfast.checkpoint.stores.memory.slot_writer import SlotWriter
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, NoCapacityError
from holdfast.core.settings import format_size

_OTHER_WRITER_SECONDS: Final = 10.0
_NUMBERS: Final = {2: "two", 3: "three"}


class SlotSet:
    """The slots of one owner, for their only writer. `count` is the number of slots.

    With `populate`, a slot's pages are mapped before it is used.
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
        self,
        name: CheckpointName,
        nbytes: int,
        *,
        keep: Collection[CheckpointName],
        job: str = "",
        freed_later: int = 0,
    ) -> SlotWriter:
        """Overwrite a slot that holds none of `keep`. `nbytes` is the size of all files and the manifest.

        `freed_later` is the number of bytes that others free once this checkpoint is complete. Slots that need them
        are created only then.
        """
        index = self._victim(keep)
        slot = self._open(index)
        need = PAGE + nbytes
        if slot is None or slot.capacity < need:
            slot = self._make(index, need, freed_later)
        return SlotWriter(slot, name, job)

    def copied(self) -> frozenset[CheckpointName]:
        """Return the checkpoints of which another node has these bytes as well."""
        contents = [slot.content() for index in self._indices() if (slot := self._open(index)) is not None]
        return frozenset(one.name for one in contents if one is not None and one.copied and not one.void)

    def close(self) -> None:
        """Unlock the slots for another writer."""
        for slot in self._slots.values():
            slot.close()
        os.close(self._lock)

    def _indices(self) -> list[int]:
        """Return the slot numbers, including those above `count`, which may hold the only remaining data."""
        there = (int(path.name[-1]) for path in self._folder.glob(f"{self._owner}.slot-[0-9]"))
        return sorted({*range(self.count), *there})

    def _victim(self, keep: Collection[CheckpointName]) -> int:
        indices = self._indices()
        contents = {index: slot.content() if (slot := self._open(index)) else None for index in indices}

        def priority(index: int) -> tuple[Any, ...]:
            content = contents[index]
            if content is None or content.void:
                return (0,)
            sealed = content.manifest is not None
            return (1, content.name in keep, content.name.attempt_id, content.name.step, sealed, content.number)

        return min(indices, key=priority)

    def _make(self, index: int, need: int, freed_later: int) -> Slot:
        """Create all missing slots at once, so that a lack of capacity is reported before the first checkpoint."""
        self._drop(index)
        missing = [i for i in self._indices() if i == index or self._open(i) is None]
        lacks = self._lacks(padded(need) * len(missing))
        if lacks and not self._lacks(padded(need) * len(missing) - freed_later):
            missing, lacks = [index], self._lacks(padded(need))
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
        """Explain why this many more bytes do not fit; "" if they do."""
        volume = os.statvfs(self._folder)
        if more > volume.f_bavail * volume.f_frsize:
            return f"{format_size(volume.f_bavail * volume.f_frsize)} are free on {self._folder}"
        used = sum(path.stat().st_size for path in self._folder.glob("*.slot-*"))
        if self._limit is not None and used + more > self._limit:
            return f"{format_size(used)} of {format_size(self._limit)} are in use"
        return ""

    def _too_small(self, need: int, why: str) -> NoCapacityError:
        count = _NUMBERS.get(self.count, str(self.count))
        return NoCapacityError(
            f"the memory tier is too small: {self._owner} needs {count} slots of "
            f"{format_size(padded(need))}, {format_size(self.count * padded(need))} in all, and {why}. "
            "Raise checkpoint.memory.sizeLimit (or --memory-tier PATH:SIZE, or the volume) to two slots "
            "for each rank of a worker, two more with copies for a peer, and one more if only some "
            "checkpoints are copied"
        )

    def _open(self, index: int) -> Slot | None:
        if index not in self._slots:
            try:
                path = slot_path(self._folder, self._owner, index)
                self._slots[index] = Slot(path, writable=True, populate=self._populate)
            except (FileNotFoundError, CorruptCheckpointError):
                return None
        return self._slots[index]

    def _drop(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            slot.close()
        remove(slot_path(self._folder, self._owner, index))


def _locked(path: Path) -> int:
    """Lock the slots for one writer. The lock of a killed writer is released by the system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _OTHER_WRITER_SECONDS
    while True:
        try:
            # A lock of this process, not of the descriptor: a child that the script forked must not keep it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                os.close(fd)
                raise CheckpointError(
                    f"another process writes the slots of {path.stem}: end it, or use another folder for this process"
                ) from None
            time.sleep(0.01)
