"""Reading a commit's tensors: several threads, each chunk checked against its digest, few copies. No torch.

What is wanted is laid out in memory first, in runs that mirror the files, so that whole pages of a file can be read
straight to where they stay; the rest of a chunk, and all that a disk would have to put into small pages, goes through
a buffer of its thread, which is of large ones: a disk fills those in few pieces. Where a commit has several copies,
each chunk comes from the first copy that verifies. Every byte that is read is covered by the digest of its chunk, and
those stand in the sealed manifest: the digest of the whole file would say nothing more. Of a chunk of which only a
part is wanted, only the slices in which it lies are read, if their digests are known (`slices`).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Final, Protocol

import xxhash

from holdfast.checkpoint.format.file_names import slices_file
from holdfast.checkpoint.format.manifest import CHUNK_BYTES, FileRecord, Manifest, TensorRecord
from holdfast.checkpoint.io.huge_pages import Ahead, address_of, fault_in, fresh
from holdfast.checkpoint.io.memcpy import PROCESSORS
from holdfast.checkpoint.io.slice_digests import LARGEST, Slicer, Slices, decode, file_bytes, slice_bytes
from holdfast.checkpoint.io.thread_pool import Pool
from holdfast.checkpoint.stores.base import Source
from holdfast.core.errors import CheckpointError, DamagedError

_log = logging.getLogger("holdfast.checkpoint.reading")

# Four more than there are CPUs: they wait for the disk while the others verify and copy (decision 0106).
READERS: Final = 4 + max(2, min(8, PROCESSORS))
# Runs are cut here, so that memory of which nothing is used any more can go while a neighbour stays.
_RUN_BYTES: Final = 64 << 20
_LEAST_MAPPED: Final = 1 << 20
# What comes from memory is read and digested in turns of so much: the second finds it in the core's cache.
_BLOCK_BYTES: Final = 256 << 10
# Less than this is not worth a read of its own.
_LEAST_DIRECT: Final = 64 << 10

Look = Callable[[Source], None]
"""At an open file: a CheckpointError if it is not as it should be."""
Rows = Mapping[str, tuple[int, int]]
"""Of tensors that are not wanted whole, which rows are: [begin, end)."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Bytes of a file that are wanted, and where they go."""

    offset: int
    target: memoryview
    address: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.target.nbytes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Memory for the wanted parts of tensors, and which bytes of which file fill it."""

    tensors: Mapping[str, memoryview]
    extents: Mapping[str, Sequence[Extent]]


@dataclass(frozen=True, kw_only=True)
class _ChunkSlice:
    """The wanted bytes of one chunk of a tensor: `place` is where they begin within what is wanted of the tensor."""

    name: str
    offset: int
    nbytes: int
    place: int


# Laying out


def lay_out(manifest: Manifest, rows: Rows | None = None) -> Layout:
    """Find memory for all tensors, or for some rows of some."""
    tensors: dict[str, memoryview] = {}
    extents: dict[str, list[Extent]] = {}
    lone: dict[str, list[_ChunkSlice]] = {}
    for name, record in manifest.tensors.items():
        parts = _wanted(name, record, (rows or {}).get(name))
        if len(parts) == 1:
            ((file, part),) = parts
            lone.setdefault(file, []).append(part)
            continue
        tensors[name] = _memory(sum(part.nbytes for _, part in parts), 0)
        for file, part in parts:
            target = tensors[name][part.place : part.place + part.nbytes]
            extents.setdefault(file, []).append(extent(part.offset, target))
    for file, found in lone.items():
        for run in _runs(sorted(found, key=lambda part: part.offset)):
            begin = run[0].offset
            memory = _memory(run[-1].offset + run[-1].nbytes - begin, begin)
            extents.setdefault(file, []).append(extent(begin, memory))
            for part in run:
                tensors[part.name] = memory[part.offset - begin : part.offset - begin + part.nbytes]
    return Layout(
        tensors=tensors, extents={file: sorted(many, key=lambda e: e.offset) for file, many in extents.items()}
    )


def needed(manifest: Manifest, rows: Rows) -> set[str]:
    """The files that hold something of what is wanted."""
    every = manifest.tensors.items()
    patched = {patch.file for record in manifest.tensors.values() for patch in record.patches}
    return patched | {file for name, record in every for file, _ in _wanted(name, record, rows.get(name))}


def _wanted(name: str, record: TensorRecord, rows: tuple[int, int] | None) -> list[tuple[str, _ChunkSlice]]:
    begin, end = rows or (0, record.shape[0] if record.shape else 1)
    if not record.in_rows:
        return _one_after_the_other(name, record) if end > begin else []
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


def _one_after_the_other(name: str, record: TensorRecord) -> list[tuple[str, _ChunkSlice]]:
    """Boxes as they lie: `state.adopt` knows where their elements belong."""
    ends = accumulate(chunk.nbytes for chunk in record.chunks)
    return [
        (chunk.file, _ChunkSlice(name=name, offset=chunk.offset, nbytes=chunk.nbytes, place=end - chunk.nbytes))
        for chunk, end in zip(record.chunks, ends, strict=True)
    ]


def _runs(parts: Sequence[_ChunkSlice]) -> Iterator[list[_ChunkSlice]]:
    """Neighbours in a file, of one managed object, together."""
    run = [parts[0]]
    for before, part in pairwise(parts):
        apart = part.offset != before.offset + before.nbytes or _owner(part) != _owner(before)
        if apart or part.offset - run[0].offset >= _RUN_BYTES:
            yield run
            run = []
        run.append(part)
    yield run


def _owner(part: _ChunkSlice) -> str:
    return part.name.partition("/")[0]


def _memory(nbytes: int, offset: int) -> memoryview:
    """Fresh memory whose address is to its page as `offset` is to the file's: it can be read into without a copy."""
    if nbytes < _LEAST_MAPPED:
        return memoryview(bytearray(nbytes + offset % 16))[offset % 16 :]
    return fresh(nbytes, offset=offset)


def extent(offset: int, target: memoryview) -> Extent:
    """Fill this from here on."""
    return Extent(offset=offset, target=target, address=address_of(target))


# Reading


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A copy of a file that did not give what it should: `lost` if its bytes are gone or wrong, else out of reach.

    `absent`: it could not be opened at all, which is no damage where a store has only some of the files. `span`:
    where it was found, if not by a look. `settled`: it was found in verified bytes, and stays when read again.
    """

    copy: int
    file: str
    reason: str
    lost: bool
    absent: bool = False
    span: Span | None = None
    settled: bool = False


@dataclass
class Copies:
    """The copies of one commit's files, in order of preference; what is wrong with them is kept in `faults`."""

    openers: Sequence[Callable[[str], Source]]
    records: Mapping[str, FileRecord]
    faults: list[Fault] = field(default_factory=list)
    given: dict[Span, int] = field(default_factory=dict)
    """Which copy gave what."""
    _open: dict[tuple[int, str], Source | Fault] = field(default_factory=dict)
    _ever: list[Source] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slices: dict[str, Slices | None] = field(default_factory=dict)

    def close(self) -> None:
        """Let go of all files."""
        for source in self._ever:
            source.__exit__(None, None, None)
        self._ever.clear()
        self._open.clear()

    def fetch(
        self, file: str, act: Look, beside: Collection[int] = (), *, span: Span | None = None, settled: bool = False
    ) -> int:
        """Do this with the first copy of a file with which it goes well, none of those in `beside`; which it was.

        What is found bad is read once more, unless it is `settled`: bytes may be flipped on their way.
        """
        failed: list[Fault] = []
        for copy in (copy for copy in range(len(self.openers)) if copy not in beside):
            source = self._source(copy, file)
            if not isinstance(source, Fault):
                try:
                    act(source) if settled else _twice(source, act)
                except CheckpointError as error:
                    source = self._note(copy, file, error, span, settled=settled)
                else:
                    return copy
            failed.append(source)
        reasons = "; ".join(dict.fromkeys(fault.reason for fault in failed)) or f"{file}: no store in reach has it"
        raise DamagedError(reasons) if all(fault.lost for fault in failed) else CheckpointError(reasons)

    def slices(self, file: str) -> Slices | None:
        """The digests of its slices, from any copy that has good ones."""
        if file not in self._slices:
            found = (decode(read_slices(opener, file), self.records[file]) for opener in self.openers)
            self._slices[file] = next((one for one in found if one is not None), None)
        return self._slices[file]

    def _source(self, copy: int, file: str) -> Source | Fault:
        with self._lock:
            if (copy, file) not in self._open:
                self._open[copy, file] = self._opened(copy, file)
            return self._open[copy, file]

    def _opened(self, copy: int, file: str) -> Source | Fault:
        try:
            source = self.openers[copy](file).__enter__()
        except CheckpointError as error:
            fault = _fault(copy, file, error, absent=True)
        else:
            self._ever.append(source)
            size, expected = source.nbytes, self.records[file].nbytes
            if size == expected:
                return source
            fault = _fault(copy, file, DamagedError(f"{file}: {size} bytes instead of {expected}"))
        self.faults.append(fault)
        return fault

    def _note(self, copy: int, file: str, error: CheckpointError, span: Span | None, *, settled: bool) -> Fault:
        fault = replace(_fault(copy, file, error), span=span, settled=settled)
        with self._lock:
            self.faults.append(fault)
            if not fault.lost:
                self._open[copy, file] = fault  # out of reach: not asked again, unlike one of which a chunk is bad
        return fault


def read_slices(opener: Callable[[str], Source], file: str) -> bytes:
    """The digests of a file's slices as they lie beside it; nothing where they are missing or out of reach."""
    try:
        with opener(slices_file(file)) as source:
            raw = bytearray(source.nbytes if source.nbytes <= LARGEST else 0)
            source.read_into(0, memoryview(raw))
    except CheckpointError:
        return b""
    return bytes(raw)


def _twice(source: Source, act: Look) -> None:
    """Past what this host remembers of the file, if it is found bad."""
    try:
        act(source)
    except DamagedError as error:
        forget = getattr(source, "forget", None)
        if forget is not None:
            forget()
        act(source)
        _log.warning("%s; read again it is right: it was flipped on its way here", error)


def _fault(copy: int, file: str, error: CheckpointError, *, absent: bool = False) -> Fault:
    lost = isinstance(error, DamagedError)
    return Fault(copy=copy, file=file, reason=str(error), lost=lost, absent=lost and absent)


@dataclass(frozen=True, kw_only=True, order=True)
class Span:
    """Bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int


def read_into(
    copies: Copies,
    extents: Mapping[str, Sequence[Extent]],
    *,
    also: Iterable[Span] = (),
    looks: Mapping[str, Look] | None = None,
    threads: int = READERS,
    fresh: bool = False,
) -> None:
    """Fill all extents, from verified bytes only; what is in `also` is verified whoever wants it, and `looks` are
    taken at files beside that.

    DamagedError if no copy of some of it is good. Memory beside the extents: a chunk for each thread. `fresh`: the
    extents' own is of `pages.fresh`, and was never touched.
    """
    large = (one.target for file in sorted(extents) for one in extents[file] if one.target.nbytes >= _LEAST_MAPPED)
    ahead = Ahead(large) if fresh else None
    reader = _Reader(copies, extents, ahead)
    ranges = _ranges(extents, also)
    spans = [span for file in sorted(ranges) for span in _spans(copies, file, ranges[file])]
    tasks = _tasks(reader, copies, spans, looks or {})
    if len(tasks) == 1 or threads == 1:
        for task in tasks:
            task()
        return
    with ahead or nullcontext(), Pool(min(threads, len(tasks)), "holdfast-read") as pool:
        for begun in [pool.submit(task) for task in tasks]:
            begun.result()


def _tasks(
    reader: _Reader, copies: Copies, spans: Sequence[Span], looks: Mapping[str, Look]
) -> list[Callable[[], None]]:
    """What is done in any order. A file is looked at once its first bytes are verified, if they are read: of damage
    to those, the digest tells."""

    def look(file: str, first: Span | None = None) -> None:
        if first is not None:
            reader.read(first)
        copies.fetch(file, looks[file])

    begins = {span.file: span for span in spans if not span.begin}
    return [
        *(partial(look, file, begins.get(file)) for file in looks),
        *(partial(reader.read, span) for span in spans if span.begin or span.file not in looks),
    ]


def spare(copies: Copies, beside: Collection[int]) -> bool:
    """Whether all that was read can be had without these copies; what only they gave is read again elsewhere."""
    reader = _Reader(copies, {})
    try:
        for span, copy in sorted(copies.given.items()):
            if copy in beside:
                reader.read(span, beside)
    except CheckpointError:
        return False
    return True


def read_small(copies: Copies, file: str) -> bytearray:
    """A whole file, every byte verified."""
    data = bytearray(copies.records[file].nbytes)
    extents = {file: [extent(0, memoryview(data))]} if data else {}
    read_into(copies, extents, also=[whole_file(file, copies.records[file])], threads=1)
    return data


def whole_file(file: str, record: FileRecord) -> Span:
    """All of it. An empty one has no bytes to verify, but must be there all the same."""
    return Span(file=file, begin=0, end=record.nbytes)


def _ranges(extents: Mapping[str, Sequence[Extent]], also: Iterable[Span]) -> dict[str, list[tuple[int, int]]]:
    """What is wanted of each file."""
    found = {file: [(one.offset, one.end) for one in many] for file, many in extents.items()}
    for span in also:
        found.setdefault(span.file, []).append((span.begin, span.end))
    return found


def _spans(copies: Copies, file: str, ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """What is read of a file, each span by itself: the chunks that hold what is wanted, or only slices of them if
    that saves more than it takes to learn their digests."""
    nbytes = copies.records[file].nbytes
    found = cover(ranges, CHUNK_BYTES, nbytes)
    size = slice_bytes(nbytes)
    finer = cover(ranges, size, nbytes)
    saved = sum(end - begin for begin, end in found) - sum(end - begin for begin, end in finer)
    if saved > file_bytes(nbytes) and copies.slices(file) is not None:
        found = finer
    return [Span(file=file, begin=begin, end=end) for begin, end in found]


def cover(ranges: Sequence[tuple[int, int]], size: int, nbytes: int) -> list[tuple[int, int]]:
    """Whole pieces of `size` that cover the ranges of a file: put together, but never over the end of a chunk."""
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
    """Bytes [begin, end) of a file, read at once: straight to `target`, or by way of the buffer."""

    begin: int
    end: int
    target: memoryview | None


def segments(begin: int, end: int, extents: Sequence[Extent], grain: int) -> list[Segment]:
    """How to read a chunk. `grain` is what both ends of a read must be a multiple of; 0: a chunk is read at once."""
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


def _in_memory(source: Source) -> bool:
    """Whether parts of it can be had apart at no cost, and go straight to where they stay."""
    return bool(getattr(source, "grain", 0)) and not getattr(source, "staged", False)


class _Reader:
    """Reads spans, with a buffer for each thread."""

    def __init__(self, copies: Copies, extents: Mapping[str, Sequence[Extent]], ahead: Ahead | None = None) -> None:
        self._copies = copies
        self._extents = extents
        self._ends = {file: [one.end for one in many] for file, many in extents.items()}
        self._ahead = ahead
        self._local = threading.local()

    def read(self, span: Span, beside: Collection[int] = ()) -> None:
        """Read and verify, from the first copy that has it right."""
        copy = self._copies.fetch(span.file, lambda source: self._read(source, span), beside, span=span)
        self._copies.given[span] = copy

    def _read(self, source: Source, span: Span) -> None:
        if span.begin == span.end:
            return
        here = list(self._here(span))
        buffer = self._buffer()
        plan = segments(span.begin, span.end, here if self._straight(source) else (), getattr(source, "grain", 0))
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
                _spread(segment, part, here)

    def _here(self, span: Span) -> Iterator[Extent]:
        """What goes where of a span."""
        extents = self._extents.get(span.file, ())
        for one in extents[bisect_right(self._ends.get(span.file, ()), span.begin) :]:
            if one.offset >= span.end:
                return
            yield one

    def _straight(self, source: Source) -> bool:
        """Whether it comes as fast to where it stays as to a buffer."""
        return not getattr(source, "staged", False) or (self._ahead is not None and self._ahead.large)

    def _fill(self, source: Source, segment: Segment, part: memoryview, check: _Check) -> None:
        step = _BLOCK_BYTES if _in_memory(source) else part.nbytes
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
            self._local.buffer = fresh(CHUNK_BYTES)
            fault_in(self._local.buffer)
        return self._local.buffer  # type: ignore[no-any-return]


class _Check(Protocol):
    """Whether the bytes of a span are those that were written."""

    def update(self, data: memoryview, /) -> None:
        """The next of them."""

    def end(self) -> None:
        """DamagedError if they are not."""


class _WholeChunk:
    def __init__(self, span: Span, record: FileRecord) -> None:
        self._span, self._record = span, record
        self._digest = xxhash.xxh3_128()
        self.update = self._digest.update

    def end(self) -> None:
        index = self._span.begin // CHUNK_BYTES
        if self._digest.hexdigest() != self._record.chunks[index]:
            raise DamagedError(f"{self._span.file}: digest of chunk {index} differs")


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
            raise DamagedError(f"{span.file}: digest of chunk {index} differs, {where}")


def _spread(segment: Segment, data: memoryview, extents: Sequence[Extent]) -> None:
    import numpy as np  # the launcher imports this module, and does without numpy

    for extent in extents:
        low, high = max(segment.begin, extent.offset), min(segment.end, extent.end)
        if low < high:
            target = extent.target[low - extent.offset : high - extent.offset]
            # numpy, unlike a memoryview, lets other threads run meanwhile.
            np.copyto(
                np.frombuffer(target, np.uint8),
                np.frombuffer(data[low - segment.begin : high - segment.begin], np.uint8),
            )
