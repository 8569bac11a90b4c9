"""The copies of one checkpoint's files: each file from the first copy that is good. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.format.file_names import slices_file
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.slice_digests import LARGEST, Slices, decode
from holdfast.checkpoint.stores.base import Source
from holdfast.core.errors import CheckpointError, DamagedError

_log = logging.getLogger("holdfast.checkpoint.reading")

Look = Callable[[Source], None]
"""At an open file: a CheckpointError if it is not as it should be."""


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
    error: CheckpointError = field(compare=False, repr=False)


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
        for source in self._ever:
            source.__exit__()
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
        if len(failed) == 1:
            raise failed[0].error
        reasons = "; ".join(dict.fromkeys(fault.reason for fault in failed)) or f"{file}: no store in reach has it"
        raise DamagedError(reasons) if all(fault.lost for fault in failed) else CheckpointError(reasons)

    def require(self, file: str) -> None:
        """DamagedError unless a copy of this file can be opened and is as long as the manifest says."""
        self.fetch(file, lambda _: None)

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
    return Fault(copy=copy, file=file, reason=str(error), lost=lost, absent=lost and absent, error=error)


@dataclass(frozen=True, kw_only=True, order=True)
class Span:
    """Bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int


def whole_file(file: str, record: FileRecord) -> Span:
    """All of it. An empty one has no bytes to verify, but must be there all the same."""
    return Span(file=file, begin=0, end=record.nbytes)
