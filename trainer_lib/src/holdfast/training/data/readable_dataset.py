"""A dataset for a loader of the script, which replaces samples that cannot be read.

A loader may read in worker processes, so bad samples are reported through a file in memory. A pipe could fill up, and
block a worker process.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from operator import getitem
from pathlib import Path
from typing import IO, Any

from holdfast.training.data.bad_samples import Unreadable
from holdfast.training.data.loader import MapDataset
from holdfast.training.data.sample_reader import SampleReader


class ReadableDataset:
    """A map-style dataset in which the next sample that can be read takes the place of one that cannot."""

    def __init__(self, size: int, reader: SampleReader, reports: Path) -> None:
        self._size = size
        self._reader = reader
        self._reports = reports

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        found = self._reader.read([index])
        if found.samples:
            return found.data
        value = self._reader.any_of(((index + more) % self._size for more in range(1, self._size)), found.error)
        self._report(found.unreadable[0])
        return value

    def _report(self, sample: Unreadable) -> None:
        """Append a line, in one write, because several processes append."""
        file = os.open(self._reports, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.write(file, json.dumps(asdict(sample)).encode() + b"\n")
        os.close(file)


class Reports:
    """The reports of the datasets of this process."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._unfinished = b""
        self.pending: tuple[Unreadable, ...] = ()
        """The reports that belong to no completed step yet."""

    def path(self) -> Path:
        """Return the file for the reports, which worker processes can open. The kernel frees it with this process."""
        if self._file is None:
            self._file = os.fdopen(os.memfd_create("holdfast-samples"), "rb")
        return Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def fresh(self) -> tuple[Unreadable, ...]:
        """Return the reports since the last call, and add them to the pending ones."""
        data = self._unfinished + (b"" if self._file is None else self._file.read())
        *lines, self._unfinished = data.split(b"\n")  # a worker process may be in the middle of a line
        found = tuple(Unreadable(**json.loads(line)) for line in lines)
        self.pending += found
        return found


def readable(dataset: MapDataset, retries: int, tolerant: bool, reports: Path) -> ReadableDataset:
    """Return the dataset with retries and replacements."""
    reader = SampleReader(get=partial(getitem, dataset), collate=_first, retries=retries, tolerant=tolerant)
    return ReadableDataset(len(dataset), reader, reports)


def _first(values: list[Any]) -> Any:
    """Return the only value, instead of a batch."""
    return values[0]
