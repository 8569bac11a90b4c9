"""A bucket of an S3 server, accessed with boto3. No torch.

If a server rejects a feature, or ignores one that the protocol relies on, the bucket continues without it (`Lack`).
Retries are implemented here and not by botocore: they cover interrupted bodies, and are limited in one place.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Final
from uuid import uuid4

from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.stores.objects.bucket import Stat, check_small, create_by_looking, holds
from holdfast.checkpoint.stores.objects.errors import (
    Kind,
    Lack,
    NoUploadError,
    RefusedError,
    RequestFailure,
    TakenError,
    classify,
    pause,
)
from holdfast.checkpoint.stores.objects.s3_checksum import Checksum
from holdfast.checkpoint.stores.objects.s3_client import S3Settings, client_of, trusted_certificates
from holdfast.checkpoint.stores.objects.s3_range_reader import LEAST_BYTES, SIGNED_SECONDS, Ranges, Timeouts
from holdfast.checkpoint.stores.objects.s3_upload import MultipartUpload, finish_all, in_parts
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnavailableError

_log = logging.getLogger("holdfast.checkpoint.s3")

_DELETED_AT_ONCE: Final = 1000
_READ_AT_ONCE: Final = 1 << 20
_COPIED_AT_ONCE: Final = 5 << 30


def s3_store(settings: S3Settings) -> ObjectStore:
    return ObjectStore(S3Bucket(settings), settings.prefix)


class S3Bucket:
    """A bucket, which any thread may use."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self.url = f"s3://{settings.bucket}"
        self.part_bytes, self.in_flight = settings.part_bytes, settings.in_flight
        self._lock = Lock()
        self._tried_conditions = False
        self._lacks: dict[Lack, None] = {}
        self._client = client_of(settings)
        timeouts = Timeouts(connect=settings.connect_seconds, read=settings.read_seconds)
        self._ranges = Ranges(sign=self._sign, timeouts=timeouts, authorities=trusted_certificates())
        self._pool = Pool(settings.in_flight, "holdfast-s3").start()

    @property
    def lacks(self) -> tuple[str, ...]:
        return tuple(self._lacks)

    def folders(self, prefix: str) -> list[str]:
        pages = self._pages("list_objects_v2", "ContinuationToken", "NextContinuationToken", prefix, Delimiter="/")
        found = (entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ()))
        return [name.removeprefix(prefix).rstrip("/") for name in found]

    def keys(self, prefix: str) -> list[str]:
        pages = self._pages("list_objects_v2", "ContinuationToken", "NextContinuationToken", prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def stat(self, key: str) -> Stat:
        found = self._head(key)
        return Stat(nbytes=int(found["ContentLength"]), tag=str(found["ETag"]))

    def read(self, key: str, most: int) -> bytes:
        stat = self.stat(key)
        check_small(key, stat.nbytes, most)
        data = bytearray(stat.nbytes)
        if data:
            self.read_into(key, stat, 0, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, stat: Stat, offset: int, target: memoryview) -> None:
        """Read ranges in parallel."""
        size = self.part_bytes
        pieces = [(offset + at, target[at : at + size]) for at in range(0, target.nbytes, size)]
        if len(pieces) == 1:
            self._read_range(key, stat.tag, *pieces[0])
        else:
            finish_all([self._pool.submit(self._read_range, key, stat.tag, begin, piece) for begin, piece in pieces])

    def create(self, key: str, data: bytes) -> bool:
        """Write with `If-None-Match: *` if the server honours it.

        An existing object may be ours if the reply was lost.
        """
        if not self._honours_conditions(key):
            return create_by_looking(self, key, data)
        try:
            self._put(key, data, IfNoneMatch="*")
        except TakenError:
            return holds(self, key, data)
        return True

    def _honours_conditions(self, key: str) -> bool:
        """Test it once, on a separate object next to `key`, where the permissions are the same."""
        if not self._tried_conditions:
            trial = f"{key}.trial-{uuid4().hex[:8]}"
            self._put(trial, b"1")
            try:
                self._put(trial, b"2", IfNoneMatch="*")
                self._do_without(Lack.CONDITIONS, "it was ignored")
            except TakenError:
                pass
            except RefusedError as error:
                self._do_without(Lack.CONDITIONS, error)
            finally:
                with contextlib.suppress(CheckpointError):  # an uploader may have no permission to delete
                    self.delete([trial])
            self._tried_conditions = True
        return Lack.CONDITIONS not in self._lacks

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def upload(self, key: str, blocks: Iterable[memoryview]) -> None:
        """Upload a small file in one request, and a large one in parallel parts."""
        parts = iter(in_parts(blocks))
        first = bytes(next(parts, b""))
        second = next(parts, None) if len(first) == self.part_bytes else None
        if second is None:
            self._put(key, first)
        else:
            MultipartUpload(self, self._settings, self._pool, key).run(
                itertools.chain([memoryview(first), second], parts),
            )

    def copy(self, source: str, target: str) -> None:
        """Copy on the server, large objects in parts."""
        nbytes = self.stat(source).nbytes
        place = {"Bucket": self._settings.bucket, "Key": source}
        if nbytes <= _COPIED_AT_ONCE:
            self.call("copy_object", source, Key=target, CopySource=place)
            return
        upload = self.call("create_multipart_upload", target, Key=target)["UploadId"]
        done = []
        for number, begin in enumerate(range(0, nbytes, _COPIED_AT_ONCE), start=1):
            span = f"bytes={begin}-{min(nbytes, begin + _COPIED_AT_ONCE) - 1}"
            which = {"Key": target, "UploadId": upload, "PartNumber": number}
            made = self.call("upload_part_copy", source, CopySource=place, CopySourceRange=span, **which)
            done.append({"PartNumber": number, "ETag": made["CopyPartResult"]["ETag"]})
        self.call("complete_multipart_upload", target, Key=target, UploadId=upload, MultipartUpload={"Parts": done})

    def delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[begin : begin + _DELETED_AT_ONCE]
            if Lack.DELETIONS in self._lacks:
                self._delete_each(some)
                continue
            try:
                self._delete_at_once(some)
            except RefusedError as error:  # for example without Content-MD5, which boto3 no longer sends
                self._delete_each(some)
                self._do_without(Lack.DELETIONS, error)

    def _delete_at_once(self, keys: Sequence[str]) -> None:
        named = [{"Key": key} for key in keys]
        answer = self.call("delete_objects", keys[0], Delete={"Objects": named, "Quiet": True})
        for failed in answer.get("Errors", ()):
            failure = classify(_Answered(failed.get("Code", "")))
            raise UnavailableError(
                f"cannot delete {self.url}/{failed.get('Key')}: {failure.advice}", cause=failure.kind
            )

    def _delete_each(self, keys: Sequence[str]) -> None:
        def delete(key: str) -> None:
            with contextlib.suppress(CorruptCheckpointError):  # it is missing already
                self.call("delete_object", key, Key=key)

        finish_all([self._pool.submit(delete, key) for key in keys])

    def unfinished(self, prefix: str) -> list[str]:
        return [entry["Key"] for entry in self.uploads(prefix)]

    def abandon(self, prefix: str) -> None:
        """Abort multipart uploads, because unfinished parts cost storage."""
        for entry in self.uploads(prefix):
            self.abort(entry["Key"], entry["UploadId"])

    def abort(self, key: str, upload: str) -> None:
        try:
            self.call("abort_multipart_upload", key, Key=key, UploadId=upload)
        except NoUploadError:
            return

    def uploads(self, prefix: str) -> list[dict[str, Any]]:
        """Return the unfinished multipart uploads below a prefix."""
        found: list[dict[str, Any]] = []
        marker: dict[str, str] = {}
        while Lack.UPLOADS not in self._lacks:
            try:
                page = self.call("list_multipart_uploads", prefix, Prefix=prefix, **marker)
            except RefusedError as error:
                self._do_without(Lack.UPLOADS, error)
                break
            found += page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return found
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}
        return found

    def checksum_of(self, key: str) -> tuple[int, str | None] | None:
        """Return the length and checksum of an object on the server; None if it does not exist."""
        try:
            found = self._head(key, ChecksumMode="ENABLED")
        except CorruptCheckpointError:
            return None
        return int(found["ContentLength"]), found.get(self.checksum().field)

    def checksum(self) -> Checksum:
        """Return a new checksum of the best kind that the server supports."""
        return Checksum(crc=Lack.CRC64NVME not in self._lacks)

    def checked(self, act: Callable[[Checksum], Any]) -> Any:
        """Run an action that needs a checksum. If the server rejects CRC64NVME, run it again with SHA-256."""
        checksum = self.checksum()
        try:
            return act(checksum)
        except RefusedError as error:
            if not checksum.kind:
                raise
            done = act(Checksum(crc=False))
            self._do_without(Lack.CRC64NVME, error)
            return done

    def _do_without(self, lack: Lack, why: object) -> None:
        with self._lock:
            if lack not in self._lacks:
                self._lacks[lack] = None
                _log.warning("%s: %s (%s)", self.url, lack, why)

    def call(self, operation: str, key: str, **arguments: Any) -> Any:
        """Send one request, retry it where this may help, and translate its error."""
        lists = operation.startswith("list_objects")
        return self._attempts(key, lambda client: self._send(client, operation, arguments), lists=lists)

    def _send(self, client: Any, operation: str, arguments: Mapping[str, Any]) -> Any:
        return getattr(client, operation)(Bucket=self._settings.bucket, **arguments)

    def _attempts(self, key: str, act: Callable[[Any], Any], *, lists: bool = False) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        renewed = False
        for attempt in itertools.count():
            client = self._client
            try:
                return act(client)
            except (BotoCoreError, ClientError, OSError) as error:
                failure = classify(error)
                if lists and failure.kind is Kind.MISSING:
                    # A list cannot be missing. Some servers fail this way if objects are deleted during the request.
                    failure = replace(failure, kind=Kind.SERVER)
                if failure.kind is Kind.CREDENTIALS and not renewed:
                    renewed = True
                    self._renew(client)
                elif not failure.passes or attempt + 1 >= self._settings.attempts:
                    raise self._error(key, failure, attempt + 1) from error
                else:
                    self._wait(attempt)
        raise AssertionError

    def _renew(self, used: Any) -> None:
        """Create a client with renewed credentials, once for all threads that use the expired one."""
        with self._lock:
            if self._client is used:
                self._client = client_of(self._settings)

    def _wait(self, attempt: int) -> None:
        settings = self._settings
        draw = random.random()  # noqa: S311 — spreads clients, not for secrets
        time.sleep(pause(attempt, base=settings.pause_seconds, cap=settings.longest_pause_seconds, draw=draw))

    def _error(self, key: str, failure: RequestFailure, attempts: int) -> CheckpointError:
        name = key.rpartition("/")[2] or key
        if failure.kind is Kind.MISSING:
            return CorruptCheckpointError(f"{name} is missing")
        if failure.kind is Kind.TAKEN:
            return TakenError(f"{name} was replaced by another object")
        if failure.kind is Kind.NO_UPLOAD:
            return NoUploadError(f"{name}: its upload does not exist")
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        error = RefusedError if failure.kind is Kind.REFUSED else UnavailableError
        return error(
            f"{self.url}/{key}{tried}: {failure.advice}; the state of the store is unknown", cause=failure.kind
        )

    def _head(self, key: str, **arguments: Any) -> Any:
        try:
            return self.call("head_object", key, Key=key, **arguments)
        except CorruptCheckpointError:
            self._require_bucket()
            raise

    def _require_bucket(self) -> None:
        """Raise an error if the bucket is missing: a HEAD reply does not distinguish this from a missing key."""
        try:
            self.call("head_bucket", "")
        except CorruptCheckpointError as error:
            failure = RequestFailure(kind=Kind.NO_BUCKET, text="404 NoSuchBucket")
            raise UnavailableError(f"{self.url}: {failure.advice}", cause=failure.kind) from error

    def _put(self, key: str, data: bytes, **arguments: Any) -> None:
        def put(checksum: Checksum) -> None:
            self.call("put_object", key, Key=key, Body=data, **{checksum.field: checksum.of(data)}, **arguments)

        self.checked(put)

    def _pages(self, operation: str, given: str, next_field: str, prefix: str, **arguments: Any) -> Iterator[Any]:
        marker: dict[str, str] = {}
        while True:
            page = self.call(operation, prefix, Prefix=prefix, **arguments, **marker)
            yield page
            if not page.get("IsTruncated"):
                return
            marker = {given: page[next_field]}

    def _sign(self, key: str) -> str:
        from botocore.exceptions import BotoCoreError

        named = {"Bucket": self._settings.bucket, "Key": key}
        try:
            return str(self._client.generate_presigned_url("get_object", Params=named, ExpiresIn=SIGNED_SECONDS))
        except BotoCoreError as error:
            _log.debug("no signed address can be created for %s: %s", key, error)
            return ""

    def _read_range(self, key: str, tag: str, offset: int, target: memoryview) -> None:
        """Fill `target`. After an interruption, continue where it stopped."""
        filled = self._ranges.read(key, tag, offset, target) if target.nbytes >= LEAST_BYTES else 0
        if filled == target.nbytes:
            return

        def read(client: Any) -> None:
            nonlocal filled
            span = f"bytes={offset + filled}-{offset + target.nbytes - 1}"
            answer = self._send(client, "get_object", {"Key": key, "Range": span, "IfMatch": tag})
            with contextlib.closing(answer["Body"]) as body:
                if answer.get("ContentLength") not in (None, target.nbytes - filled):
                    raise ConnectionError("the answer contains another range")
                while filled < target.nbytes:
                    count = body.readinto(target[filled : filled + _READ_AT_ONCE])
                    if not count:
                        raise ConnectionError("the answer ended early")
                    filled += count

        try:
            self._attempts(key, read)
        except TakenError as error:
            raise CorruptCheckpointError(f"{key.rpartition('/')[2]} was replaced while it was read") from error


class _Answered(Exception):  # noqa: N818 — has the form of an error in a reply, and is never raised
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}
