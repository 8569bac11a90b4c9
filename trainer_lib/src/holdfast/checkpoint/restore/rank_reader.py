"""One rank's read of one checkpoint, from the stores that have it. No torch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from holdfast.checkpoint.format.file_names import CheckpointName, rank_file
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.safetensors_header import check_json, check_source
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.restore import lossy_delta
from holdfast.checkpoint.restore.chunk_reader import READERS, available_without, read_into, read_small
from holdfast.checkpoint.restore.copies import Copies, Span, whole_file
from holdfast.checkpoint.restore.copies import Fault as CopyFault
from holdfast.checkpoint.restore.fault_check import Fault, Outcome, Part
from holdfast.checkpoint.restore.memory_layout import Rows, lay_out, needed
from holdfast.checkpoint.stores.base import CheckpointStore, open_file
from holdfast.core.errors import CheckpointError, CorruptCheckpointError
from holdfast.core.interpreter import uncollected

_log = logging.getLogger("holdfast.checkpoint.reader")

Select = Callable[[Manifest], Rows]
"""Returns the rows that this rank requests, for the tensors that it does not read completely."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint in memory, with every byte verified. `per_rank` is this rank's per-rank state, if it had any.

    For the tensors that `Select` named, only the requested rows are present.
    """

    name: CheckpointName
    manifest: Manifest
    tensors: Mapping[str, memoryview]
    per_rank: Any


class RankReader:
    """One rank's read of one checkpoint. Its files stay open until the context ends."""

    def __init__(
        self, name: CheckpointName, manifest: Manifest, stores: Sequence[CheckpointStore], exchange: Exchange
    ) -> None:
        self._name = name
        self._manifest = manifest
        self._stores = stores
        self._exchange = exchange
        self._copies = Copies(openers=[partial(open_file, store, name) for store in stores], records=manifest.files)
        self._damage = self._error = ""
        self.loaded: Loaded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def read(self, select: Select | None) -> None:
        try:
            self.loaded = self._read({} if select is None else select(self._manifest))
        except CorruptCheckpointError as lost:
            self._damage = str(lost)
        except CheckpointError as unavailable:
            self._error = str(unavailable)
        unreachable = {fault.copy: fault.reason for fault in self._copies.faults if not fault.lost}
        for copy, reason in unreachable.items():
            _log.warning("%s was skipped: %s", self._stores[copy].url, reason)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The first fault of each file of each copy. A file that a node-local store never had does not count."""
        first: dict[tuple[str, str], Fault] = {}
        for fault in self._copies.faults:
            store = self._stores[fault.copy]
            if fault.lost and (store.shared or not fault.absent):
                first.setdefault((store.url, fault.file), _to_fault(fault, store))
        return tuple(first.values())

    def outcome(self, host: str) -> Outcome:
        used = tuple(self._stores[place].url for place in sorted(set(self._copies.given.values())))
        return Outcome(host=host, used=used, faults=self.faults, damage=self._damage, error=self._error)

    def can_read(self, part: Part) -> bool:
        """Return whether this rank can read a part that another rank found corrupt.

        An error that does not concern the bytes is raised.
        """
        url, file, begin, end = part
        opener = next(partial(open_file, store, self._name) for store in self._stores if store.url == url)
        with closing(Copies(openers=[opener], records=self._manifest.files)) as copies:
            try:
                copies.fetch(file, partial(check_source, file=file, manifest=self._manifest))
                read_into(copies, {}, also=[Span(file=file, begin=begin, end=end)] if end else ())
            except CorruptCheckpointError:
                return False
        return True

    def available_without(self, urls: Collection[str]) -> bool:
        """Return whether everything that this rank needs is available without these stores."""
        return available_without(
            self._copies, {place for place, store in enumerate(self._stores) if store.url in urls}
        )

    def _read(self, rows: Rows) -> Loaded:
        manifest, copies, exchange = self._manifest, self._copies, self._exchange
        own = rank_file(exchange.rank)
        small = [file for file in sorted(manifest.files) if not file.endswith(".safetensors")]
        # Each rank reads its own per-rank file. Together, the ranks verify all of them.
        own_small = [
            file for index, file in enumerate(small) if file == own or index % exchange.size == exchange.rank
        ]
        verified = self._verified_spans(rows)
        checks = {
            file: partial(check_source, file=file, manifest=manifest)
            for file in sorted({*own_small, *needed(manifest, rows), *(span.file for span in verified)})
        }
        for file in checks:
            copies.require(file)  # before memory is allocated for what they claim to hold
        read = {file: read_small(copies, file) for file in own_small}
        with uncollected():
            layout, patches = lay_out(manifest, rows), lossy_delta.patch_reads(manifest, rows)
        readers = max((getattr(store, "readers", 0) or READERS for store in self._stores), default=READERS)
        extents = lossy_delta.extents((one for _, one in patches), layout.extents)
        read_into(copies, extents, also=verified, checks=checks, threads=readers, fresh=True)
        for name, patch in patches:
            self._apply(patch, layout.tensors[name], rows.get(name))
        if own in read:
            copies.fetch(own, lambda _: check_json(own, read[own]), settled=True)
        per_rank = json.loads(read[own]) if own in read else None
        return Loaded(name=self._name, manifest=manifest, tensors=layout.tensors, per_rank=per_rank)

    def _apply(self, patch: lossy_delta.PatchRead, target: memoryview, rows: tuple[int, int] | None) -> None:
        """Apply a patch. An invalid patch is a fault of each copy that has it."""
        first = 0 if rows is None else rows[0] * math.prod(patch.record.shape[1:])
        self._copies.fetch(patch.patch.file, lambda _: lossy_delta.apply(patch, target, first), settled=True)

    def _verified_spans(self, rows: Rows) -> list[Span]:
        """Return what is verified in addition to the requested data, so that the ranks together verify everything.

        A rank that requests everything verifies everything. If only rows are requested, the ranks divide the headers.
        """
        files = [file for file in sorted(self._manifest.own) if file.endswith(".safetensors")]
        if not rows:
            return [whole_file(file, self._manifest.files[file]) for file in files]
        rank, size = self._exchange.rank, self._exchange.size
        own = [file for index, file in enumerate(files) if index % size == rank]
        return [Span(file=file, begin=0, end=self._data_begin(file)) for file in own]

    def _data_begin(self, file: str) -> int:
        spans = (span for one in self._manifest.tensors.values() for span in one.spans)
        offsets = [offset for own, offset, _ in spans if own == file]
        return min(offsets, default=self._manifest.files[file].nbytes)


def _to_fault(fault: CopyFault, store: CheckpointStore) -> Fault:
    begin, end = (0, 0) if fault.span is None else (fault.span.begin, fault.span.end)
    own = fault.settled or not store.shared
    return Fault(url=store.url, reason=fault.reason, file=fault.file, begin=begin, end=end, own=own)
