"""Reads the memory or the disk tier of one node, as its ranks and its launcher left it. Never changes it.

It may contain only some ranks' files of a checkpoint. The others are on other nodes, and their state is unknown here.
But the files of one rank are always stored together. If one of them is missing, it is lost. If a rank's folder has
only a manifest, the rank's files are lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, shard_rank
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.stores.base import CheckpointStore, NodeStore, Source
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.local_disk import own_folders
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.core.errors import CorruptCheckpointError, OtherNodeError, UsageError
from holdfast.core.protocol import LOCAL_TIER, MEMORY_TIER

_OWN: Final = re.compile(r"[0-9a-f]{16}-own-\d+", re.ASCII)
_LAUNCHERS: Final = "launcher-*"
_SLOTS: Final = "*.slot-[0-9]"


@dataclass(frozen=True, kw_only=True)
class NodeFolder:
    """Files of checkpoints that are stored together: one rank's folder, or the slots of one launcher's memory."""

    store: CheckpointStore
    has: Callable[[CheckpointName, str], bool]
    """Whether a file of a checkpoint exists, corrupt or not."""


class NodeFolderStore(NodeStore):
    """All folders of one tier of one node."""

    def __init__(self, url: str, folders: Sequence[NodeFolder]) -> None:
        self.url = url
        self._folders = folders

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the checkpoints with a manifest in any folder."""
        names = {name for folder in self._folders for name in folder.store.commits()}
        return tuple(sorted(names))

    def manifest(self, name: CheckpointName) -> Manifest:
        """Return the manifest, from any folder with a valid one."""
        damage = CorruptCheckpointError(f"{MANIFEST} is missing")
        for folder in self._having(name):
            try:
                return folder.store.manifest(name)
            except CorruptCheckpointError as error:
                damage = error
        raise damage

    def open(self, name: CheckpointName, file: str) -> Source:
        """Open a file of a checkpoint. Raises OtherNodeError if the file is not on this node."""
        for folder in self._folders:
            if folder.has(name, file):
                return folder.store.open(name, file)
        raise OtherNodeError(f"{file} of {name} is not in {self.url}: it is on the node of the rank that wrote it")

    def here(self, name: CheckpointName, files: Collection[str]) -> tuple[str, ...]:
        """Return those of a checkpoint's files that are on this node."""
        return tuple(file for file in sorted(files) if any(folder.has(name, file) for folder in self._folders))

    def lost(self, name: CheckpointName, files: Collection[str]) -> dict[str, str]:
        """Return the files that must be on this node and are missing, and how that is known."""
        found: dict[str, str] = {}
        for folder in self._having(name):
            there = [file for file in files if folder.has(name, file)]
            ranks = {shard_rank(file): file for file in there}
            for file in sorted(set(files) - set(there)):
                if (on_node := ranks.get(shard_rank(file))) is not None:
                    found[file] = f"{file} is missing, and {on_node}, which was written with it, is here"
            if not there:
                found[MANIFEST] = f"{MANIFEST} is in {folder.store.url}, and no rank's files are next to it"
        return found

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Raise UsageError: this store is read-only."""
        raise self.refusal()

    def refusal(self) -> UsageError:
        """Return the error that explains why this store is read-only."""
        return UsageError(
            f"holdfast checkpoints: {self.url} is read-only here, because its launcher and its ranks clean "
            "it up: use ls, show, verify, diff, export, or copy from it"
        )

    def _having(self, name: CheckpointName) -> list[NodeFolder]:
        return [folder for folder in self._folders if name in folder.store.commits()]


def open_node_store(path: Path) -> NodeFolderStore | None:
    """Return the store for a folder of a node-local tier, of one launcher, or of one rank; None otherwise."""
    folders = [path, *sorted(path.glob(_LAUNCHERS))]
    found = [path, *(own for folder in folders for own in own_folders(folder))]
    owns = [own for own in found if _OWN.fullmatch(own.name)]
    if owns:
        return NodeFolderStore(f"{LOCAL_TIER}:{path}", [_local_disk_folder(own) for own in owns])
    memories = [folder for folder in folders if any(folder.glob(_SLOTS))]
    if memories:
        return NodeFolderStore(f"{MEMORY_TIER}:{path}", [_memory_folder(folder) for folder in memories])
    return None


def _local_disk_folder(folder: Path) -> NodeFolder:
    return NodeFolder(
        store=FolderStore(folder, shared=False),
        has=lambda name, file: file == Path(file).name and (folder / str(name) / file).exists(),
    )


def _memory_folder(folder: Path) -> NodeFolder:
    store = MemoryStore(folder)

    def has(name: CheckpointName, file: str) -> bool:
        try:
            with store.open(name, file):
                return True
        except CorruptCheckpointError:
            return False

    return NodeFolder(store=store, has=has)
