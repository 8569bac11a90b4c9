"""Memory for the requested tensors, laid out in runs that mirror the files. No torch.

Complete pages of a file can then be read directly to their target. A buffer per thread receives the rest of a chunk,
and everything that a disk would have to write into small pages. The buffer has large pages, which a disk fills in few
pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import TensorRecord
from holdfast.checkpoint.io.huge_pages import address_of, allocate

# Runs are split at this size, so that unused memory can be freed while a neighbouring part stays.
_RUN_BYTES: Final = 64 << 20
LEAST_MAPPED: Final = 1 << 20

Rows = Mapping[str, tuple[int, int]]
"""The requested rows [begin, end) of tensors that are not read completely."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A range of a file's bytes, and the memory that they are read into."""

    offset: int
    target: memoryview
    address: int

    @classmethod
    def over(cls, offset: int, target: memoryview) -> Extent:
        """Return the extent that fills `target` from the file's bytes at `offset` on."""
        return cls(offset=offset, target=target, address=address_of(target))

    @property
    def end(self) -> int:
        return self.offset + self.target.nbytes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Memory for the requested parts of tensors, and the bytes of each file that fill it."""

    tensors: Mapping[str, memoryview]
    extents: Mapping[str, Sequence[Extent]]


@dataclass(frozen=True, kw_only=True)
class _ChunkSlice:
    """The requested bytes of one chunk. `place` is their offset within the requested part of the tensor."""

    name: str
    offset: int
    nbytes: int
    place: int


def lay_out(manifest: Manifest, rows: Rows | None = None) -> Layout:
    """Allocate memory for all tensors, or for some rows of some."""
    tensors: dict[str, memoryview] = {}
    extents: dict[str, list[Extent]] = {}
    single_chunks: dict[str, list[_ChunkSlice]] = {}
    for name, record in manifest.tensors.items():
        parts = _requested(name, record, (rows or {}).get(name))
        if len(parts) == 1:
            ((file, part),) = parts
            single_chunks.setdefault(file, []).append(part)
            continue
        tensors[name] = _memory(sum(part.nbytes for _, part in parts), 0)
        for file, part in parts:
            target = tensors[name][part.place : part.place + part.nbytes]
            extents.setdefault(file, []).append(Extent.over(part.offset, target))
    for file, found in single_chunks.items():
        for run in _runs(sorted(found, key=lambda part: part.offset)):
            begin = run[0].offset
            memory = _memory(run[-1].offset + run[-1].nbytes - begin, begin)
            extents.setdefault(file, []).append(Extent.over(begin, memory))
            for part in run:
                tensors[part.name] = memory[part.offset - begin : part.offset - begin + part.nbytes]
    return Layout(
        tensors=tensors, extents={file: sorted(many, key=lambda e: e.offset) for file, many in extents.items()}
    )


def needed(manifest: Manifest, rows: Rows) -> set[str]:
    """Return the files that have requested data."""
    every = manifest.tensors.items()
    patched = {patch.file for record in manifest.tensors.values() for patch in record.patches}
    return patched | {file for name, record in every for file, _ in _requested(name, record, rows.get(name))}


def _requested(name: str, record: TensorRecord, rows: tuple[int, int] | None) -> list[tuple[str, _ChunkSlice]]:
    begin, end = rows or (0, record.shape[0] if record.shape else 1)
    if not record.in_rows:
        return _in_sequence(name, record) if end > begin else []
    found = []
    for chunk in record.chunks:
        start, count = (chunk.start[0], chunk.shape[0]) if chunk.shape else (0, 1)
        low, high = max(begin, start), min(end, start + count)
        row = chunk.nbytes // count if count else 0
        if high > low and row:
            part = _ChunkSlice(
                name=name,
                offset=chunk.offset + (low - start) * row,
                nbytes=(high - low) * row,
                place=(low - begin) * row,
            )
            found.append((chunk.file, part))
    return found


def _in_sequence(name: str, record: TensorRecord) -> list[tuple[str, _ChunkSlice]]:
    """Boxes in the order in which they are stored. `state.adopt` places their elements."""
    ends = accumulate(chunk.nbytes for chunk in record.chunks)
    return [
        (chunk.file, _ChunkSlice(name=name, offset=chunk.offset, nbytes=chunk.nbytes, place=end - chunk.nbytes))
        for chunk, end in zip(record.chunks, ends, strict=True)
    ]


def _runs(parts: Sequence[_ChunkSlice]) -> Iterator[list[_ChunkSlice]]:
    """Yield runs of parts that are neighbours in a file and belong to one managed object."""
    run = [parts[0]]
    for before, part in pairwise(parts):
        separate = part.offset != before.offset + before.nbytes or _owner(part) != _owner(before)
        if separate or part.offset - run[0].offset >= _RUN_BYTES:
            yield run
            run = []
        run.append(part)
    yield run


def _owner(part: _ChunkSlice) -> str:
    return part.name.partition("/")[0]


def _memory(nbytes: int, offset: int) -> memoryview:
    """Return new memory whose address within a page matches the file offset, so that reads need no copy."""
    if nbytes < LEAST_MAPPED:
        return memoryview(bytearray(nbytes + offset % 16))[offset % 16 :]
    return allocate(nbytes, offset=offset)
