"""Digests of small slices of a file, stored alongside it, so that a part of a chunk can be verified. No torch.

Invariant: nothing depends on such a file. The manifest does not name it, and a checkpoint without it is complete: its
chunks are then read completely. The file names its data file by that file's digest, and ends with its own digest. A
reader ignores it if it is corrupt, or if it belongs to another file.
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
# In smaller files, reading a chunk is as fast as reading a part of it.
LEAST_BYTES: Final = 256 << 10
_SMALLEST: Final = 4096
# Limits the file's size, and the time to create it, for data files of any size.
_MOST: Final = 1 << 14
_DIGEST_BYTES: Final = 8
_SEAL_BYTES: Final = 16
_LONGEST_LINE: Final = 512
LARGEST: Final = _LONGEST_LINE + _MOST * _DIGEST_BYTES + _SEAL_BYTES
"""The largest size of such a file, in bytes."""


def slice_bytes(nbytes: int) -> int:
    """Return the bytes per digest in a file of this length: a power of two, at least a page, at most a chunk."""
    size = _SMALLEST
    while size < CHUNK_BYTES and nbytes > size * _MOST:
        size *= 2
    return size


def file_bytes(nbytes: int) -> int:
    """Return about how many bytes the digests of a file of this length need."""
    return _LONGEST_LINE + -(-nbytes // slice_bytes(nbytes)) * _DIGEST_BYTES


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The digests of a file's slices, in order."""

    size: int
    digests: Sequence[bytes]

    def within(self, begin: int, end: int) -> Sequence[bytes]:
        """Return the digests of a part of the file that begins with a slice."""
        return self.digests[begin // self.size : -(-end // self.size)]


class Slicer:
    """Computes the digests of a file that is passed in, in pieces of any size."""

    def __init__(self, nbytes: int) -> None:
        self._size = slice_bytes(nbytes)
        self._digests: list[bytes] = []
        self._open = xxhash.xxh3_64()
        self._filled = 0

    @property
    def size(self) -> int:
        """The bytes that one digest covers."""
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
        """Encode the digests of `file`, all of whose bytes have been passed in."""
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
    """Yield the digest of each `size` bytes. The last slice may be shorter."""
    return (xxhash.xxh3_64_digest(data[begin : begin + size]) for begin in range(0, data.nbytes, size))


def decode(raw: bytes, file: FileRecord) -> Slices | None:
    """Parse the digests of `file`. Return None if they are corrupt, or from another file or a newer release."""
    body, seal = raw[:-_SEAL_BYTES], raw[-_SEAL_BYTES:]
    line, _, packed = body.partition(b"\n")
    if xxhash.xxh3_128_digest(body) != seal or len(line) > _LONGEST_LINE:
        return None
    size = slice_bytes(file.nbytes)
    header = {"bytes": file.nbytes, "digest": file.digest, "format": FORMAT, "sliceBytes": size, "version": VERSION}
    if _json(line) != header or len(packed) != -(-file.nbytes // size) * _DIGEST_BYTES:
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
