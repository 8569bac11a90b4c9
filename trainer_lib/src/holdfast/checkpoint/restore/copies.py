"""The copies of one checkpoint's files: each file is read from the first valid copy. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.format.file_names import slices_file
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.slice_digests import LARGEST, Slices, decode
from holdfast.checkpoint.stores.base import Source
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

_log = logging.getLogger("holdfast.checkpoint.reading")

Check = Callable[[Source], None]
"""Checks an open file, and raises a `CheckpointError` if it is not as expected."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure of one copy of a file. With `lost`, its bytes are missing or corrupt; otherwise they are unreachable.

    `absent`: the file could not be opened at all, which is expected in a store that has only some of the files.
    `span`: the place of the fault, unless a check found it. `settled`: the fault is in verified bytes, so that
    reading again does not change it.
    """

    copy: int
    file: str
    reason: str
    lost: bool
    absent: bool = False
    span: Span | None = None
    settled: bool = False
    error: CheckpointError = field(compare=False, repr=False)


@dataclass
class Copies:
    """The copies of one checkpoint's files, in order of preference. `faults` has the failures."""

    openers: Sequence[Callable[[str], Source]]
    records: Mapping[str, FileRecord]
    faults: list[Fault] = field(default_factory=list)
    given: dict[Span, int] = field(default_factory=dict)
    """The copy that supplied each span."""
    _open: dict[tuple[int, str], Source | Fault] = field(default_factory=dict)
    _ever: list[Source] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slices: dict[str, Slices | None] = field(default_factory=dict)

    def close(self) -> None:
        for source in self._ever:
            source.__exit__()
        self._ever.clear()
        self._open.clear()

    def fetch(
        self,
        file: str,
        act: Check,
        excluded: Collection[int] = (),
        *,
        span: Span | None = None,
        settled: bool = False,
    ) -> int:
        """Run `act` on the first copy of a file that succeeds, except those in `excluded`. Return the number of the
        copy.

        A corrupt read is repeated once, unless it is `settled`, because bits may flip in transit.
        """
        failed: list[Fault] = []
        for copy in (copy for copy in range(len(self.openers)) if copy not in excluded):
            source = self._source(copy, file)
            if not isinstance(source, Fault):
                try:
                    act(source) if settled else _twice(source, act)
                except CheckpointError as error:
                    source = self._note(copy, file, error, span, settled=settled)
                else:
                    return copy
            failed.append(source)
        if len(failed) == 1:
            raise failed[0].error
        reasons = "; ".join(dict.fromkeys(fault.reason for fault in failed)) or f"{file}: no reachable store has it"
        raise CorruptCheckpointError(reasons) if all(fault.lost for fault in failed) else CheckpointError(reasons)

    def require(self, file: str) -> None:
        """Raise `CorruptCheckpointError` unless a copy of this file can be opened and has the manifest's length."""
        self.fetch(file, lambda _: None)

    def slices(self, file: str) -> Slices | None:
        """Return the digests of a file's slices from any copy that has valid ones."""
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
            fault = _fault(copy, file, CorruptCheckpointError(f"{file}: {size} bytes instead of {expected}"))
        self.faults.append(fault)
        return fault

    def _note(self, copy: int, file: str, error: CheckpointError, span: Span | None, *, settled: bool) -> Fault:
        fault = replace(_fault(copy, file, error), span=span, settled=settled)
        with self._lock:
            self.faults.append(fault)
            if not fault.lost:
                # do not try an unreachable copy again, unlike a copy with one corrupt chunk
                self._open[copy, file] = fault
        return fault


def read_slices(opener: Callable[[str], Source], file: str) -> bytes:
    """Return the raw digests of a file's slices; empty if they are missing or unreachable."""
    try:
        with opener(slices_file(file)) as source:
            raw = bytearray(source.nbytes if source.nbytes <= LARGEST else 0)
            source.read_into(0, memoryview(raw))
    except CheckpointError:
        return b""
    return bytes(raw)


def _twice(source: Source, act: Check) -> None:
    """Run `act`. If the data is corrupt, drop this host's cache of the file and run it again."""
    try:
        act(source)
    except CorruptCheckpointError as error:
        forget = getattr(source, "forget", None)
        if forget is not None:
            forget()
        act(source)
        _log.warning("%s; the second read returned correct bytes: the first transfer corrupted them", error)


def _fault(copy: int, file: str, error: CheckpointError, *, absent: bool = False) -> Fault:
    lost = isinstance(error, CorruptCheckpointError)
    return Fault(copy=copy, file=file, reason=str(error), lost=lost, absent=lost and absent, error=error)


@dataclass(frozen=True, kw_only=True, order=True)
class Span:
    """Bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int


def whole_file(file: str, record: FileRecord) -> Span:
    """Return the span of a complete file. An empty file has no bytes to verify, but must exist."""
    return Span(file=file, begin=0, end=record.nbytes)
