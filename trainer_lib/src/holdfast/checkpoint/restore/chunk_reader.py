"""Read a checkpoint's tensors on several threads, with each chunk checked against its digest, and few copies. No
torch.

The digest of its chunk covers every byte that is read, and the sealed manifest has the digests of the chunks. A
digest of the complete file would add nothing. If only a part of a chunk is requested, only the slices with that part
are read, provided that their digests are known (`slice_digests`).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import xxhash

from holdfast.checkpoint.format.records import CHUNK_BYTES, FileRecord
from holdfast.checkpoint.io.chunk_digester import check_chunk
from holdfast.checkpoint.io.huge_pages import Ahead, address_of, allocate, fault_in
from holdfast.checkpoint.io.memcpy import PROCESSORS, Move, move
from holdfast.checkpoint.io.slice_digests import Slicer, Slices, file_bytes, slice_bytes
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.restore.copies import Check, Copies, Span, whole_file
from holdfast.checkpoint.restore.memory_layout import LEAST_MAPPED, Extent
from holdfast.checkpoint.stores.base import Source
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

_log = logging.getLogger("holdfast.checkpoint.reading")

# Four more than there are CPUs: they wait for the disk while the others verify and copy (decision 0106).
READERS: Final = 4 + max(2, min(8, PROCESSORS))

# The block size for reads from memory. A block is still in the CPU cache when it is digested.
_BLOCK_BYTES: Final = 256 << 10
# A smaller part is not read separately.
_LEAST_DIRECT: Final = 64 << 10


def read_into(
    copies: Copies,
    extents: Mapping[str, Sequence[Extent]],
    *,
    also: Iterable[Span] = (),
    checks: Mapping[str, Check] | None = None,
    threads: int = READERS,
    fresh: bool = False,
) -> None:
    """Fill all extents with verified bytes only.

    Every span in `also` is verified in any case. `checks` are checks that run on files in addition. Each of the
    `threads` threads needs a buffer for one chunk. With `fresh`, the memory of the extents is new
    (`huge_pages.allocate`) and was never accessed. Raise `CorruptCheckpointError` if some part has no valid copy.
    """
    large = (one.target for file in sorted(extents) for one in extents[file] if one.target.nbytes >= LEAST_MAPPED)
    ahead = Ahead(large) if fresh else None
    reader = ChunkReader(copies, extents, ahead)
    ranges = _ranges(extents, also)
    spans = [span for file in sorted(ranges) for span in _spans(copies, file, ranges[file])]
    tasks = _tasks(reader, copies, spans, checks or {})
    if len(tasks) == 1 or threads == 1:
        for task in tasks:
            task()
        return
    with ahead or nullcontext(), Pool(min(threads, len(tasks)), "holdfast-read") as pool:
        for running in [pool.submit(task) for task in tasks]:
            running.result()


def _tasks(
    reader: ChunkReader, copies: Copies, spans: Sequence[Span], checks: Mapping[str, Check]
) -> list[Callable[[], None]]:
    """Return the tasks, which may run in any order.

    If the first bytes of a file are read, its check runs after they are verified: the digest detects a fault in them.
    """

    def check_file(file: str, first: Span | None = None) -> None:
        if first is not None:
            reader.read(first)
        copies.fetch(file, checks[file])

    begins = {span.file: span for span in spans if not span.begin}
    return [
        *(partial(check_file, file, begins.get(file)) for file in checks),
        *(partial(reader.read, span) for span in spans if span.begin or span.file not in checks),
    ]


def available_without(copies: Copies, excluded: Collection[int]) -> bool:
    """Return whether everything that was read is available without these copies.

    What only these copies supplied is read again from others.
    """
    reader = ChunkReader(copies)
    try:
        for span, copy in sorted(copies.given.items()):
            if copy in excluded:
                reader.read(span, excluded)
    except CheckpointError:
        return False
    return True


def read_small(copies: Copies, file: str) -> bytearray:
    """Return a complete file, with every byte verified."""
    data = bytearray(copies.records[file].nbytes)
    extents = {file: [Extent.over(0, memoryview(data))]} if data else {}
    read_into(copies, extents, also=[whole_file(file, copies.records[file])], threads=1)
    return data


def _ranges(extents: Mapping[str, Sequence[Extent]], also: Iterable[Span]) -> dict[str, list[tuple[int, int]]]:
    found = {file: [(one.offset, one.end) for one in many] for file, many in extents.items()}
    for span in also:
        found.setdefault(span.file, []).append((span.begin, span.end))
    return found


def _spans(copies: Copies, file: str, ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Return the spans to read of a file: the chunks with the requested bytes, or only slices of them.

    Slices are chosen if they save more bytes than their digests need.
    """
    nbytes = copies.records[file].nbytes
    found = cover(ranges, CHUNK_BYTES, nbytes)
    size = slice_bytes(nbytes)
    finer = cover(ranges, size, nbytes)
    saved = sum(end - begin for begin, end in found) - sum(end - begin for begin, end in finer)
    if saved > file_bytes(nbytes) and copies.slices(file) is not None:
        found = finer
    return [Span(file=file, begin=begin, end=end) for begin, end in found]


def cover(ranges: Sequence[tuple[int, int]], size: int, nbytes: int) -> list[tuple[int, int]]:
    """Return complete pieces of `size` that cover the ranges of a file, joined within each chunk."""
    if not nbytes:
        return [(0, 0)]
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        low, high = begin // size * size, min(nbytes, -(-end // size) * size)
        if found and low <= found[-1][1]:
            before = found.pop()
            low, high = before[0], max(high, before[1])
        found.append((low, high))
    return [piece for low, high in found for piece in _in_chunks(low, high)]


def _in_chunks(low: int, high: int) -> Iterator[tuple[int, int]]:
    while low < high:
        end = min(high, (low // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield low, end
        low = end


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Bytes [begin, end) of a file that are read at once, directly to `target` or through the buffer."""

    begin: int
    end: int
    target: memoryview | None


def segments(begin: int, end: int, extents: Sequence[Extent], grain: int) -> list[Segment]:
    """Plan the reads of a chunk.

    Both ends of a read must be multiples of `grain`. With 0, a chunk is read at once.
    """
    found: list[Segment] = []
    done = begin
    for extent in extents:
        low, high = max(begin, extent.offset), min(end, extent.end)
        if grain:
            if (extent.address - extent.offset) % grain:
                continue
            low, high = -(-low // grain) * grain, high if high == end else high // grain * grain
        if high - low < _LEAST_DIRECT or (not grain and (low, high) != (begin, end)):
            continue
        if low > done:
            found.append(Segment(begin=done, end=low, target=None))
        found.append(Segment(begin=low, end=high, target=extent.target[low - extent.offset : high - extent.offset]))
        done = high
    if done < end:
        found.append(Segment(begin=done, end=end, target=None))
    return found


class ChunkReader:
    """Reads spans, with a buffer for each thread."""

    def __init__(
        self, copies: Copies, extents: Mapping[str, Sequence[Extent]] | None = None, ahead: Ahead | None = None
    ) -> None:
        self._copies = copies
        self._extents = extents or {}
        self._ends = {file: [one.end for one in many] for file, many in self._extents.items()}
        self._ahead = ahead
        self._local = threading.local()

    def read(self, span: Span, excluded: Collection[int] = ()) -> None:
        """Read and verify a span from the first copy that is valid."""
        self._fetch(span, list(self._extents_in(span)), excluded)

    def read_to(self, span: Span, target: memoryview) -> None:
        """Read all of a span into `target`, and verify it."""
        self._fetch(span, [Extent.over(span.begin, target)])

    def _fetch(self, span: Span, requested: Sequence[Extent], excluded: Collection[int] = ()) -> None:
        copy = self._copies.fetch(span.file, lambda source: self._read(source, span, requested), excluded, span=span)
        self._copies.given[span] = copy

    def _read(self, source: Source, span: Span, requested: Sequence[Extent]) -> None:
        if span.begin == span.end:
            return
        buffer = self._buffer()
        plan = segments(
            span.begin, span.end, requested if self._reads_direct(source) else (), getattr(source, "grain", 0)
        )
        parts = [
            buffer[one.begin - span.begin : one.end - span.begin] if one.target is None else one.target
            for one in plan
        ]
        check = self._check(span)
        for segment, part in zip(plan, parts, strict=True):
            self._fill(source, segment, part, check)
        check.end()
        for segment, part in zip(plan, parts, strict=True):
            if segment.target is None:
                _spread(segment, part, requested)

    def _extents_in(self, span: Span) -> Iterator[Extent]:
        extents = self._extents.get(span.file, ())
        for one in extents[bisect_right(self._ends.get(span.file, ()), span.begin) :]:
            if one.offset >= span.end:
                return
            yield one

    def _reads_direct(self, source: Source) -> bool:
        """Whether a read into the target is as fast as a read into a buffer."""
        return not getattr(source, "staged", False) or (self._ahead is not None and self._ahead.large)

    def _fill(self, source: Source, segment: Segment, part: memoryview, check: _Check) -> None:
        memory = getattr(source, "grain", 0) and not getattr(source, "staged", False)
        step = _BLOCK_BYTES if memory else part.nbytes
        for at in range(0, part.nbytes, step):
            block = part[at : at + step]
            source.read_into(segment.begin + at, block)
            check.update(block)

    def _check(self, span: Span) -> _Check:
        record = self._copies.records[span.file]
        whole = not span.begin % CHUNK_BYTES and span.end == min(record.nbytes, span.begin + CHUNK_BYTES)
        return _WholeChunk(span, record) if whole else _SomeSlices(span, record, self._copies.slices(span.file))

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = allocate(CHUNK_BYTES)
            fault_in(self._local.buffer)
        return self._local.buffer  # type: ignore[no-any-return]


class _Check(Protocol):
    """A check that the bytes of a span are those that were written."""

    def update(self, data: memoryview, /) -> None:
        """Add the next bytes."""

    def end(self) -> None:
        """Raise `CorruptCheckpointError` if the bytes differ."""


class _WholeChunk:
    def __init__(self, span: Span, record: FileRecord) -> None:
        self._span, self._record = span, record
        self._digest = xxhash.xxh3_128()
        self.update = self._digest.update

    def end(self) -> None:
        check_chunk(self._span.file, self._record, self._span.begin // CHUNK_BYTES, self._digest.hexdigest())


class _SomeSlices:
    def __init__(self, span: Span, record: FileRecord, known: Slices | None) -> None:
        self._span, self._known = span, known
        self._slicer = Slicer(record.nbytes)
        self.update = self._slicer.update

    def end(self) -> None:
        span, known = self._span, self._known
        if known is None or list(known.within(span.begin, span.end)) != self._slicer.digests():
            index = span.begin // CHUNK_BYTES
            where = f"in bytes {span.begin} to {span.end}"
            raise CorruptCheckpointError(f"{span.file}: digest of chunk {index} differs, {where}")


def _spread(segment: Segment, data: memoryview, extents: Sequence[Extent]) -> None:
    """Copy what was read into the buffer to the targets, without the interpreter lock."""
    source = address_of(data)
    for one in extents:
        low, high = max(segment.begin, one.offset), min(segment.end, one.end)
        if low < high:
            move([Move(one.address + low - one.offset, source + low - segment.begin, high - low)], threads=1)
