"""Reads the bytes of a checkpoint, and verifies them before they are used. Imports no torch."""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from functools import partial
from types import TracebackType
from typing import Final, Self

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import CHUNK_BYTES, Chunk, TensorRecord
from holdfast.checkpoint.format.shard_layout import ITEM_BYTES
from holdfast.checkpoint.format.tensor_boxes import runs
from holdfast.checkpoint.restore import lossy_delta
from holdfast.checkpoint.restore.chunk_reader import ChunkReader
from holdfast.checkpoint.restore.copies import Copies, Span
from holdfast.checkpoint.stores.base import CheckpointStore, open_file
from holdfast.cli.checkpoints.access.locate import read_manifest

# Number of cached chunks: small tensors of one file are read approximately in the order of their positions.
_KEPT: Final = 8


def nbytes(manifest: Manifest) -> int:
    """Return the number of bytes of all files in the checkpoint's own folder."""
    return sum(record.nbytes for record in manifest.own.values())


def tensor_bytes(record: TensorRecord) -> int:
    """Return the number of bytes of a complete tensor."""
    return ITEM_BYTES[record.dtype] * math.prod(record.shape)


def memory(length: int) -> memoryview:
    """Return page-aligned memory, into which a store can read past the page cache."""
    return memoryview(mmap.mmap(-1, length)) if length else memoryview(bytearray())


class Content:
    def __init__(self, store: CheckpointStore, name: CheckpointName) -> None:
        self.name = name
        self.manifest = read_manifest(store, name)
        self._copies = Copies(openers=[partial(open_file, store, name)], records=self.manifest.files)
        self._reader = ChunkReader(self._copies)
        self._chunks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._patched: tuple[TensorRecord, list[lossy_delta.PatchRead]] | None = None
        self._assembled: tuple[TensorRecord, memoryview] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._copies.close()

    def tensor(self, name: str) -> bytearray:
        """Return all bytes of a tensor, in row-major order."""
        record = self.manifest.tensors[name]
        data = bytearray(tensor_bytes(record))
        self.fill(record, 0, memoryview(data))
        return data

    def fill(self, record: TensorRecord, begin: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a tensor, starting at byte `begin`."""
        end = begin + target.nbytes
        if not record.in_rows:
            target[:] = self._assemble(record)[begin:end]
            return
        for chunk in record.chunks:
            at = _begin(record, chunk)
            low, high = max(begin, at), min(end, at + chunk.nbytes)
            if low < high:
                self._read(chunk.file, chunk.offset + low - at, target[low - begin : high - begin])
        for patch in self._patches(record):
            lossy_delta.apply(patch, target, begin // ITEM_BYTES[record.dtype])

    def _assemble(self, record: TensorRecord) -> memoryview:
        """Return the bytes of a tensor that is stored in boxes. The last one is cached."""
        if self._assembled is None or self._assembled[0] is not record:
            item, whole = ITEM_BYTES[record.dtype], memory(tensor_bytes(record))
            for chunk in record.chunks:
                box, at = memory(chunk.nbytes), 0
                self._read(chunk.file, chunk.offset, box)
                for place, count in runs(record.shape, (chunk.start, chunk.shape)):
                    whole[place * item : (place + count) * item] = box[at : at + count * item]
                    at += count * item
            self._assembled = record, whole
        return self._assembled[1]

    def _patches(self, record: TensorRecord) -> list[lossy_delta.PatchRead]:
        """Return the patches of a tensor. The last ones are cached."""
        if self._patched is None or self._patched[0] is not record:
            self._patched = record, []
            for patch in record.patches:
                self._copies.require(patch.file)  # check the size before memory of that size is allocated
                one = lossy_delta.with_buffers(record, patch)
                self._read(patch.file, patch.places, one.places)
                self._read(patch.file, patch.values, one.values)
                self._patched[1].append(one)
        return self._patched[1]

    def document(self, file: str) -> bytes:
        """Return all bytes of a small file."""
        data = bytearray(self.manifest.files[file].nbytes)
        self._read(file, 0, memoryview(data))
        return bytes(data)

    def _read(self, file: str, offset: int, target: memoryview) -> None:
        while target.nbytes:
            index, within = divmod(offset, CHUNK_BYTES)
            part = self._chunk(file, index)[within : within + target.nbytes]
            target[: part.nbytes] = part
            target, offset = target[part.nbytes :], offset + part.nbytes

    def _chunk(self, file: str, index: int) -> memoryview:
        key = (file, index)
        if key not in self._chunks:
            begin = index * CHUNK_BYTES
            data = memory(min(CHUNK_BYTES, self.manifest.files[file].nbytes - begin))
            self._reader.read_to(Span(file=file, begin=begin, end=begin + data.nbytes), data)
            self._chunks[key] = data
            if len(self._chunks) > _KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]


def _begin(record: TensorRecord, chunk: Chunk) -> int:
    row = ITEM_BYTES[record.dtype] * math.prod(record.shape[1:])
    return chunk.start[0] * row if chunk.start else 0
