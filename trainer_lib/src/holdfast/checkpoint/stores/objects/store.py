"""Checkpoints in an object store, without folders, renames or links. No torch.

The names are those of a folder tier. The order of writes replaces the rename. Every file of a checkpoint is complete
before the manifest is created, and the store has compared its checksum if it can. One writer creates the manifest
exclusively. Files without a manifest do not count as a checkpoint, whatever interrupted the writer. A `CONTENT`
object comes before all files and identifies them. It is also created exclusively, so that a writer of other content
under the same name changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol, TypeVar
from uuid import uuid4

from holdfast.checkpoint.folder import claims
from holdfast.checkpoint.folder.claims import parse_document
from holdfast.checkpoint.format.file_names import (
    CLAIMS,
    MANIFEST,
    QUARANTINE,
    CheckpointName,
    claim_file,
    parse_claim,
    parse_commit,
)
from holdfast.checkpoint.format.manifest import LARGEST, Manifest, decode_as, encode
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.chunk_digester import ChunkDigester
from holdfast.checkpoint.io.durable_files import Buffer, encode_json
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.stores.base import OpenSource, needed_by
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, ClaimError, CorruptCheckpointError, UnknownFormatError

_log = logging.getLogger("holdfast.checkpoint.objects")

# With each checkpoint's files, for use without Holdfast: `sha256sum --check` reads it.
SHA256SUMS: Final = "SHA256SUMS"
# The first object, which identifies the content of the checkpoint.
CONTENT: Final = "CONTENT"
GIVEN_UP: Final = "GIVEN-UP"
"""Exists in a checkpoint's folder while its files are removed."""
IN_FLIGHT: Final = 8

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Stat:
    """An object's length, and a tag that changes with its content."""

    nbytes: int
    tag: str


class Bucket(Protocol):
    """The operations of an object store.

    A missing object is a `CorruptCheckpointError`; other failures are an `UnavailableError`.
    """

    @property
    def url(self) -> str:
        """The location, without credentials."""

    @property
    def lacks(self) -> Sequence[str]:
        """Descriptions of the features that the store was found to lack, and of their replacements."""

    @property
    def part_bytes(self) -> int:
        """The bytes of a file that are processed at once: a multiple of the digests' chunk."""

    @property
    def in_flight(self) -> int:
        """The number of parts that may be transferred at once."""

    def folders(self, prefix: str) -> list[str]:
        """Return the names directly below a prefix that have keys below them."""

    def keys(self, prefix: str) -> list[str]:
        """Return every key with this prefix."""

    def stat(self, key: str) -> Stat:
        """Return an object's length and tag."""

    def read(self, key: str, most: int) -> bytes:
        """Return a small object. Raise `CorruptCheckpointError` if it has more than `most` bytes."""

    def read_into(self, key: str, stat: Stat, offset: int, target: memoryview) -> None:
        """Read a part of an object, which must still be the one that `stat` describes."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object that does not exist. Return False if it exists with other bytes."""

    def put(self, key: str, data: bytes) -> None: ...

    def upload(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Write an object in blocks of `part_bytes`. Each block may be reused when the next one is requested."""

    def copy(self, source: str, target: str) -> None: ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. A missing one is not an error."""

    def unfinished(self, prefix: str) -> list[str]:
        """Return the keys below a prefix with unfinished uploads."""

    def abandon(self, prefix: str) -> None:
        """Abort the unfinished uploads below a prefix."""


def check_small(key: str, nbytes: int, most: int) -> None:
    """Raise `CorruptCheckpointError` if an object is larger than anything that is written there."""
    if nbytes > most:
        raise CorruptCheckpointError(
            f"{key.rpartition('/')[2]}: {nbytes} bytes are more than the limit for this file"
        )


def holds(bucket: Bucket, key: str, data: bytes) -> bool:
    """Return whether an object has these bytes; False too if another writer replaces or removes it meanwhile."""
    try:
        return bucket.stat(key).nbytes == len(data) and bucket.read(key, len(data)) == data
    except CorruptCheckpointError:
        return False


def create_by_looking(bucket: Bucket, key: str, data: bytes) -> bool:
    """Implement `Bucket.create` without exclusive creation: check, write, and read back the result.

    If two writers do so at the same time, the last one wins. The other one reads the winner's bytes, unless it read
    back before.
    """
    if not _exists(bucket, key):
        bucket.put(key, data)
    return holds(bucket, key, data)


def blocks_of(parts: Iterable[Buffer], size: int) -> Iterator[memoryview]:
    """Yield the same bytes in blocks of `size`, the last one shorter. All blocks share one buffer."""
    buffer = memoryview(bytearray(size))
    filled = 0
    for part in parts:
        source = memoryview(part).cast("B")
        while source.nbytes:
            taken = source[: size - filled]
            if not filled and taken.nbytes == size:
                yield taken
            else:
                buffer[filled : filled + taken.nbytes] = taken
                filled = (filled + taken.nbytes) % size
                if not filled:
                    yield buffer
            source = source[taken.nbytes :]
    if filled:
        yield buffer[:filled]


class ObjectSource(OpenSource):
    """An object, open for reading."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._stat = bucket.stat(key)
        self.nbytes = self._stat.nbytes

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + target.nbytes > self.nbytes:
            raise CorruptCheckpointError(f"{self._key.rpartition('/')[2]} ends before byte {offset + target.nbytes}")
        if target.nbytes:
            self._bucket.read_into(self._key, self._stat, offset, target)


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
        digests = ChunkDigester(sha256.update)

        def passing(pool: Pool) -> Iterator[memoryview]:
            for block in blocks_of(parts, self._bucket.part_bytes):
                digesting = pool.submit(digests.update, block)
                yield block
                digesting.result()

        with Pool(1, "holdfast-digest") as pool:  # leaving the context waits for the last block
            self._bucket.upload(self._folder + file, passing(pool))
        self._sums[file] = sha256.hexdigest()
        return digests.record()

    def publish(self, manifest: Manifest) -> None:
        """Create the manifest. If the same manifest exists already, an earlier reply was lost or another writer won.

        Another writer of the same checkpoint may remove files meanwhile (`_mark_abandoned`). In this case, raise
        `CheckpointError` and remove the manifest that this call created, but never one that existed before.
        """
        self._require_files()
        sums = "".join(f"{digest}  {file}\n" for file, digest in sorted(self._sums.items()))
        self._bucket.put(self._folder + SHA256SUMS, sums.encode())
        key = self._folder + MANIFEST
        removable = [] if _exists(self._bucket, key) else [key]
        if not self._bucket.create(key, encode(manifest)):
            raise CheckpointError(
                f"{self._bucket.url}: {self._name} exists already, with another manifest. Nothing was changed"
            )
        self._require_files(otherwise=removable)

    def _require_files(self, otherwise: Sequence[str] = ()) -> None:
        """Raise `CheckpointError` if another writer is removing files, after deleting the keys `otherwise`."""
        here = {key.removeprefix(self._folder) for key in self._bucket.keys(self._folder)}
        if GIVEN_UP in here or not here.issuperset(self._sums):
            self._bucket.delete(otherwise)
            raise CheckpointError(f"{self._bucket.url}/{self._folder} was abandoned by another writer: try again")

    def discard(self) -> None:
        """Remove what was written, unless it is a checkpoint."""
        try:
            _mark_abandoned(self._bucket, self._folder)
        except CheckpointError as error:
            _log.warning("the uploaded part of %s is kept: %s", self._name, error)


def _mark_abandoned(bucket: Bucket, folder: str) -> None:
    """Remove unfinished files. A writer that publishes the same checkpoint finds the mark, or a missing file."""
    mark = folder + GIVEN_UP
    bucket.put(mark, b"")
    if not _exists(bucket, folder + MANIFEST):
        bucket.abandon(folder)
        bucket.delete([key for key in bucket.keys(folder) if key != mark])
    bucket.delete([mark])


def _exists(bucket: Bucket, key: str) -> bool:
    try:
        bucket.stat(key)
    except CorruptCheckpointError:
        return False
    return True


class ObjectStore:
    """Checkpoints below a prefix of a bucket."""

    shared = True

    def __init__(self, bucket: Bucket, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"{bucket.url}/{self._prefix}".rstrip("/")
        self.readers = bucket.in_flight

    def rehearse(self, name: str) -> Sequence[str]:
        """List, write, read back and delete, as an upload and a restore would. Nothing stays in the bucket.

        Return descriptions of the features that the store lacks. Raise `CheckpointError` if it creates an object that
        exists.
        """
        self._bucket.folders(self._prefix)
        key, data = f"{self._prefix}.preflight-{name}", name.encode()
        self._bucket.put(key, data)
        try:
            if self._bucket.read(key, len(data)) != data:
                raise CorruptCheckpointError(f"{self._bucket.url}/{key} holds other bytes than were written")
            if self._bucket.create(key, data + b"."):
                raise CheckpointError(
                    f"{self._bucket.url}/{key} was created although it exists: two jobs could overwrite each other's "
                    "checkpoints here. Use another store"
                )
        finally:
            self._bucket.delete([key])
        return self._bucket.lacks

    def commits(self) -> tuple[CheckpointName, ...]:
        parsed = [parse_commit(name) for name in self._bucket.folders(self._prefix)]
        names = [name for name in parsed if name is not None and not name.staging]
        there = self._concurrently(lambda name: _exists(self._bucket, self._key(name, MANIFEST)), names)
        return tuple(name for name, exists in zip(names, there, strict=True) if exists)

    def claims(self) -> tuple[Claim, ...]:
        folder = f"{self._prefix}{CLAIMS}/"
        found = [(key, parse_claim(key.removeprefix(folder))) for key in self._bucket.keys(folder)]
        pairs = sorted((parsed[0], key) for key, parsed in found if parsed is not None and not parsed[1])
        raw = self._concurrently(lambda entry: self._bucket.read(entry[1], claims.LARGEST), pairs)
        return tuple(
            parse_document(data, attempt_id, f"{self._bucket.url}/{key}")
            for (attempt_id, key), data in zip(pairs, raw, strict=True)
        )

    def keep_claim(self, claim: Claim) -> None:
        """Write a claim exclusively. Writing the same claim again is not an error."""
        key = f"{self._prefix}{CLAIMS}/{claim_file(claim.attempt_id)}"
        if not self._bucket.create(key, encode_json(claim.to_json())):
            raise ClaimError(
                f"{self._bucket.url}/{key} exists: another job has claimed attempt {claim.attempt_id} here. Use a "
                "separate prefix for each job"
            )

    def manifest(self, name: CheckpointName) -> Manifest:
        return decode_as(self._bucket.read(self._key(name, MANIFEST), LARGEST), name)

    def open(self, name: CheckpointName, file: str) -> ObjectSource:
        return ObjectSource(self._bucket, self._key(name, file))

    def receive(self, name: CheckpointName, content: str) -> ObjectIncoming:
        """Begin a checkpoint, or resume an interrupted one of the same content."""
        return ObjectIncoming(self._bucket, self._prefix, name, content)

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Copy a corrupt checkpoint below `quarantine/`, and then delete it, its manifest first.

        A checkpoint that others need stays.
        """
        folder = f"{self._prefix}{name}/"
        target = f"{self._prefix}{QUARANTINE}/{name}.{uuid4().hex[:8]}"
        note = {"path": str(name), "reason": reason, "time": datetime.now(UTC).isoformat()}
        try:
            needing = needed_by(self, name)
            if needing is not None:
                _log.error("%s is corrupt (%s) and is not moved: %s depends on it", name, reason, needing)
                return False
            keys = self._bucket.keys(folder)
            for key in keys:
                self._bucket.copy(key, f"{target}/{key.removeprefix(folder)}")
            self._bucket.put(f"{target}.reason.json", encode_json(note))
            self._remove(keys)
        except CheckpointError as error:
            _log.error("%s is corrupt (%s) and cannot be moved to quarantine: %s", name, reason, error)
            return False
        _log.error("%s is corrupt (%s): moved to %s", name, reason, target)
        return True

    def delete(self, name: CheckpointName) -> None:
        """Delete a checkpoint, its manifest first."""
        try:
            self.manifest(name)
            self._remove(self._bucket.keys(f"{self._prefix}{name}/"))
        except (UnknownFormatError, CorruptCheckpointError) as error:
            _log.warning("retention does not delete %s: %s", name, error)
        except CheckpointError as error:
            _log.warning("%s could not be deleted: %s", name, error)

    def sweep(self, below: CheckpointName) -> None:
        """Remove the unfinished files of the checkpoints before this one."""
        begun = {key.removeprefix(self._prefix).partition("/")[0] for key in self._bucket.unfinished(self._prefix)}
        committed = set(self.commits())
        for name in map(parse_commit, sorted({*begun, *self._bucket.folders(self._prefix)})):
            if name is None or name in committed or (name.attempt_id, name.step) >= (below.attempt_id, below.step):
                continue
            _mark_abandoned(self._bucket, f"{self._prefix}{name}/")
            _log.info("removed the unfinished upload of %s", name)

    def _key(self, name: CheckpointName, file: str) -> str:
        return f"{self._prefix}{name}/{file}"

    def _remove(self, keys: Sequence[str]) -> None:
        first = [key for key in keys if key.endswith(f"/{MANIFEST}")]
        self._bucket.delete(first)
        self._bucket.delete([key for key in keys if key not in first])

    def _concurrently(self, act: Callable[[Item], Found], inputs: Sequence[Item]) -> list[Found]:
        with ThreadPoolExecutor(self.readers) as pool:
            return list(pool.map(act, inputs))
