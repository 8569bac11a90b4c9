"""Copy a checkpoint's files to another store, verified and at a limited rate. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import xxhash

from holdfast.checkpoint.format.file_names import CheckpointName, slices_file
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.chunk_digester import check_chunk
from holdfast.checkpoint.io.rate_limit import UNLIMITED, Pace
from holdfast.checkpoint.io.slice_digests import decode
from holdfast.checkpoint.restore.copies import read_slices
from holdfast.checkpoint.stores.base import CheckpointStore, Incoming, Source
from holdfast.core.errors import CorruptCheckpointError

# The part size of an upload to an object store.
_PIECE_BYTES: Final = 2 * CHUNK_BYTES


def transfer(
    store: CheckpointStore,
    name: CheckpointName,
    manifest: Manifest,
    incoming: Incoming,
    *,
    pace: Pace = UNLIMITED,
    shown: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the files of a checkpoint's own folder, and call `shown` with the bytes of each file that has arrived.

    Corrupt data is not sent, because another writer may have published the same file meanwhile.
    """
    for file, record in sorted(manifest.own.items()):
        with store.open(name, file) as source:
            written = incoming.write(file, _verified(file, source, record, pace))
        if written != record:
            raise CorruptCheckpointError(f"{file} was corrupted in transfer")
        slices = read_slices(partial(store.open, name), file)
        if decode(slices, record) is not None:
            incoming.write(slices_file(file), [slices])
        shown(record.nbytes)


def _verified(file: str, source: Source, record: FileRecord, pace: Pace) -> Iterator[memoryview]:
    """Yield a verified file piece by piece. Each piece is valid until the next one is requested."""
    if source.nbytes != record.nbytes:
        raise CorruptCheckpointError(f"{file}: {source.nbytes} bytes instead of {record.nbytes}")
    buffer = memoryview(bytearray(min(_PIECE_BYTES, record.nbytes)))
    for offset in range(0, record.nbytes, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, record.nbytes - offset)]
        pace.take(piece.nbytes)
        source.read_into(offset, piece)
        for at in range(0, piece.nbytes, CHUNK_BYTES):
            digest = xxhash.xxh3_128_hexdigest(piece[at : at + CHUNK_BYTES])
            check_chunk(file, record, (offset + at) // CHUNK_BYTES, digest)
        yield piece
