"""Reading a commit's tensors: several threads, each chunk checked against its digest, few copies. No torch.

What is wanted is laid out in memory first, in runs that mirror the files, so that whole pages of a file can be read
straight to where they stay; the rest of a chunk goes through a buffer of its thread. Where a commit has several
copies, each chunk comes from the first copy that verifies. Every byte that is read is covered by the digest of its
chunk, and those stand in the sealed manifest: the digest of the whole file would say nothing more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import xxhash

from holdfast.checkpoint.manifest import CHUNK_BYTES, FileRecord, Manifest, TensorRecord
from holdfast.checkpoint.stores import Source
from holdfast.errors import CheckpointError, DamagedError

# More threads than CPUs, that all wait for fresh huge pages, cost several times the CPU time of as many.
READERS: Final = max(2, min(8, len(os.sched_getaffinity(0))))
PAGE: Final = 4096
# Runs are cut here, so that memory of which nothing is used any more can go while a neighbour stays.
_RUN_BYTES: Final = 64 << 20
_LEAST_MAPPED: Final = 1 << 20
# Less than this is not worth a read of its own.
_LEAST_DIRECT: Final = 64 << 10

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
class _Part:
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
    lone: dict[str, list[_Part]] = {}
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
    return {file for name, record in every for file, _ in _wanted(name, record, rows.get(name))}


def _wanted(name: str, record: TensorRecord, rows: tuple[int, int] | None) -> list[tuple[str, _Part]]:
    begin, end = rows or (0, record.shape[0] if record.shape else 1)
    found = []
    for chunk in record.chunks:
        start, count = (chunk.start[0], chunk.shape[0]) if chunk.shape else (0, 1)
        low, high = max(begin, start), min(end, start + count)
        row = chunk.nbytes // count if count else 0
        if high > low and row:
            part = _Part(
                name=name,
                offset=chunk.offset + (low - start) * row,
                nbytes=(high - low) * row,
                place=(low - begin) * row,
            )
            found.append((chunk.file, part))
    return found


def _runs(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Neighbours in a file, of one managed object, together."""
    run = [parts[0]]
    for before, part in pairwise(parts):
        apart = part.offset != before.offset + before.nbytes or _owner(part) != _owner(before)
        if apart or part.offset - run[0].offset >= _RUN_BYTES:
            yield run
            run = []
        run.append(part)
    yield run


def _owner(part: _Part) -> str:
    return part.name.partition("/")[0]


def _memory(nbytes: int, offset: int) -> memoryview:
    """Fresh memory whose address is to its page as `offset` is to the file's: it can be read into without a copy."""
    if nbytes == 0:
        return memoryview(b"")
    if nbytes < _LEAST_MAPPED:
        return memoryview(bytearray(nbytes + offset % 16))[offset % 16 :]
    pad = offset % PAGE
    mapped = mmap.mmap(-1, pad + nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)[pad : pad + nbytes]


def extent(offset: int, target: memoryview) -> Extent:
    """Fill this from here on."""
    return Extent(offset=offset, target=target, address=address(target))


def address(view: memoryview) -> int:
    """Where a writable view's bytes lie."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


# Reading


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A copy of a file that did not give what it should: `lost` if its bytes are gone or wrong, else out of reach.

    `absent`: it could not be opened at all, which is no damage where a store has only some of the files.
    """

    copy: int
    file: str
    reason: str
    lost: bool
    absent: bool = False


@dataclass
class Copies:
    """The copies of one commit's files, in order of preference; what is wrong with them is kept in `faults`."""

    openers: Sequence[Callable[[str], Source]]
    records: Mapping[str, FileRecord]
    faults: list[Fault] = field(default_factory=list)
    given: dict[tuple[str, int], int] = field(default_factory=dict)
    """Which copy gave which chunk."""
    _open: dict[tuple[int, str], Source | Fault] = field(default_factory=dict)
    _ever: list[Source] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Let go of all files."""
        for source in self._ever:
            source.__exit__(None, None, None)
        self._ever.clear()
        self._open.clear()

    def fetch(self, file: str, act: Callable[[Source], None], beside: Collection[int] = ()) -> int:
        """Do this with the first copy of a file with which it goes well, none of those in `beside`; which it was."""
        failed: list[Fault] = []
        for copy in (copy for copy in range(len(self.openers)) if copy not in beside):
            source = self._source(copy, file)
            if not isinstance(source, Fault):
                try:
                    act(source)
                except CheckpointError as error:
                    source = self._note(copy, file, error)
                else:
                    return copy
            failed.append(source)
        reasons = "; ".join(dict.fromkeys(fault.reason for fault in failed))
        raise DamagedError(reasons) if all(fault.lost for fault in failed) else CheckpointError(reasons)

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

    def _note(self, copy: int, file: str, error: CheckpointError) -> Fault:
        fault = _fault(copy, file, error)
        with self._lock:
            self.faults.append(fault)
            if not fault.lost:
                self._open[copy, file] = fault  # out of reach: not asked again, unlike one of which a chunk is bad
        return fault


def _fault(copy: int, file: str, error: CheckpointError, *, absent: bool = False) -> Fault:
    lost = isinstance(error, DamagedError)
    return Fault(copy=copy, file=file, reason=str(error), lost=lost, absent=lost and absent)


def read_into(
    copies: Copies,
    extents: Mapping[str, Sequence[Extent]],
    *,
    also: Iterable[tuple[str, int]] = (),
    threads: int = READERS,
) -> None:
    """Fill all extents, from verified chunks only; the chunks in `also` are verified whoever wants them.

    DamagedError if no copy of some chunk is good. Memory beside the extents: a chunk for each thread.
    """
    reader = _Reader(copies, extents)
    chunks = sorted({*also, *_wanted_chunks(extents)})
    if len(chunks) == 1 or threads == 1:
        for file, index in chunks:
            reader.chunk(file, index)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-read") as pool:
        tasks = [pool.submit(reader.chunk, file, index) for file, index in chunks]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def spare(copies: Copies, beside: Collection[int]) -> bool:
    """Whether all that was read can be had without these copies; what only they gave is read again elsewhere."""
    reader = _Reader(copies, {})
    try:
        for (file, index), copy in sorted(copies.given.items()):
            if copy in beside:
                reader.chunk(file, index, beside)
    except CheckpointError:
        return False
    return True


def read_small(copies: Copies, file: str) -> bytearray:
    """A whole file, every byte verified."""
    data = bytearray(copies.records[file].nbytes)
    extents = {file: [extent(0, memoryview(data))]} if data else {}
    read_into(copies, extents, also=chunks_of(file, copies.records[file]), threads=1)
    return data


def chunks_of(file: str, record: FileRecord) -> list[tuple[str, int]]:
    """All of a file's. An empty file has none, but must be there all the same, which its first tells."""
    return [(file, index) for index in range(max(1, len(record.chunks)))]


def _wanted_chunks(extents: Mapping[str, Sequence[Extent]]) -> Iterator[tuple[str, int]]:
    for file, many in extents.items():
        for one in many:
            yield from ((file, index) for index in range(one.offset // CHUNK_BYTES, -(-one.end // CHUNK_BYTES)))


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


class _Reader:
    """Reads chunks, with a buffer for each thread."""

    def __init__(self, copies: Copies, extents: Mapping[str, Sequence[Extent]]) -> None:
        self._copies = copies
        self._extents = extents
        self._local = threading.local()

    def chunk(self, file: str, index: int, beside: Collection[int] = ()) -> None:
        """Read and verify one chunk, from the first copy that has it right."""
        copy = self._copies.fetch(file, lambda source: self._read(source, file, index), beside)
        self._copies.given[file, index] = copy

    def _read(self, source: Source, file: str, index: int) -> None:
        record = self._copies.records[file]
        begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, record.nbytes)
        if begin == end:
            return
        here = [extent for extent in self._extents.get(file, ()) if extent.offset < end and extent.end > begin]
        buffer, digest = self._buffer(), xxhash.xxh3_128()
        plan = segments(begin, end, here, getattr(source, "grain", 0))
        for segment in plan:
            target = buffer[segment.begin - begin : segment.end - begin] if segment.target is None else segment.target
            source.read_into(segment.begin, target)
            digest.update(target)
        if digest.hexdigest() != record.chunks[index]:
            raise DamagedError(f"{file}: digest of chunk {index} differs")
        for segment in plan:
            if segment.target is None:
                _spread(segment, buffer[segment.begin - begin :], here)

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        return self._local.buffer  # type: ignore[no-any-return]


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
