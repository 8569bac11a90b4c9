"""The position of a job in the data, and the samples of each rank in a step. Pure.

The position is the number of samples that completed steps have consumed, and the ranges of samples that no step uses.
The same samples therefore follow at every world size, even if it changes between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.hashing import mix_all
from holdfast.training.data.permutation import Permutation
from holdfast.training.data.sample_audit import Audit
from holdfast.training.data.sample_range import SampleRange, place_of, ranges_of


@dataclass(frozen=True, kw_only=True)
class Position:
    """The data state in a checkpoint: the dataset's fingerprint, the seed, the cursor and the audit.

    `skipped` has the samples that a roll-back excluded, in order. The cursor does not count them.
    """

    fingerprint: str
    seed: int
    cursor: int = 0
    audit: Audit = Audit()  # noqa: RUF009  (frozen)
    skipped: tuple[SampleRange, ...] = ()

    def place(self, number: int) -> int:
        """Return the place of a sample in the endless order."""
        return place_of(number, self.skipped)

    def ranges(self, samples: int) -> tuple[SampleRange, ...]:
        """Return the places of the next samples."""
        return ranges_of(self.cursor, self.cursor + samples, self.skipped)

    def advanced(self, samples: int, seen: Audit) -> Position:
        """Return the position after a completed step."""
        return replace(self, cursor=self.cursor + samples, audit=self.audit + seen)

    def to_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "cursor": self.cursor,
            "audit": self.audit.to_json(),
            "skipped": [one.to_json() for one in self.skipped],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        return cls(
            fingerprint=str(value["fingerprint"]),
            seed=int(value["seed"]),
            cursor=int(value["cursor"]),
            audit=Audit.from_json(value["audit"]),
            skipped=tuple(map(SampleRange.from_json, value.get("skipped", ()))),
        )

    def resumed(self, saved: Position) -> Position:
        """Return the saved position. Raise `DataError` for other data or another order."""
        if saved.fingerprint != self.fingerprint:
            raise DataError(
                f"the checkpoint is of dataset {saved.fingerprint}, but the script passes {self.fingerprint}: "
                "pass the same dataset, or start in an empty checkpoint folder"
            )
        if saved.seed != self.seed:
            raise DataError(
                f"the checkpoint's order of samples has seed {saved.seed}, but the script passes {self.seed}: "
                "pass the same seed, or start in an empty checkpoint folder"
            )
        return saved


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's part of a global batch: the samples with the numbers [begin, end)."""

    begin: int
    end: int


def share_of(*, cursor: int, batch: int, rank: int, world_size: int) -> BatchShare:
    """Split a global batch as evenly as possible, without gap or overlap.

    Lower ranks get the remainder: rank 0, whose running statistics count, always has a sample.
    """
    return BatchShare(
        begin=cursor - (-batch * rank // world_size),
        end=cursor - (-batch * (rank + 1) // world_size),
    )


def micro_batches(share: BatchShare, size: int) -> Iterator[BatchShare]:
    """Split a share into micro-batches. The last one may be smaller."""
    for begin in range(share.begin, share.end, size):
        yield BatchShare(begin=begin, end=min(begin + size, share.end))


def sample_at(place: int, *, size: int, seed: int) -> tuple[int, int]:
    """Return (epoch, sample) at a place of the endless order. Each epoch has its own order."""
    epoch, within = divmod(place, size)
    return epoch, _order(size, seed, epoch)(within)


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, key=mix_all(seed, epoch))
