"""The samples that a run could not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.core.json_fields import JsonFields

_MAX_ERROR: Final = 200
"""The characters of an error that a checkpoint keeps."""


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A sample that was skipped: its index in the dataset, and its error as text."""

    sample: int
    error: str


@dataclass(frozen=True, kw_only=True)
class BadSample(JsonFields):
    """A skipped sample: its index in the dataset, the rank and step that first skipped it, and its error."""

    sample: int
    rank: int
    step: int
    error: str

    def __str__(self) -> str:
        return f"sample {self.sample} (rank {self.rank}, step {self.step}: {self.error})"


@dataclass(frozen=True, kw_only=True)
class BadSamples(JsonFields):
    """The skipped samples of a run. Every rank has the same record, and each checkpoint holds it.

    `samples` has each sample once, in the order of steps. `skipped` counts a sample again in each epoch.
    """

    samples: tuple[BadSample, ...] = ()
    skipped: int = 0

    def with_skipped(self, found: Sequence[BadSample]) -> BadSamples:
        """Return the record after a step that skipped these samples."""
        if not found:
            return self
        every = {one.sample: one for one in self.samples}
        for one in found:
            every.setdefault(one.sample, one)
        return replace(self, samples=tuple(every.values()), skipped=self.skipped + len(found))


def gather_bad_samples(exchange: Exchange, own: Sequence[Unreadable], step: int) -> tuple[BadSample, ...]:
    """Return the samples that any rank could not read in a step. All ranks call it."""
    found = [BadSample(sample=one.sample, rank=exchange.rank, step=step, error=one.error) for one in own]
    told = exchange.gather([one.to_json() for one in found])
    return tuple(BadSample.from_json(one) for part in told for one in part)


def error_text(error: BaseException) -> str:
    """Return type and text of an exception in one line.

    A `DataLoader` raises the exception of a worker process with that worker's traceback as its text. The last line of
    this text is the exception itself.
    """
    text = str(error).strip()
    if "Original Traceback" in text:
        return text.splitlines()[-1].strip()[:_MAX_ERROR]
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}"[:_MAX_ERROR] if first else type(error).__name__
