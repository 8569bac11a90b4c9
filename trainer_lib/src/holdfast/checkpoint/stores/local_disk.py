"""Checkpoints on a disk of this node, with only the files of this node's ranks, in one folder per rank. No torch.

A rank's folder is `<digest of the job>-own-<local rank>`, so that checkpoints of other jobs do not count. Each folder
is a tier with the same order of writes as the shared one, and with the same guarantee of complete checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import xxhash

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.stores.base import NodeStore
from holdfast.checkpoint.stores.folder import FolderSource
from holdfast.core.errors import CorruptCheckpointError
from holdfast.core.protocol import LOCAL_TIER

_OWN: Final = "-own-"


def own_folder(folder: Path, job: str, local_rank: int) -> Path:
    return folder / f"{_digest(job)}{_OWN}{local_rank}"


def own_folders(folder: Path, jobs: Collection[str] | None = None) -> list[Path]:
    """Return the folders of all ranks that ever ran here, or of those of some jobs."""
    found = sorted(folder.glob(f"*{_OWN}*"))
    kept = None if jobs is None else {_digest(job) for job in jobs}
    return [path for path in found if kept is None or path.name.partition(_OWN)[0] in kept]


def _digest(job: str) -> str:
    return xxhash.xxh3_64_hexdigest(job)


class LocalStore(NodeStore):
    """The checkpoints that the ranks of some jobs saved on this node."""

    def __init__(self, folder: Path, jobs: Collection[str] | None = None) -> None:
        self._folder = folder
        self._jobs = jobs
        self.url = f"{LOCAL_TIER}:{folder}"

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the checkpoints of which any rank has a manifest."""
        names = {name for folder in own_folders(self._folder, self._jobs) for name in catalog.list_commits(folder)}
        return tuple(sorted(names))

    def manifest(self, name: CheckpointName) -> Manifest:
        """Return the manifest from any rank that has a valid one."""
        damage = CorruptCheckpointError(f"{MANIFEST} is missing")
        for folder in self._having(name):
            try:
                return catalog.read_manifest(folder, name)
            except CorruptCheckpointError as error:
                damage = error
        raise damage

    def open(self, name: CheckpointName, file: str) -> FolderSource:
        """Open one of its files, if a rank of this node wrote it."""
        if file != Path(file).name:
            raise CorruptCheckpointError(f"{file!r} is not a file of a checkpoint")
        for folder in self._having(name):
            if (folder / str(name) / file).exists():
                return FolderSource(folder / str(name) / file)
        raise CorruptCheckpointError(f"{file} is missing in {self.url}")

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Move the checkpoint aside. The next checkpoint on this disk removes it."""
        moved = [catalog.quarantine(folder, name, reason) for folder in self._having(name)]
        return all(moved)

    def _having(self, name: CheckpointName) -> Iterator[Path]:
        return (folder for folder in own_folders(self._folder, self._jobs) if (folder / str(name)).is_dir())
