"""Commits in a store of objects: no folders, no rename, no link. No torch.

The names are those of a folder tier. What stands in for its rename is the order of writes: every file of a commit is
complete, and its checksum compared by the store where it does that, before the manifest is created; and the manifest
is created once, by one writer. Files without a manifest are nobody's commit, whatever interrupted them. Before them
lies a word on what they will be, created once as well: who would write something else under the name changes nothing.
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
from holdfast.core.errors import CheckpointError, ClaimError, DamagedError, UnknownFormatError

_log = logging.getLogger("holdfast.checkpoint.objects")

# Beside each commit's files, for whoever has no holdfast: `sha256sum --check` reads it.
SHA256SUMS: Final = "SHA256SUMS"
# Before them: what this commit will be.
CONTENT: Final = "CONTENT"
GIVEN_UP: Final = "GIVEN-UP"
"""Stands in a commit's folder while its files are removed."""
IN_FLIGHT: Final = 8

Thing = TypeVar("Thing")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What is known of an object: its length, and a tag that changes with its content."""

    nbytes: int
    tag: str


class Bucket(Protocol):
    """What a store of objects can do. A missing object is a DamagedError, trouble an UnavailableError."""

    @property
    def url(self) -> str:
        """Where it is, without credentials."""

    @property
    def lacks(self) -> Sequence[str]:
        """What the store was found to lack so far and what is done instead, in words."""

    @property
    def part_bytes(self) -> int:
        """How much of a file is handled at once; a multiple of the digests' chunk."""

    @property
    def in_flight(self) -> int:
        """How many parts may be on their way at once."""

    def folders(self, prefix: str) -> list[str]:
        """Names directly below a prefix that have something below them."""

    def keys(self, prefix: str) -> list[str]:
        """Every key that begins so."""

    def stat(self, key: str) -> Stat:
        """An object's length and tag."""

    def read(self, key: str, most: int) -> bytes:
        """All of a small object; DamagedError if it is larger than `most`, and then nothing of it is read."""

    def read_into(self, key: str, stat: Stat, offset: int, target: memoryview) -> None:
        """A part of an object, which must still be the one that `stat` was taken of."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object that does not exist; False if it exists with other bytes."""

    def put(self, key: str, data: bytes) -> None: ...

    def upload(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Write an object in blocks of `part_bytes`; each is free for other use when the next is asked for."""

    def copy(self, source: str, target: str) -> None: ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete; what is missing is no error."""

    def unfinished(self, prefix: str) -> list[str]:
        """Keys below a prefix of which an upload was begun and not finished."""

    def abandon(self, prefix: str) -> None:
        """Give up unfinished uploads below a prefix."""


def check_small(key: str, nbytes: int, most: int) -> None:
    """DamagedError for what claims to be larger than anything that was written there."""
    if nbytes > most:
        raise DamagedError(f"{key.rpartition('/')[2]}: {nbytes} bytes are more than it can have")


def holds(bucket: Bucket, key: str, data: bytes) -> bool:
    """Whether an object has these bytes; False too if another writer replaces or removes it meanwhile."""
    try:
        return bucket.stat(key).nbytes == len(data) and bucket.read(key, len(data)) == data
    except DamagedError:
        return False


def create_by_looking(bucket: Bucket, key: str, data: bytes) -> bool:
    """Do what `Bucket.create` does on a store without exclusive creation: look, write, and read back what stayed.

    Of two writers in the same moment the last one stays, and the other finds the bytes of that one unless it read
    back before they came.
    """
    if not _exists(bucket, key):
        bucket.put(key, data)
    return holds(bucket, key, data)


def blocks_of(parts: Iterable[Buffer], size: int) -> Iterator[memoryview]:
    """The same bytes in blocks of `size`, the last one shorter; one buffer serves all."""
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
            raise DamagedError(f"{self._key.rpartition('/')[2]} ends before byte {offset + target.nbytes}")
        if target.nbytes:
            self._bucket.read_into(self._key, self._stat, offset, target)


class ObjectIncoming:
    """Files under the commit's own name, which is nobody's until its manifest is there."""

    def __init__(self, bucket: Bucket, prefix: str, name: CheckpointName, content: str) -> None:
        self._bucket = bucket
        self._folder = f"{prefix}{name}/"
        self._name = name
        self._sums: dict[str, str] = {}
        if not bucket.create(self._folder + CONTENT, content.encode()):
            raise CheckpointError(
                f"{bucket.url}/{self._folder} is another {name}, which somebody else writes or never finished; "
                "nothing was changed: give each job a prefix of its own, or delete that folder if nobody writes it"
            )

    def write(self, file: str, parts: Iterable[Buffer]) -> FileRecord:
        sha256 = hashlib.sha256()
        digests = ChunkDigester(sha256.update)

        def passing(pool: Pool) -> Iterator[memoryview]:
            for block in blocks_of(parts, self._bucket.part_bytes):
                digesting = pool.submit(digests.update, block)
                yield block
                digesting.result()

        with Pool(1, "holdfast-digest") as pool:  # its end waits for the last block
            self._bucket.upload(self._folder + file, passing(pool))
        self._sums[file] = sha256.hexdigest()
        return digests.record()

    def publish(self, manifest: Manifest) -> None:
        """Create the manifest. If the same manifest exists already, an earlier answer was lost or another writer won.

        Another writer of the same checkpoint may remove files meanwhile (`_give_up`). Then this raises
        CheckpointError and removes the manifest that it created, but never one that existed before.
        """
        self._insist_on_files()
        sums = "".join(f"{digest}  {file}\n" for file, digest in sorted(self._sums.items()))
        self._bucket.put(self._folder + SHA256SUMS, sums.encode())
        key = self._folder + MANIFEST
        ours = [] if _exists(self._bucket, key) else [key]
        if not self._bucket.create(key, encode(manifest)):
            raise CheckpointError(
                f"{self._bucket.url}: {self._name} is there already, with another manifest; nothing was changed"
            )
        self._insist_on_files(otherwise=ours)

    def _insist_on_files(self, otherwise: Sequence[str] = ()) -> None:
        """CheckpointError if another writer removes files; `otherwise` are the keys that go then."""
        here = {key.removeprefix(self._folder) for key in self._bucket.keys(self._folder)}
        if GIVEN_UP in here or not here.issuperset(self._sums):
            self._bucket.delete(otherwise)
            raise CheckpointError(f"{self._bucket.url}/{self._folder} was given up by another writer: try again")

    def discard(self) -> None:
        """Remove what was written, unless it is a commit."""
        try:
            _give_up(self._bucket, self._folder)
        except CheckpointError as error:
            _log.warning("what was uploaded of %s stays where it is: %s", self._name, error)


def _give_up(bucket: Bucket, folder: str) -> None:
    """Remove what was never finished. A writer that publishes the same commit finds the mark, or a file missing."""
    mark = folder + GIVEN_UP
    bucket.put(mark, b"")
    if not _exists(bucket, folder + MANIFEST):
        bucket.abandon(folder)
        bucket.delete([key for key in bucket.keys(folder) if key != mark])
    bucket.delete([mark])


def _exists(bucket: Bucket, key: str) -> bool:
    try:
        bucket.stat(key)
    except DamagedError:
        return False
    return True


class ObjectStore:
    """Commits below a prefix of a bucket."""

    shared = True

    def __init__(self, bucket: Bucket, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"{bucket.url}/{self._prefix}".rstrip("/")
        self.readers = bucket.in_flight

    def rehearse(self, name: str) -> Sequence[str]:
        """List, write, read back and delete, as an upload and a restore would: nothing of it stays.

        Return what the store was found to lack, in words. CheckpointError if it creates an object that exists.
        """
        self._bucket.folders(self._prefix)
        key, data = f"{self._prefix}.preflight-{name}", name.encode()
        self._bucket.put(key, data)
        try:
            if self._bucket.read(key, len(data)) != data:
                raise DamagedError(f"{self._bucket.url}/{key} holds other bytes than were written")
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
        there = self._together(lambda name: _exists(self._bucket, self._key(name, MANIFEST)), names)
        return tuple(name for name, exists in zip(names, there, strict=True) if exists)

    def claims(self) -> tuple[Claim, ...]:
        folder = f"{self._prefix}{CLAIMS}/"
        found = [(key, parse_claim(key.removeprefix(folder))) for key in self._bucket.keys(folder)]
        pairs = sorted((parsed[0], key) for key, parsed in found if parsed is not None and not parsed[1])
        raw = self._together(lambda entry: self._bucket.read(entry[1], claims.LARGEST), pairs)
        return tuple(
            parse_document(data, pair, f"{self._bucket.url}/{key}")
            for (pair, key), data in zip(pairs, raw, strict=True)
        )

    def keep_claim(self, claim: Claim) -> None:
        """Write a claim, exclusively; the same claim again is none too many."""
        key = f"{self._prefix}{CLAIMS}/{claim_file(claim.pair)}"
        if not self._bucket.create(key, encode_json(claim.to_json())):
            raise ClaimError(
                f"{self._bucket.url}/{key} exists: another job has claimed attempt {claim.pair} here; "
                "give each job a prefix of its own"
            )

    def manifest(self, name: CheckpointName) -> Manifest:
        return decode_as(self._bucket.read(self._key(name, MANIFEST), LARGEST), name)

    def open(self, name: CheckpointName, file: str) -> ObjectSource:
        return ObjectSource(self._bucket, self._key(name, file))

    def receive(self, name: CheckpointName, content: str) -> ObjectIncoming:
        """Begin a commit, or go on with one of the same content that was interrupted."""
        return ObjectIncoming(self._bucket, self._prefix, name, content)

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Copy a bad commit below `quarantine/`, then take it away, its manifest first; not one that others need."""
        folder = f"{self._prefix}{name}/"
        target = f"{self._prefix}{QUARANTINE}/{name}.{uuid4().hex[:8]}"
        note = {"path": str(name), "reason": reason, "time": datetime.now(UTC).isoformat()}
        try:
            needing = needed_by(self, name)
            if needing is not None:
                _log.error("%s is damaged (%s), and left where it is: %s stands on it", name, reason, needing)
                return False
            keys = self._bucket.keys(folder)
            for key in keys:
                self._bucket.copy(key, f"{target}/{key.removeprefix(folder)}")
            self._bucket.put(f"{target}.reason.json", encode_json(note))
            self._remove(keys)
        except CheckpointError as error:
            _log.error("%s is damaged (%s) and cannot be moved to quarantine: %s", name, reason, error)
            return False
        _log.error("%s is damaged (%s): moved to %s", name, reason, target)
        return True

    def delete(self, name: CheckpointName) -> None:
        """Delete a commit, its manifest first."""
        try:
            self.manifest(name)
            self._remove(self._bucket.keys(f"{self._prefix}{name}/"))
        except (UnknownFormatError, DamagedError) as error:
            _log.warning("retention leaves %s alone: %s", name, error)
        except CheckpointError as error:
            _log.warning("%s could not be deleted: %s", name, error)

    def sweep(self, below: CheckpointName) -> None:
        """Remove what was never finished of the commits before this one."""
        begun = {key.removeprefix(self._prefix).partition("/")[0] for key in self._bucket.unfinished(self._prefix)}
        committed = set(self.commits())
        for name in map(parse_commit, sorted({*begun, *self._bucket.folders(self._prefix)})):
            if name is None or name in committed or (name.pair, name.step) >= (below.pair, below.step):
                continue
            _give_up(self._bucket, f"{self._prefix}{name}/")
            _log.info("removed what was never finished of %s", name)

    def _key(self, name: CheckpointName, file: str) -> str:
        return f"{self._prefix}{name}/{file}"

    def _remove(self, keys: Sequence[str]) -> None:
        first = [key for key in keys if key.endswith(f"/{MANIFEST}")]
        self._bucket.delete(first)
        self._bucket.delete([key for key in keys if key not in first])

    def _together(self, act: Callable[[Thing], Found], things: Sequence[Thing]) -> list[Found]:
        with ThreadPoolExecutor(self.readers) as pool:
            return list(pool.map(act, things))
