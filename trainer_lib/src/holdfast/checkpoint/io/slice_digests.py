"""Digests of small slices of a file, in a file beside it: a part of a chunk is verified by itself. No torch.

Invariant: nothing depends on it. The manifest does not name it, and a commit without it is whole: its chunks are then
read whole. It says of which file it is by that file's own digest, and ends with its own, so that one which is
damaged, or was left of another file, is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.durable_files import Buffer

FORMAT: Final = "holdfast-slices"
VERSION: Final = 1
# Of a file smaller than this, a chunk is read as fast as a part of it.
LEAST_BYTES: Final = 256 << 10
_SMALLEST: Final = 4096
# So many bound what the file takes, and the time to make it, whatever the size of what it is about.
_MOST: Final = 1 << 14
_DIGEST_BYTES: Final = 8
_SEAL_BYTES: Final = 16
_LONGEST_LINE: Final = 512
LARGEST: Final = _LONGEST_LINE + _MOST * _DIGEST_BYTES + _SEAL_BYTES
"""Bytes of such a file."""


def slice_bytes(nbytes: int) -> int:
    """How much of a file of this length one digest covers: a power of two, at least a page, at most a chunk."""
    size = _SMALLEST
    while size < CHUNK_BYTES and nbytes > size * _MOST:
        size *= 2
    return size


def file_bytes(nbytes: int) -> int:
    """About how long the file beside a file of this length is."""
    return _LONGEST_LINE + -(-nbytes // slice_bytes(nbytes)) * _DIGEST_BYTES


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The digests of a file's slices, in order."""

    size: int
    digests: Sequence[bytes]

    def within(self, begin: int, end: int) -> Sequence[bytes]:
        """Those of a part of the file that begins with a slice."""
        return self.digests[begin // self.size : -(-end // self.size)]


class Slicer:
    """Makes them of a file that passes by, in pieces of any size."""

    def __init__(self, nbytes: int) -> None:
        self._size = slice_bytes(nbytes)
        self._digests: list[bytes] = []
        self._open = xxhash.xxh3_64()
        self._filled = 0

    @property
    def size(self) -> int:
        """How much one digest covers."""
        return self._size

    def update(self, data: Buffer) -> None:
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            if not self._filled and rest.nbytes >= self._size:
                taken = rest.nbytes // self._size * self._size
                self._digests += digests_of(rest[:taken], self._size)
            else:
                taken = min(rest.nbytes, self._size - self._filled)
                self._open.update(rest[:taken])
                self._filled += taken
                if self._filled == self._size:
                    self._close()
            rest = rest[taken:]

    def digests(self) -> Sequence[bytes]:
        if self._filled:
            self._close()
        return self._digests

    def encode(self, file: FileRecord) -> bytes:
        """The bytes of the file beside `file`, which has passed by."""
        head = {
            "bytes": file.nbytes,
            "digest": file.digest,
            "format": FORMAT,
            "sliceBytes": self._size,
            "version": VERSION,
        }
        body = json.dumps(head, separators=(",", ":")).encode() + b"\n" + b"".join(self.digests())
        return body + xxhash.xxh3_128_digest(body)

    def _close(self) -> None:
        self._digests.append(self._open.digest())
        self._open.reset()
        self._filled = 0


def digests_of(data: memoryview, size: int) -> Iterator[bytes]:
    """The digest of each `size` bytes, the last ones fewer."""
    return (xxhash.xxh3_64_digest(data[begin : begin + size]) for begin in range(0, data.nbytes, size))


def decode(raw: bytes, file: FileRecord) -> Slices | None:
    """What such a file says of `file`; None if it is not whole, is of another file, or is of a newer release."""
    body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    line, _, packed = body.partition(b"\n")
    if xxhash.xxh3_128_digest(body) != seal or len(line) > _LONGEST_LINE:
        return None
    size = slice_bytes(file.nbytes)
    said = {"bytes": file.nbytes, "digest": file.digest, "format": FORMAT, "sliceBytes": size, "version": VERSION}
    if _json(line) != said or len(packed) != -(-file.nbytes // size) * _DIGEST_BYTES:
        return None
    return Slices(
        size=size,
        digests=[packed[begin : begin + _DIGEST_BYTES] for begin in range(0, len(packed), _DIGEST_BYTES)],
    )


def _json(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
