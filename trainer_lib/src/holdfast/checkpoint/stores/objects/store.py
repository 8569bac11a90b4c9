"""Checkpoints in an object store. The names are those of a folder tier. No torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar
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
from holdfast.checkpoint.format.manifest import LARGEST, Manifest, decode_as
from holdfast.checkpoint.io.durable_files import encode_json
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.stores.base import OpenSource, ShardWriter, needed_by
from holdfast.checkpoint.stores.objects.bucket import Bucket, has_object
from holdfast.checkpoint.stores.objects.incoming import (
    CONTENT,
    ObjectIncoming,
    create_manifest,
    mark_abandoned,
    upload_shard,
)
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, ClaimError, CorruptCheckpointError, UnknownFormatError

_log = logging.getLogger("holdfast.checkpoint.objects")

Item = TypeVar("Item")
Found = TypeVar("Found")


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
        there = self._concurrently(lambda name: has_object(self._bucket, self._key(name, MANIFEST)), names)
        return tuple(name for name, complete in zip(names, there, strict=True) if complete)

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
        key = self._claim_key(claim)
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
        try:
            needing = needed_by(self, name)
            if needing is not None:
                _log.error("%s is corrupt (%s) and is not moved: %s depends on it", name, reason, needing)
                return False
            target = self._move_to_quarantine(name, reason)
        except CheckpointError as error:
            _log.error("%s is corrupt (%s) and cannot be moved to quarantine: %s", name, reason, error)
            return False
        _log.error("%s is corrupt (%s): moved to %s", name, reason, target)
        return True

    def _move_to_quarantine(self, name: CheckpointName, reason: str) -> str:
        folder = f"{self._prefix}{name}/"
        target = f"{self._prefix}{QUARANTINE}/{name}.{uuid4().hex[:8]}"
        note = {"path": str(name), "reason": reason, "time": datetime.now(UTC).isoformat()}
        keys = self._bucket.keys(folder)
        for key in keys:
            self._bucket.copy(key, f"{target}/{key.removeprefix(folder)}")
        self._bucket.put(f"{target}.reason.json", encode_json(note))
        self._remove(keys)
        return target

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
            mark_abandoned(self._bucket, f"{self._prefix}{name}/")
            _log.info("removed the unfinished upload of %s", name)

    # The shared tier of a job

    def prepare(self) -> None:
        """Do nothing: a bucket needs no folders."""

    def exists(self, name: CheckpointName) -> bool:
        return has_object(self._bucket, self._key(name, MANIFEST))

    def highest_generation(self) -> int:
        return max((claim.attempt_id.generation for claim in self.claims()), default=0)

    def write_claim(self, claim: Claim, *, again: bool = False) -> None:
        self.keep_claim(claim)

    def remove_claims(self, claims: Iterable[Claim]) -> None:
        with contextlib.suppress(CheckpointError):
            self._bucket.delete([self._claim_key(claim) for claim in claims])

    def clean(self, own: AttemptId) -> None:
        self.sweep(CheckpointName(step=0, attempt_id=own))

    def set_aside(self, name: CheckpointName, reason: str) -> None:
        self._move_to_quarantine(name, reason)

    def uploading(self) -> CheckpointName | None:
        """Return None: copies of an object store are not made here."""
        return None

    def begin(self, name: CheckpointName) -> str:
        """Begin a save. Only the attempt of this name's claim saves under it, so what is there is its failed save."""
        if self.exists(name):
            return ""
        folder = self._key(name, "")
        if self._bucket.keys(folder):
            mark_abandoned(self._bucket, folder)
        if not self._bucket.create(folder + CONTENT, f"{name} {uuid4().hex}".encode()):
            raise CheckpointError(f"{self._bucket.url}/{folder} is written by another process: stop one of the two")
        return str(name)

    def writer(self, staging: str) -> ShardWriter:
        return partial(upload_shard, self._bucket, f"{self._prefix}{staging}/")

    def publish(self, staging: str, manifest: Manifest) -> None:
        create_manifest(self._bucket, f"{self._prefix}{staging}/", manifest, manifest.own)

    def discard(self, staging: str) -> None:
        try:
            mark_abandoned(self._bucket, f"{self._prefix}{staging}/")
        except CheckpointError as error:
            _log.warning("the files of the failed save %s stay until the next attempt: %s", staging, error)

    def _claim_key(self, claim: Claim) -> str:
        return f"{self._prefix}{CLAIMS}/{claim_file(claim.attempt_id)}"

    def _key(self, name: CheckpointName, file: str) -> str:
        return f"{self._prefix}{name}/{file}"

    def _remove(self, keys: Sequence[str]) -> None:
        first = [key for key in keys if key.endswith(f"/{MANIFEST}")]
        self._bucket.delete(first)
        self._bucket.delete([key for key in keys if key not in first])

    def _concurrently(self, act: Callable[[Item], Found], inputs: Sequence[Item]) -> list[Found]:
        with Pool(min(self.readers, len(inputs)), "holdfast-objects") as pool:
            return [task.result() for task in [pool.submit(act, one) for one in inputs]]
