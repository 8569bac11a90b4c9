"""A multipart upload to an S3 server, which resumes from the parts that the server has. No torch.

Each part is sent with its checksum, which the server compares.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.stores.objects.errors import NoUploadError
from holdfast.checkpoint.stores.objects.s3_checksum import Checksum
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.core.errors import CheckpointError

if TYPE_CHECKING:
    from holdfast.checkpoint.stores.objects.s3 import S3Bucket

_log = logging.getLogger("holdfast.checkpoint.s3")

# S3 allows 10,000 parts. The part size doubles every 2,000 parts, which reaches 1 TB from 16 MiB.
_PARTS_OF_A_SIZE: Final = 2000


class MultipartUpload:
    """The upload of one file in parts.

    A limited number is in memory, and parts that the server has are not sent again.
    """

    def __init__(self, bucket: S3Bucket, settings: S3Settings, pool: Pool, key: str) -> None:
        self._bucket = bucket
        self._settings = settings
        self._pool = pool
        self._key = key
        self._checksum = bucket.checksum()
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._made = 0
        self._broken = False

    def run(self, parts: Iterable[memoryview]) -> None:
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
            self._complete(upload, finish_all(running), nbytes)
        except BaseException:
            cancel_all(running)
            raise

    def _compare(self, before: tuple[int, str | None], nbytes: int) -> None:
        """Check by the server's checksum whether a file that was already complete is this one."""
        if before == (nbytes, self._checksum.whole()):
            return
        self._bucket.delete([self._key])
        raise CheckpointError(
            f"{self._bucket.url}/{self._key} held bytes of no checkpoint, and was removed: upload again"
        )

    def _resume(self) -> tuple[str, dict[int, dict[str, Any]]]:
        """Return the newest unfinished upload of this key with our checksum, and its parts; or begin a new one."""
        waiting = [entry for entry in self._bucket.uploads(self._key) if entry["Key"] == self._key]
        for entry in sorted(waiting, key=lambda entry: entry["Initiated"], reverse=True):
            parts = self._parts(entry["UploadId"])
            if parts and all(self._checksum.field in part for part in parts.values()):
                _log.info("resuming the upload of %s: the store has %d of its parts", self._key, len(parts))
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
            except NoUploadError:
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
        """Return a buffer, from an earlier part if possible: new pages cost more than copying into used ones."""
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
        except NoUploadError:
            # It was completed and the reply was lost, or another writer aborted it.
            if self._bucket.checksum_of(self._key) != (nbytes, self._checksum.whole()):
                raise


def in_parts(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Join blocks to the sizes of parts, which grow with their number."""
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


def finish_all(running: Iterable[Future[Any]]) -> list[Any]:
    running = list(running)
    try:
        return [future.result() for future in running]
    except BaseException:
        cancel_all(running)
        raise


def cancel_all(running: Iterable[Future[Any]]) -> None:
    """Cancel the futures, and wait for those that run, because they still read their buffers."""
    for future in running:
        if not future.cancel():
            future.exception()
