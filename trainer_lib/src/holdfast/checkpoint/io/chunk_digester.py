"""The digests of a file and of each of its chunks. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import xxhash

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.core.errors import CorruptCheckpointError

# Each block is digested twice, for its chunk and for the file. The second time, it is still in the CPU cache.
_BLOCK_BYTES: Final = 1 << 20


def check_chunk(file: str, record: FileRecord, index: int, digest: str) -> None:
    """Raise `CorruptCheckpointError` unless `digest` is the one with which the chunk was written."""
    if digest != record.chunks[index]:
        raise CorruptCheckpointError(f"{file}: digest of chunk {index} differs")


class ChunkDigester:
    """Digests a file that is passed in from its beginning. `seen` also receives each block, and may raise."""

    def __init__(self, seen: Callable[[memoryview], None] = lambda _: None) -> None:
        self._seen = seen
        self._whole = xxhash.xxh3_128()
        self._chunks: list[str] = []
        self._nbytes = 0

    def update(self, data: memoryview) -> None:
        """Digest the next bytes. They must be complete chunks, except at the end of the file."""
        for begin in range(0, data.nbytes, CHUNK_BYTES):
            chunk, own = data[begin : begin + CHUNK_BYTES], xxhash.xxh3_128()
            for at in range(0, chunk.nbytes, _BLOCK_BYTES):
                block = chunk[at : at + _BLOCK_BYTES]
                own.update(block)
                self._whole.update(block)
                self._seen(block)
            self._chunks.append(own.hexdigest())
        self._nbytes += data.nbytes

    def follow(self, target: memoryview, filled: int) -> None:
        """Digest the complete chunks among the first `filled` bytes of a file in memory."""
        end = filled if filled == target.nbytes else filled // CHUNK_BYTES * CHUNK_BYTES
        self.update(target[self._nbytes : end])

    def record(self) -> FileRecord:
        return FileRecord(nbytes=self._nbytes, digest=self._whole.hexdigest(), chunks=tuple(self._chunks))
