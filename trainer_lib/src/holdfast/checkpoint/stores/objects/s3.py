"""A bucket of an S3 server by boto3. No torch.

Each part travels with its checksum, which the server compares; a file whose upload was interrupted goes on from the
parts that are there. With awscrt the checksum is CRC64NVME, of the whole object too; without it SHA-256 of each part.
Not every server knows all that AWS does: what one refuses, or ignores though the protocol relies on it, is done
without from then on (`Lack`).
Retries are ours, not botocore's: they cover bodies that break off, and are bounded in one place.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

from holdfast.checkpoint.format.manifest import CHUNK_BYTES
from holdfast.checkpoint.stores.objects.errors import Kind, Lack, Trouble, pause, trouble_of
from holdfast.checkpoint.stores.objects.s3_range_reader import LEAST_BYTES, SIGNED_SECONDS, Ranges, Timeouts
from holdfast.checkpoint.stores.objects.store import (
    IN_FLIGHT,
    ObjectStore,
    Stat,
    check_small,
    create_by_looking,
    holds,
)
from holdfast.core.environment import aws_region
from holdfast.core.errors import CheckpointError, DamagedError, UnavailableError, UsageError

_log = logging.getLogger("holdfast.checkpoint.s3")

_DELETED_AT_ONCE: Final = 1000
_READ_AT_ONCE: Final = 1 << 20
_COPIED_AT_ONCE: Final = 5 << 30
# Of what is digested and copied, so that only the first of both waits for the memory.
_IN_CACHE: Final = 256 << 10
# S3 allows 10,000 parts: every 2,000 they double, which reaches 1 TB from 16 MiB.
_PARTS_OF_A_SIZE: Final = 2000


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """How to talk to a bucket. Credentials, region and endpoint are found as boto3 finds them unless given here."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    part_bytes: int = 2 * CHUNK_BYTES
    in_flight: int = IN_FLIGHT
    attempts: int = 8
    pause_seconds: float = 0.25
    longest_pause_seconds: float = 20.0
    connect_seconds: float = 10.0
    read_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.bucket:
            raise UsageError("an S3 URL is s3://BUCKET/PREFIX; this one names no bucket")
        if self.part_bytes % CHUNK_BYTES or self.part_bytes < CHUNK_BYTES:
            raise UsageError(f"part_bytes must be a multiple of {CHUNK_BYTES}")

    @classmethod
    def of_url(cls, url: str) -> S3Settings:
        """Read `s3://bucket/prefix`. An empty segment of the path (`//`) is dropped, with a warning."""
        parts = urlsplit(url)
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise UsageError(
                "an S3 URL is s3://BUCKET/PREFIX; endpoint, region and credentials come from the environment "
                "(AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID, …) or from boto3's files"
            )
        segments = list(filter(None, parts.path.split("/")))
        if not {".", ".."}.isdisjoint(segments):
            raise UsageError(f"{url}: '.' and '..' are names in S3, and some servers follow them: leave them out")
        prefix = "/".join(segments)
        if prefix != parts.path.strip("/"):
            _log.warning(
                "%s has an empty path segment, which some servers drop: s3://%s/%s is used. Move what was written "
                "with the empty segment there",
                *(url, parts.netloc, prefix),
            )
        return cls(bucket=parts.netloc, prefix=prefix)


def s3_store(settings: S3Settings) -> ObjectStore:
    """A store below a prefix of a bucket."""
    return ObjectStore(S3Bucket(settings), settings.prefix)


class Checksum:
    """The checksum that the server compares: of each part, and of the whole object as the server then keeps it."""

    def __init__(self, *, crc: bool = True) -> None:
        """`crc`: use CRC64NVME where awscrt is installed."""
        self._crc, self._combine = (_crc64nvme(), _combine_crc64nvme()) if crc else (None, None)
        self._whole = 0
        self._parts: list[bytes] = []

    @property
    def name(self) -> str:
        """Its name in S3."""
        return "SHA256" if self._crc is None else "CRC64NVME"

    @property
    def field(self) -> str:
        """The parameter that carries it."""
        return f"Checksum{self.name}"

    @property
    def kind(self) -> Mapping[str, str]:
        """The parameter that asks for one of the whole object. SHA-256 has none: servers keep that of its parts'."""
        return {} if self._crc is None else {"ChecksumType": "FULL_OBJECT"}

    def of(self, block: memoryview | bytes) -> str:
        """A block's own."""
        return base64.b64encode(self._raw(block)).decode()

    def add(self, block: memoryview, copy: bytearray | None = None) -> str:
        """A block's own; it counts as the next part of the object. `copy` gets its bytes on the way."""
        raw = self._raw(block, copy)
        self._parts.append(raw)
        if self._crc is not None and self._combine is not None:
            self._whole = self._combine(self._whole, int.from_bytes(raw, "big"), block.nbytes)
        elif self._crc is not None:
            self._whole = self._crc(block, self._whole)
        return base64.b64encode(raw).decode()

    def whole(self) -> str:
        """That of the object of all parts."""
        if self._crc is not None:
            return base64.b64encode(self._whole.to_bytes(8, "big")).decode()
        joined = base64.b64encode(hashlib.sha256(b"".join(self._parts)).digest()).decode()
        return f"{joined}-{len(self._parts)}"

    def _raw(self, block: memoryview | bytes, copy: bytearray | None = None) -> bytes:
        sha256, crc = hashlib.sha256(), 0
        source = memoryview(block)
        for begin in range(0, source.nbytes, _IN_CACHE):
            piece = source[begin : begin + _IN_CACHE]
            if self._crc is None:
                sha256.update(piece)
            else:
                crc = self._crc(piece, crc)
            if copy is not None:
                copy[begin : begin + piece.nbytes] = piece
        return sha256.digest() if self._crc is None else crc.to_bytes(8, "big")


def _crc64nvme() -> Callable[[Any, int], int] | None:
    try:
        from awscrt import checksums
    except ImportError:
        return None
    crc: Callable[[Any, int], int] = checksums.crc64nvme
    return crc


def _combine_crc64nvme() -> Callable[[int, int, int], int] | None:
    """That of two blocks from that of each; earlier releases lack it."""
    try:
        from awscrt import checksums
    except ImportError:
        return None
    return getattr(checksums, "combine_crc64nvme", None)


class S3Bucket:
    """A bucket; any thread may use it."""

    def __init__(self, settings: S3Settings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._lock = Lock()
        self._tried_conditions = False
        self._lacks: dict[Lack, None] = {}
        self._client = _client(settings)
        timeouts = Timeouts(connect=settings.connect_seconds, read=settings.read_seconds)
        self._ranges = Ranges(sign=self._sign, timeouts=timeouts, authorities=_authorities())
        self._pool = ThreadPoolExecutor(settings.in_flight, thread_name_prefix="holdfast-s3")

    @property
    def url(self) -> str:
        """The bucket."""
        return f"s3://{self._settings.bucket}"

    @property
    def lacks(self) -> tuple[str, ...]:
        """What the server refused or ignored so far."""
        return tuple(self._lacks)

    @property
    def part_bytes(self) -> int:
        """The size of a part."""
        return self._settings.part_bytes

    @property
    def in_flight(self) -> int:
        """How many parts of a file at once."""
        return self._settings.in_flight

    def folders(self, prefix: str) -> list[str]:
        """Names below a prefix."""
        pages = self._pages("list_objects_v2", "ContinuationToken", "NextContinuationToken", prefix, Delimiter="/")
        found = (entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ()))
        return [name.removeprefix(prefix).rstrip("/") for name in found]

    def keys(self, prefix: str) -> list[str]:
        """Every key below a prefix."""
        pages = self._pages("list_objects_v2", "ContinuationToken", "NextContinuationToken", prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def stat(self, key: str) -> Stat:
        """Length and ETag."""
        found = self._head(key)
        return Stat(nbytes=int(found["ContentLength"]), tag=str(found["ETag"]))

    def read(self, key: str, most: int) -> bytes:
        """All of a small object."""
        stat = self.stat(key)
        check_small(key, stat.nbytes, most)
        data = bytearray(stat.nbytes)
        if data:
            self.read_into(key, stat, 0, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, stat: Stat, offset: int, target: memoryview) -> None:
        """Ranges in parallel."""
        size = self.part_bytes
        pieces = [(offset + at, target[at : at + size]) for at in range(0, target.nbytes, size)]
        if len(pieces) == 1:
            self._read_range(key, stat.tag, *pieces[0])
        else:
            _finish([self._pool.submit(self._read_range, key, stat.tag, begin, piece) for begin, piece in pieces])

    def create(self, key: str, data: bytes) -> bool:
        """Write with `If-None-Match: *` if the server honours it; what is there may be our own, its answer lost."""
        if not self._honours_conditions(key):
            return create_by_looking(self, key, data)
        try:
            self._put(key, data, IfNoneMatch="*")
        except _TakenError:
            return holds(self, key, data)
        return True

    def _honours_conditions(self, key: str) -> bool:
        """Try it once, on an object of our own next to `key`, where the rights are the same."""
        if not self._tried_conditions:
            trial = f"{key}.trial-{uuid4().hex[:8]}"
            self._put(trial, b"1")
            try:
                self._put(trial, b"2", IfNoneMatch="*")
                self._do_without(Lack.CONDITIONS, "it was ignored")
            except _TakenError:
                pass
            except _RefusedError as error:
                self._do_without(Lack.CONDITIONS, error)
            finally:
                with contextlib.suppress(CheckpointError):  # an uploader may have no right to delete
                    self.delete([trial])
            self._tried_conditions = True
        return Lack.CONDITIONS not in self._lacks

    def put(self, key: str, data: bytes) -> None:
        """Write a small object."""
        self._put(key, data)

    def upload(self, key: str, blocks: Iterable[memoryview]) -> None:
        """One request for a small file, parts in parallel for a large one."""
        parts = iter(_in_parts(blocks))
        first = bytes(next(parts, b""))
        second = next(parts, None) if len(first) == self.part_bytes else None
        if second is None:
            self._put(key, first)
        else:
            _Upload(self, self._settings, self._pool, key).run(
                itertools.chain([memoryview(first), second], parts),
            )

    def copy(self, source: str, target: str) -> None:
        """On the server; large objects in parts."""
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
        """Up to 1,000 at once."""
        for begin in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[begin : begin + _DELETED_AT_ONCE]
            if Lack.DELETIONS in self._lacks:
                self._delete_each(some)
                continue
            try:
                self._delete_at_once(some)
            except _RefusedError as error:  # for example without Content-MD5, which boto3 no longer sends
                self._delete_each(some)
                self._do_without(Lack.DELETIONS, error)

    def _delete_at_once(self, keys: Sequence[str]) -> None:
        named = [{"Key": key} for key in keys]
        answer = self.call("delete_objects", keys[0], Delete={"Objects": named, "Quiet": True})
        for failed in answer.get("Errors", ()):
            trouble = trouble_of(_Answered(failed.get("Code", "")))
            raise UnavailableError(
                f"cannot delete {self.url}/{failed.get('Key')}: {trouble.advice}", cause=trouble.kind
            )

    def _delete_each(self, keys: Sequence[str]) -> None:
        def delete(key: str) -> None:
            with contextlib.suppress(DamagedError):  # it is missing already
                self.call("delete_object", key, Key=key)

        _finish([self._pool.submit(delete, key) for key in keys])

    def unfinished(self, prefix: str) -> list[str]:
        """Keys of multipart uploads that wait."""
        return [entry["Key"] for entry in self.uploads(prefix)]

    def abandon(self, prefix: str) -> None:
        """Abort multipart uploads, whose parts are paid for as long as they wait."""
        for entry in self.uploads(prefix):
            self.abort(entry["Key"], entry["UploadId"])

    def abort(self, key: str, upload: str) -> None:
        """Abort one."""
        try:
            self.call("abort_multipart_upload", key, Key=key, UploadId=upload)
        except _NoUploadError:
            return

    def uploads(self, prefix: str) -> list[dict[str, Any]]:
        """Multipart uploads that wait below a prefix."""
        found: list[dict[str, Any]] = []
        marker: dict[str, str] = {}
        while Lack.UPLOADS not in self._lacks:
            try:
                page = self.call("list_multipart_uploads", prefix, Prefix=prefix, **marker)
            except _RefusedError as error:
                self._do_without(Lack.UPLOADS, error)
                break
            found += page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return found
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}
        return found

    def checksum_of(self, key: str) -> tuple[int, str | None] | None:
        """Length and checksum that the server has of an object, or None if there is none."""
        try:
            found = self._head(key, ChecksumMode="ENABLED")
        except DamagedError:
            return None
        return int(found["ContentLength"]), found.get(self.checksum().field)

    def checksum(self) -> Checksum:
        """A new checksum of the best kind that the server takes."""
        return Checksum(crc=Lack.CRC64NVME not in self._lacks)

    def checked(self, act: Callable[[Checksum], Any]) -> Any:
        """Do what needs a checksum; if the server refuses CRC64NVME, again with SHA-256."""
        checksum = self.checksum()
        try:
            return act(checksum)
        except _RefusedError as error:
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
        """One request, repeated while that may help; its error in words."""
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
                trouble = trouble_of(error)
                if lists and trouble.kind is Kind.MISSING:
                    # There is no such answer to a list. Some servers trip over what is deleted meanwhile.
                    trouble = replace(trouble, kind=Kind.SERVER)
                if trouble.kind is Kind.CREDENTIALS and not renewed:
                    renewed = True
                    self._renew(client)
                elif not trouble.passes or attempt + 1 >= self._settings.attempts:
                    raise self._said(key, trouble, attempt + 1) from error
                else:
                    self._wait(attempt)
        raise AssertionError

    def _renew(self, used: Any) -> None:
        """A mounted secret may have been renewed: read it again, once for all threads that find it expired."""
        with self._lock:
            if self._client is used:
                self._client = _client(self._settings)

    def _wait(self, attempt: int) -> None:
        settings = self._settings
        draw = random.random()  # noqa: S311 — spreads clients, keeps no secret
        self._sleep(pause(attempt, base=settings.pause_seconds, cap=settings.longest_pause_seconds, draw=draw))

    def _said(self, key: str, trouble: Trouble, attempts: int) -> CheckpointError:
        name = key.rpartition("/")[2] or key
        if trouble.kind is Kind.MISSING:
            return DamagedError(f"{name} is missing")
        if trouble.kind is Kind.TAKEN:
            return _TakenError(f"{name} is another object than before")
        if trouble.kind is Kind.NO_UPLOAD:
            return _NoUploadError(f"{name}: its upload is not there")
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        error = _RefusedError if trouble.kind is Kind.REFUSED else UnavailableError
        return error(f"{self.url}/{key}{tried}: {trouble.advice}; nothing was concluded", cause=trouble.kind)

    def _head(self, key: str, **arguments: Any) -> Any:
        try:
            return self.call("head_object", key, Key=key, **arguments)
        except DamagedError:
            self._require_bucket()
            raise

    def _require_bucket(self) -> None:
        """A HEAD has no body to say whether the key or the whole bucket is missing."""
        try:
            self.call("head_bucket", "")
        except DamagedError as error:
            trouble = Trouble(kind=Kind.NO_BUCKET, said="404 NoSuchBucket")
            raise UnavailableError(f"{self.url}: {trouble.advice}", cause=trouble.kind) from error

    def _put(self, key: str, data: bytes, **arguments: Any) -> None:
        def put(checksum: Checksum) -> None:
            self.call("put_object", key, Key=key, Body=data, **{checksum.field: checksum.of(data)}, **arguments)

        self.checked(put)

    def _pages(self, operation: str, given: str, told: str, prefix: str, **arguments: Any) -> Iterator[Any]:
        marker: dict[str, str] = {}
        while True:
            page = self.call(operation, prefix, Prefix=prefix, **arguments, **marker)
            yield page
            if not page.get("IsTruncated"):
                return
            marker = {given: page[told]}

    def _sign(self, key: str) -> str:
        from botocore.exceptions import BotoCoreError

        named = {"Bucket": self._settings.bucket, "Key": key}
        try:
            return str(self._client.generate_presigned_url("get_object", Params=named, ExpiresIn=SIGNED_SECONDS))
        except BotoCoreError as error:
            _log.debug("%s cannot be given a signed address: %s", key, error)
            return ""

    def _read_range(self, key: str, tag: str, offset: int, target: memoryview) -> None:
        """Fill `target`; after a break go on where it broke off."""
        filled = self._ranges.read(key, tag, offset, target) if target.nbytes >= LEAST_BYTES else 0
        if filled == target.nbytes:
            return

        def read(client: Any) -> None:
            nonlocal filled
            span = f"bytes={offset + filled}-{offset + target.nbytes - 1}"
            answer = self._send(client, "get_object", {"Key": key, "Range": span, "IfMatch": tag})
            with contextlib.closing(answer["Body"]) as body:
                if answer.get("ContentLength") not in (None, target.nbytes - filled):
                    raise ConnectionError("the answer is of another range")
                while filled < target.nbytes:
                    count = body.readinto(target[filled : filled + _READ_AT_ONCE])
                    if not count:
                        raise ConnectionError("the answer ended early")
                    filled += count

        try:
            self._attempts(key, read)
        except _TakenError as error:
            raise DamagedError(f"{key.rpartition('/')[2]} was replaced while it was read") from error


class _Upload:
    """One file in parts: a bounded number of them in memory, those that the server has not sent again."""

    def __init__(self, bucket: S3Bucket, settings: S3Settings, pool: ThreadPoolExecutor, key: str) -> None:
        self._bucket = bucket
        self._settings = settings
        self._pool = pool
        self._key = key
        self._checksum = bucket.checksum()
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._made = 0
        self._broken = False

    def run(self, parts: Iterable[memoryview]) -> None:
        """Upload all parts, then make the object of them."""
        before = self._bucket.checksum_of(self._key)
        upload, there = ("", {}) if before and before[1] else self._resume()
        running: list[Future[dict[str, Any]]] = []
        nbytes = 0
        try:
            for number, block in enumerate(parts, start=1):
                nbytes += block.nbytes
                if self._broken:
                    break
                if before and before[1]:
                    self._checksum.add(block)
                    continue
                running.append(self._send(upload, number, block, there.get(number)))
            if before and before[1]:
                return self._compare(before, nbytes)
            self._complete(upload, _finish(running), nbytes)
        except BaseException:
            _cancel(running)
            raise

    def _compare(self, before: tuple[int, str | None], nbytes: int) -> None:
        """The file was there whole already; the server's checksum says whether it is this one."""
        if before == (nbytes, self._checksum.whole()):
            return
        self._bucket.delete([self._key])
        raise CheckpointError(
            f"{self._bucket.url}/{self._key} held other bytes, of no commit; it was removed: upload again"
        )

    def _resume(self) -> tuple[str, dict[int, dict[str, Any]]]:
        """The newest upload that waits under this key with our checksum and its parts, or a fresh one."""
        waiting = [entry for entry in self._bucket.uploads(self._key) if entry["Key"] == self._key]
        for entry in sorted(waiting, key=lambda entry: entry["Initiated"], reverse=True):
            parts = self._parts(entry["UploadId"])
            if parts and all(self._checksum.field in part for part in parts.values()):
                _log.info("going on with %s: the store has %d of its parts", self._key, len(parts))
                return entry["UploadId"], parts
            self._bucket.abort(self._key, entry["UploadId"])
        return self._bucket.checked(self._begin), {}

    def _begin(self, checksum: Checksum) -> str:
        self._checksum = checksum
        kind = {"ChecksumAlgorithm": checksum.name, **checksum.kind}
        return str(self._bucket.call("create_multipart_upload", self._key, Key=self._key, **kind)["UploadId"])

    def _parts(self, upload: str) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        marker: dict[str, int] = {}
        while True:
            try:
                page = self._bucket.call("list_parts", self._key, Key=self._key, UploadId=upload, **marker)
            except _NoUploadError:
                return {}
            found |= {int(part["PartNumber"]): part for part in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                return found
            marker = {"PartNumberMarker": int(page["NextPartNumberMarker"])}

    def _send(
        self, upload: str, number: int, block: memoryview, there: Mapping[str, Any] | None
    ) -> Future[dict[str, Any]]:
        body = self._buffer(block.nbytes)
        checksum = self._checksum.add(block, body)
        if there and (int(there["Size"]), there[self._checksum.field]) == (block.nbytes, checksum):
            done: Future[dict[str, Any]] = Future()
            done.set_result(self._named(number, there["ETag"], checksum))
            self._free.put(body)
            return done
        return self._pool.submit(self._send_part, upload, number, body, checksum)

    def _buffer(self, nbytes: int) -> bytearray:
        """One that an earlier part has left, if it can be: fresh pages cost more than to copy into them."""
        if self._made > self._settings.in_flight:
            body = self._free.get()
        else:
            body, self._made = bytearray(), self._made + 1
        return body if len(body) == nbytes else bytearray(nbytes)

    def _send_part(self, upload: str, number: int, body: bytearray, checksum: str) -> dict[str, Any]:
        try:
            which = {"Key": self._key, "UploadId": upload, "PartNumber": number}
            made = self._bucket.call("upload_part", self._key, Body=body, **which, **{self._checksum.field: checksum})
        except BaseException:
            self._broken = True
            raise
        finally:
            self._free.put(body)
        return self._named(number, made["ETag"], checksum)

    def _named(self, number: int, tag: str, checksum: str) -> dict[str, Any]:
        return {"PartNumber": number, "ETag": tag, self._checksum.field: checksum}

    def _complete(self, upload: str, parts: Sequence[Mapping[str, Any]], nbytes: int) -> None:
        whole = {self._checksum.field: self._checksum.whole()} if self._checksum.kind else {}
        which = {"Key": self._key, "UploadId": upload, **self._checksum.kind}
        try:
            self._bucket.call(
                "complete_multipart_upload", self._key, **which, **whole, MultipartUpload={"Parts": list(parts)}
            )
        except _NoUploadError:
            # It was completed, and the answer lost; or another has aborted it.
            if self._bucket.checksum_of(self._key) != (nbytes, self._checksum.whole()):
                raise


def _in_parts(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Blocks put together to the sizes of parts, which grow with their number."""
    blocks = iter(blocks)
    for number in itertools.count():
        joined = list(itertools.islice(blocks, 1)) if number < _PARTS_OF_A_SIZE else _joined(blocks, number)
        if not joined:
            return
        yield from joined


def _joined(blocks: Iterator[memoryview], number: int) -> list[memoryview]:
    wanted = 1 << (number // _PARTS_OF_A_SIZE)
    joined = bytearray()
    for block in itertools.islice(blocks, wanted):
        joined += block
    return [memoryview(joined)] if joined else []


def _finish(running: Iterable[Future[Any]]) -> list[Any]:
    running = list(running)
    try:
        return [future.result() for future in running]
    except BaseException:
        _cancel(running)
        raise


def _cancel(running: Iterable[Future[Any]]) -> None:
    """Those that run are waited for: their buffers are still read."""
    for future in running:
        if not future.cancel():
            future.exception()


class _TakenError(CheckpointError):
    """The object is there, or is another one than before."""


class _RefusedError(UnavailableError):
    """The server does not do what was asked for."""


class _NoUploadError(CheckpointError):
    """The multipart upload is not there."""


class _Answered(Exception):  # noqa: N818 — the shape of an answer's error, only judged, never raised
    """An error inside an answer."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


def _client(settings: S3Settings) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UsageError("s3:// needs boto3, which is not installed: pip install 'holdfast-trainer[s3]'") from error
    config = Config(
        signature_version="s3v4",
        connect_timeout=settings.connect_seconds,
        read_timeout=settings.read_seconds,
        max_pool_connections=settings.in_flight + 2,
        tcp_keepalive=True,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Every body has a checksum of its own that the server compares: a second pass of SHA-256 proves no more.
        s3={"payload_signing_enabled": False},
    )
    try:
        return boto3.Session(**settings.credentials).client(
            "s3", endpoint_url=settings.endpoint, region_name=settings.region or aws_region(), config=config
        )
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"{settings.bucket}: boto3 cannot be set up: {error}") from error


def _authorities() -> str | None:
    """The certificates that boto3 would trust."""
    import botocore.session
    from botocore.httpsession import get_cert_path

    named = botocore.session.get_session().get_config_variable("ca_bundle")
    path = named or get_cert_path(True)
    return str(path) if path else None
