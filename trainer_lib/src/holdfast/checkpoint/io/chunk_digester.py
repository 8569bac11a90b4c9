"""The digests of a file: of all of it, and of each chunk. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.direct_writer import BLOCK_BYTES
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.core.errors import CheckpointError


class ChunkDigester:
    """The digests of a buffer that is filled from its beginning on, taken while what was filled is still warm.

    `seen` gets all of it, block by block, and may raise.
    """

    def __init__(self, target: memoryview, seen: Callable[[memoryview], None] = lambda _: None) -> None:
        self._target = target
        self._seen = seen
        self._whole = xxhash.xxh3_128()
        self._chunks: list[str] = []
        self._done = 0

    def up_to(self, filled: int) -> None:
        """So much is there by now."""
        while self._done < filled:
            end = min(self._done + CHUNK_BYTES, self._target.nbytes)
            if end > filled:
                return
            chunk, own = self._target[self._done : end], xxhash.xxh3_128()
            for at in range(0, chunk.nbytes, BLOCK_BYTES):
                block = chunk[at : at + BLOCK_BYTES]
                self._whole.update(block)
                own.update(block)
                self._seen(block)
            self._chunks.append(own.hexdigest())
            self._done = end

    def record(self) -> FileRecord:
        """Of all of it."""
        if self._done != self._target.nbytes:
            raise CheckpointError(f"{self._done} bytes came for a file of {self._target.nbytes}")
        return FileRecord(nbytes=self._done, digest=self._whole.hexdigest(), chunks=tuple(self._chunks))


def fill(target: memoryview, parts: Iterable[Buffer]) -> FileRecord:
    """Copy parts into a buffer that they fill."""
    digests, filled = ChunkDigester(target), 0
    for part in parts:
        data = memoryview(part).cast("B")
        target[filled : filled + data.nbytes] = data
        filled += data.nbytes
        digests.up_to(filled)
    return digests.record()
