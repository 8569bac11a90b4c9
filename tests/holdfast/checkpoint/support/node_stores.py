"""Stores of one node that a test fills with a complete checkpoint. In a job, ranks fill them part by part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest, encode
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.checkpoint.stores.folder import FolderIncoming
from holdfast.checkpoint.stores.local_disk import LocalStore, own_folder
from holdfast.checkpoint.stores.memory.peer_client import space_for
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore


class FilledLocalStore(LocalStore):
    """The disk of a node."""

    def receive(self, name: CheckpointName, content: str) -> FolderIncoming:
        return FolderIncoming(own_folder(self._folder, "", 0), name)


class FilledMemoryStore(MemoryStore):
    """The memory of a node."""

    def receive(self, name: CheckpointName, content: str) -> MemoryIncoming:
        self._folder.mkdir(parents=True, exist_ok=True)
        return MemoryIncoming(self._folder, name)


class MemoryIncoming:
    """A checkpoint that is written to one slot. Its size is known only with its last file."""

    def __init__(self, folder: Path, name: CheckpointName) -> None:
        self._folder = folder
        self._name = name
        self._files: dict[str, bytearray] = {}

    def write(self, file: str, parts: Iterable[Buffer]) -> FileRecord:
        self._files[file] = data = bytearray().join(parts)
        digester = ChunkDigester()
        digester.update(memoryview(data))
        return digester.record()

    def publish(self, manifest: Manifest) -> None:
        room = space_for(map(len, self._files.values()), len(encode(manifest)))
        slots = SlotSet(self._folder, "own-0")
        writer = slots.begin(self._name, room, keep=(), job=manifest.job_uid)
        for file, data in self._files.items():
            writer.write(file, [data], len(data))
        writer.stage()
        writer.seal(manifest)
        slots.close()

    def discard(self) -> None:
        self._files.clear()
