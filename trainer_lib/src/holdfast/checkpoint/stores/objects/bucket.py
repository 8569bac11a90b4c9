"""The operations of an object store, and what is built from them alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.core.errors import CorruptCheckpointError

IN_FLIGHT: Final = 8


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
    if not has_object(bucket, key):
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


def has_object(bucket: Bucket, key: str) -> bool:
    try:
        bucket.stat(key)
    except CorruptCheckpointError:
        return False
    return True
