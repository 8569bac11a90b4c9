"""Write a checkpoint into an object store, without folders and renames. No torch.

The order of writes replaces the rename. Every file of a checkpoint is complete before the manifest is created, and
the store has compared its checksum if it can. One writer creates the manifest exclusively. Files without a manifest
are no checkpoint, whatever interrupted the writer. A `CONTENT` object comes before all files and identifies them. It
is also created exclusively, so that a writer of other content under the same name changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Final

from holdfast.checkpoint.folder.publish import encoded
from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, rank_file, slices_file, tensors_file
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.durable_files import Buffer, encode_json
from holdfast.checkpoint.io.shard import Shard
from holdfast.checkpoint.io.slice_digests import LEAST_BYTES, Slicer
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.stores.objects.bucket import Bucket, blocks_of, has_object
from holdfast.core.errors import CheckpointError

_log = logging.getLogger("holdfast.checkpoint.objects")

# With each copy's files, for use without Holdfast: `sha256sum --check` reads it.
SHA256SUMS: Final = "SHA256SUMS"
# The first object, which identifies the content of the checkpoint.
CONTENT: Final = "CONTENT"
GIVEN_UP: Final = "GIVEN-UP"
"""Exists in a checkpoint's folder while its files are removed."""
_NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})


class ObjectIncoming:
    """Files under the checkpoint's own name, which become a checkpoint when the manifest is created."""

    def __init__(self, bucket: Bucket, prefix: str, name: CheckpointName, content: str) -> None:
        self._bucket = bucket
        self._folder = f"{prefix}{name}/"
        self._name = name
        self._sums: dict[str, str] = {}
        if not bucket.create(self._folder + CONTENT, content.encode()):
            raise CheckpointError(
                f"{bucket.url}/{self._folder} is another {name}, which another process is writing or never "
                "finished. Nothing was changed. Use a separate prefix for each job, or delete that folder "
                "if no process writes it"
            )

    def write(self, file: str, parts: Iterable[Buffer]) -> FileRecord:
        sha256 = hashlib.sha256()
        record = upload(self._bucket, self._folder + file, parts, ChunkDigester(sha256.update))
        self._sums[file] = sha256.hexdigest()
        return record

    def publish(self, manifest: Manifest) -> None:
        sums = "".join(f"{digest}  {file}\n" for file, digest in sorted(self._sums.items()))
        create_manifest(self._bucket, self._folder, manifest, self._sums, before={SHA256SUMS: sums.encode()})

    def discard(self) -> None:
        """Remove what was written, unless it is a checkpoint."""
        try:
            mark_abandoned(self._bucket, self._folder)
        except CheckpointError as error:
            _log.warning("the uploaded part of %s is kept: %s", self._name, error)


def create_manifest(
    bucket: Bucket, folder: str, manifest: Manifest, files: Collection[str], *, before: Mapping[str, bytes] = _NOTHING
) -> None:
    """Turn `files` into a checkpoint: write the small files `before`, and then the manifest.

    If the same manifest exists already, an earlier reply was lost or another writer won. Another writer of the same
    checkpoint may remove files meanwhile (`mark_abandoned`). In this case, raise `CheckpointError` and remove the
    manifest that this call created, but never one that existed before.
    """
    raw, key = encoded(manifest), folder + MANIFEST
    _require_files(bucket, folder, files)
    for file, data in before.items():
        bucket.put(folder + file, data)
    removable = [] if has_object(bucket, key) else [key]
    if not bucket.create(key, raw):
        raise CheckpointError(
            f"{bucket.url}: {manifest.name} exists already, with another manifest. Nothing was changed"
        )
    _require_files(bucket, folder, files, otherwise=removable)


def _require_files(bucket: Bucket, folder: str, files: Iterable[str], otherwise: Sequence[str] = ()) -> None:
    """Raise `CheckpointError` if another writer is removing files, after deleting the keys `otherwise`."""
    here = {key.removeprefix(folder) for key in bucket.keys(folder)}
    if GIVEN_UP in here or not here.issuperset(files):
        bucket.delete(otherwise)
        raise CheckpointError(f"{bucket.url}/{folder} was abandoned by another writer: try again")


def mark_abandoned(bucket: Bucket, folder: str) -> None:
    """Remove unfinished files. A writer that publishes the same checkpoint finds the mark, or a missing file."""
    mark = folder + GIVEN_UP
    bucket.put(mark, b"")
    if not has_object(bucket, folder + MANIFEST):
        bucket.abandon(folder)
        bucket.delete([key for key in bucket.keys(folder) if key != mark])
    bucket.delete([mark])


def upload_shard(bucket: Bucket, folder: str, shard: Shard) -> dict[str, FileRecord]:
    """Write one rank's files, straight from its memory. A file is durable when its request has returned."""
    own, tensors, nbytes = rank_file(shard.rank), tensors_file(shard.rank), shard.plan.nbytes
    slicer = Slicer(nbytes)

    def seen(block: memoryview) -> None:
        slicer.update(block)
        shard.inspect(block)

    def passed() -> Iterator[memoryview]:
        """Yield each block when it is filled and the rate limit lets it pass."""
        for begin in range(0, nbytes, bucket.part_bytes):
            end = min(begin + bucket.part_bytes, nbytes)
            shard.filling.wait(end, shard.check)
            shard.pace.take(end - begin, shard.check)
            yield shard.image[begin:end]

    files = {
        own: upload(bucket, folder + own, [encode_json(shard.per_rank)], ChunkDigester()),
        tensors: upload(bucket, folder + tensors, passed(), ChunkDigester(seen)),
    }
    if nbytes >= LEAST_BYTES:
        bucket.put(folder + slices_file(tensors), slicer.encode(files[tensors]))
    return files


def upload(bucket: Bucket, key: str, parts: Iterable[Buffer], digests: ChunkDigester) -> FileRecord:
    """Write an object, and digest its blocks on another thread meanwhile. Return its record when it is durable."""
    digesting: Future[None] | None = None

    def passing(pool: Pool) -> Iterator[memoryview]:
        nonlocal digesting
        for block in blocks_of(parts, bucket.part_bytes):
            digesting = pool.submit(digests.update, block)
            yield block
            digesting.result()

    with Pool(1, "holdfast-digest") as pool:
        bucket.upload(key, passing(pool))
        if digesting is not None:
            digesting.result()  # the last block: an upload that has it asks for no more
    return digests.record()
