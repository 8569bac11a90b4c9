"""Verifies every byte of a checkpoint with several threads, and reports corrupt parts. Changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from holdfast.checkpoint.dcp.metadata import check_described
from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, inherited
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.safetensors_header import check_json, check_source
from holdfast.checkpoint.restore import lossy_delta
from holdfast.checkpoint.restore.chunk_reader import ChunkReader, read_into, read_small
from holdfast.checkpoint.restore.copies import Copies, Span
from holdfast.checkpoint.restore.memory_layout import Extent
from holdfast.checkpoint.stores.base import CheckpointStore, open_file
from holdfast.cli.checkpoints.access.node_store import NodeFolderStore
from holdfast.cli.checkpoints.access.progress_bar import Progress, progress
from holdfast.core.errors import CorruptCheckpointError, OtherNodeError, UnknownFormatError

# Enough threads to keep a disk busy while others compute digests.
READERS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A corrupt part of a file, and the tensors in it."""

    file: str
    reason: str
    tensors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "reason": self.reason, "tensors": list(self.tensors)}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of reading a complete checkpoint."""

    name: CheckpointName
    nbytes: int
    damages: tuple[Damage, ...] = ()
    unknown: str = ""  # why this release cannot verify it
    gone: bool = False  # deleted while it was read
    elsewhere: tuple[str, ...] = ()
    """Files on other nodes, whose state is unknown here."""

    @property
    def damaged(self) -> bool:
        """Whether a part is corrupt."""
        return bool(self.damages)

    @property
    def verified(self) -> bool:
        """Whether every byte was verified."""
        return not self.damages and not self.unknown and not self.gone and not self.elsewhere

    @property
    def reason(self) -> str:
        """The reason in the note of a quarantined checkpoint."""
        return "; ".join(damage.reason for damage in self.damages)

    def to_json(self) -> dict[str, Any]:
        return {
            "commit": str(self.name),
            "verified": self.verified,
            "bytes": self.nbytes,
            "damage": [damage.to_json() for damage in self.damages],
            "unknown": self.unknown,
            "gone": self.gone,
            "elsewhere": list(self.elsewhere),
        }


def verify(store: CheckpointStore, name: CheckpointName) -> Verification:
    """Read the complete checkpoint. Errors that are unrelated to its bytes are raised."""
    try:
        verification = _verify(store, name)
    except OtherNodeError:  # only local files are read, so it was here before
        return Verification(name=name, nbytes=0, gone=True)
    if verification.damaged and name not in store.commits():
        return Verification(name=name, nbytes=0, gone=True)  # retention deleted it
    return verification


def _verify(store: CheckpointStore, name: CheckpointName) -> Verification:
    try:
        manifest = store.manifest(name)
    except CorruptCheckpointError as error:
        return Verification(name=name, nbytes=0, damages=(Damage(file=MANIFEST, reason=str(error)),))
    except UnknownFormatError as error:
        return Verification(name=name, nbytes=0, unknown=str(error))
    damages: list[Damage] = []
    elsewhere: tuple[str, ...] = ()
    own, seen = manifest.own, None
    if isinstance(store, NodeFolderStore):
        seen = lost, here = store.lost(name, own), store.here(name, own)
        damages += [_damage(manifest, file, reason, 0, sys.maxsize) for file, reason in lost.items()]
        elsewhere = tuple(sorted(manifest.files.keys() - {*here, *lost}))
        manifest = replace(manifest, files={file: manifest.files[file] for file in here})
    total = sum(span.end - span.begin for file in manifest.files for span in _spans(manifest, file))
    copies = Copies(openers=[partial(open_file, store, name)], records=manifest.files)
    with closing(copies), progress(f"verify {name}", total) as shown:
        damages += _read_all(copies, manifest, shown)
        damages += _meaning(copies, manifest, {damage.file for damage in damages})
    if isinstance(store, NodeFolderStore) and (store.lost(name, own), store.here(name, own)) != seen:
        return Verification(
            name=name, nbytes=0, gone=True
        )  # the next checkpoint replaces the slot of one rank before another's
    found = sorted(damages, key=lambda damage: (damage.file, damage.reason))
    return Verification(name=name, nbytes=total, damages=tuple(found), elsewhere=elsewhere)


def _read_all(copies: Copies, manifest: Manifest, shown: Progress) -> list[Damage]:
    """Return the files that cannot be opened, and the corrupt chunks."""
    reader, damages = ChunkReader(copies), list[Damage]()

    def read(span: Span) -> None:
        try:
            reader.read(span)
        except CorruptCheckpointError as error:
            damages.append(_damage(manifest, span.file, str(error), span.begin, span.end))
        shown.add(span.end - span.begin)

    def spans() -> Iterator[Span]:
        for file, record in sorted(manifest.files.items()):
            try:
                copies.require(file)
            except CorruptCheckpointError as error:
                damages.append(_damage(manifest, file, str(error), 0, record.nbytes))
            else:
                yield from _spans(manifest, file)

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(read, spans()):
            pass
    return damages


def _meaning(copies: Copies, manifest: Manifest, bad: Collection[str]) -> Iterator[Damage]:
    """Yield files with intact bytes that a restore or a load with DCP would reject."""
    try:
        check_described(manifest)
    except CorruptCheckpointError as error:
        yield Damage(file=MANIFEST, reason=str(error))
    for file in sorted(manifest.files.keys() - bad):
        try:
            copies.fetch(file, partial(check_source, file=file, manifest=manifest), settled=True)
            if file.endswith(".json"):
                check_json(file, read_small(copies, file))
            yield from _bad_patches(copies, manifest, file)
        except CorruptCheckpointError as error:
            yield Damage(file=file, reason=str(error))


def _bad_patches(copies: Copies, manifest: Manifest, file: str) -> Iterator[Damage]:
    for one in lossy_delta.of_file(manifest, file):
        if one.patch.count:
            read_into(copies, {file: [Extent.over(one.patch.places, one.places)]})
        try:
            lossy_delta.checked(one)
        except CorruptCheckpointError as error:
            yield _damage(manifest, file, str(error), one.patch.places, one.patch.places + 1)


def _spans(manifest: Manifest, file: str) -> Iterator[Span]:
    """Yield the chunks of a file that this checkpoint uses: all of its own, the referenced ones of others."""
    nbytes = manifest.files[file].nbytes
    for index in _indices(manifest, file):
        begin = index * CHUNK_BYTES
        yield Span(file=file, begin=begin, end=min(nbytes, begin + CHUNK_BYTES))


def _indices(manifest: Manifest, file: str) -> Sequence[int]:
    if inherited(file) is None:
        return range(len(manifest.files[file].chunks))
    chunks = (chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks if chunk.file == file)
    spans = (range(one.offset // CHUNK_BYTES, -(-(one.offset + one.nbytes) // CHUNK_BYTES)) for one in chunks)
    return sorted({index for span in spans for index in span})


def _damage(manifest: Manifest, file: str, reason: str, begin: int, end: int) -> Damage:
    hit = (
        name
        for name, tensor in manifest.tensors.items()
        for own, offset, nbytes in tensor.spans
        if own == file and offset < end and begin < offset + nbytes
    )
    return Damage(file=file, reason=reason, tensors=tuple(sorted(set(hit))))
