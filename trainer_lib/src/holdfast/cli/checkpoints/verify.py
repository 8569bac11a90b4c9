"""Reading every byte of a commit, by several threads, and naming what is damaged. Changes nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.checkpoint.dcp.metadata import check_described
from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, inherited
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.safetensors_header import check_json, check_source
from holdfast.checkpoint.save import lossy_delta
from holdfast.checkpoint.stores.base import CheckpointStore, Source, open_file
from holdfast.cli.checkpoints.access.commit_reader import check_length, chunk_bytes, memory, read_chunk, read_file
from holdfast.cli.checkpoints.access.node_store import NearStore
from holdfast.cli.checkpoints.access.progress_bar import Progress, progress
from holdfast.core.errors import DamagedError, ElsewhereError, UnknownFormatError

# As many as keep a disk busy while others digest.
READERS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A part of a file that is not what was written, and the tensors that lie in it."""

    file: str
    reason: str
    tensors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"file": self.file, "reason": self.reason, "tensors": list(self.tensors)}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What came of reading a commit whole."""

    name: CheckpointName
    nbytes: int
    damages: tuple[Damage, ...] = ()
    unknown: str = ""  # why this release cannot judge it
    gone: bool = False  # deleted while it was read
    elsewhere: tuple[str, ...] = ()
    """Files that lie on other nodes, of which nothing is known here."""

    @property
    def damaged(self) -> bool:
        """Whether something was found that is not what was written."""
        return bool(self.damages)

    @property
    def whole(self) -> bool:
        """Whether every byte is the one that was written."""
        return not self.damages and not self.unknown and not self.gone and not self.elsewhere

    @property
    def reason(self) -> str:
        """For the note beside a commit that is moved aside."""
        return "; ".join(damage.reason for damage in self.damages)

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "commit": str(self.name),
            "whole": self.whole,
            "bytes": self.nbytes,
            "damage": [damage.to_json() for damage in self.damages],
            "unknown": self.unknown,
            "gone": self.gone,
            "elsewhere": list(self.elsewhere),
        }


@dataclass(frozen=True, kw_only=True)
class _ChunkRef:
    file: str
    source: Source
    index: int


def verify(store: CheckpointStore, name: CheckpointName) -> Verification:
    """Read all of a commit; an error that says nothing about its bytes is raised."""
    try:
        verdict = _verify(store, name)
    except ElsewhereError:  # what lies elsewhere is not asked for: it was here
        return Verification(name=name, nbytes=0, gone=True)
    if verdict.damaged and name not in store.commits():
        return Verification(name=name, nbytes=0, gone=True)  # retention was faster
    return verdict


def _verify(store: CheckpointStore, name: CheckpointName) -> Verification:
    try:
        manifest = store.manifest(name)
    except DamagedError as error:
        return Verification(name=name, nbytes=0, damages=(Damage(file=MANIFEST, reason=str(error)),))
    except UnknownFormatError as error:
        return Verification(name=name, nbytes=0, unknown=str(error))
    damages: list[Damage] = []
    elsewhere: tuple[str, ...] = ()
    own, seen = manifest.own, None
    if isinstance(store, NearStore):
        seen = lost, here = store.lost(name, own), store.here(name, own)
        damages += [_damage(manifest, file, reason, 0, sys.maxsize) for file, reason in lost.items()]
        elsewhere = tuple(sorted(manifest.files.keys() - {*here, *lost}))
        manifest = replace(manifest, files={file: manifest.files[file] for file in here})
    total = _read_bytes(manifest)
    with ExitStack() as opened, progress(f"verify {name}", total) as shown:
        parts = _Shared(_parts(store, name, manifest, opened, damages))
        with ThreadPoolExecutor(READERS) as pool:
            tasks = [pool.submit(_read, parts, manifest, damages, shown) for _ in range(READERS)]
        for task in tasks:
            task.result()
        damages += _meaning(store, name, manifest, {damage.file for damage in damages})
    if isinstance(store, NearStore) and (store.lost(name, own), store.here(name, own)) != seen:
        return Verification(
            name=name, nbytes=0, gone=True
        )  # the next commit takes the slot of one rank before another's
    found = sorted(damages, key=lambda damage: (damage.file, damage.reason))
    return Verification(name=name, nbytes=total, damages=tuple(found), elsewhere=elsewhere)


def _meaning(
    store: CheckpointStore, name: CheckpointName, manifest: Manifest, bad: Collection[str]
) -> Iterator[Damage]:
    """What a restore, or a load through DCP, refuses in files whose bytes are all as they were written."""
    try:
        check_described(manifest)
    except DamagedError as error:
        yield Damage(file=MANIFEST, reason=str(error))
    for file, record in sorted(manifest.files.items()):
        if file in bad:
            continue
        try:
            with open_file(store, name, file) as source:
                check_source(source, file=file, manifest=manifest)
                if file.endswith(".json"):
                    check_json(file, b"".join(read_file(file, source, record)))
                yield from _bad_patches(manifest, file, source)
        except DamagedError as error:
            yield Damage(file=file, reason=str(error))


def _bad_patches(manifest: Manifest, file: str, source: Source) -> Iterator[Damage]:
    for one in lossy_delta.of_file(manifest, file):
        if one.patch.count:
            source.read_into(one.patch.places, one.places)
        try:
            lossy_delta.checked(one)
        except DamagedError as error:
            yield _damage(manifest, file, str(error), one.patch.places, one.patch.places + 1)


def _parts(
    store: CheckpointStore, name: CheckpointName, manifest: Manifest, opened: ExitStack, damages: list[Damage]
) -> Iterator[_ChunkRef]:
    for file, record in sorted(manifest.files.items()):
        try:
            source = opened.enter_context(open_file(store, name, file))
            check_length(file, source, record)
        except DamagedError as error:
            damages.append(_damage(manifest, file, str(error), 0, record.nbytes))
            continue
        yield from (_ChunkRef(file=file, source=source, index=index) for index in _indices(manifest, file))


def _indices(manifest: Manifest, file: str) -> Sequence[int]:
    """The parts of a file that this commit is made of: all of its own, of others those with bytes of it."""
    if inherited(file) is None:
        return range(len(manifest.files[file].chunks))
    length = chunk_bytes(manifest)
    chunks = (chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks if chunk.file == file)
    spans = (range(chunk.offset // length, -(-(chunk.offset + chunk.nbytes) // length)) for chunk in chunks)
    return sorted({index for span in spans for index in span})


def _read_bytes(manifest: Manifest) -> int:
    """How much is read to verify it."""
    length = chunk_bytes(manifest)
    return sum(
        min(length, record.nbytes - index * length)
        for file, record in manifest.files.items()
        for index in _indices(manifest, file)
    )


class _Shared:
    """One list of parts for all threads."""

    def __init__(self, parts: Iterator[_ChunkRef]) -> None:
        self._parts = parts
        self._lock = threading.Lock()

    def next(self) -> _ChunkRef | None:
        with self._lock:
            return next(self._parts, None)


def _read(parts: _Shared, manifest: Manifest, damages: list[Damage], shown: Progress) -> None:
    length = chunk_bytes(manifest)
    window = memory(length)
    while (part := parts.next()) is not None:
        record = manifest.files[part.file]
        begin = part.index * length
        end = min(record.nbytes, begin + length)
        try:
            read_chunk(part.file, part.source, record, part.index, window[: end - begin])
        except DamagedError as error:
            damages.append(_damage(manifest, part.file, str(error), begin, end))
        shown.add(end - begin)


def _damage(manifest: Manifest, file: str, reason: str, begin: int, end: int) -> Damage:
    hit = (
        name
        for name, tensor in manifest.tensors.items()
        for own, offset, nbytes in tensor.spans
        if own == file and offset < end and begin < offset + nbytes
    )
    return Damage(file=file, reason=reason, tensors=tuple(sorted(set(hit))))
