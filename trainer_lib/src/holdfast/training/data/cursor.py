"""Where in the data a job is, and who takes which samples of a step. Pure.

The position is the number of samples that committed steps have consumed, and nothing else: the same samples follow
at every world size, also when it changes between two steps.
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


@dataclass(frozen=True, kw_only=True)
class Position:
    """What a commit keeps of the data: the dataset's fingerprint, the seed, the cursor, and the audit so far."""

    fingerprint: str
    seed: int
    cursor: int = 0
    audit: Audit = Audit()  # noqa: RUF009  (frozen)

    def advanced(self, samples: int, seen: Audit) -> Position:
        """Return the position after a completed step."""
        return replace(self, cursor=self.cursor + samples, audit=self.audit + seen)

    def to_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "cursor": self.cursor,
            "audit": self.audit.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        return cls(
            fingerprint=str(value["fingerprint"]),
            seed=int(value["seed"]),
            cursor=int(value["cursor"]),
            audit=Audit.from_json(value["audit"]),
        )

    def resumed(self, saved: Position) -> Position:
        """The saved position, if it is one in the same data in the same order."""
        if saved.fingerprint != self.fingerprint:
            raise DataError(
                f"the checkpoint stands in dataset {saved.fingerprint}, and the script gives {self.fingerprint}: "
                "give the same dataset, or start in an empty checkpoint folder"
            )
        if saved.seed != self.seed:
            raise DataError(
                f"the checkpoint's order of samples has seed {saved.seed}, and the script gives {self.seed}: "
                "give the same seed, or start in an empty checkpoint folder"
            )
        return saved


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """One rank's part of a global batch: places [begin, end) in the endless order of samples."""

    begin: int
    end: int


def share_of(*, cursor: int, batch: int, rank: int, world_size: int) -> BatchShare:
    """Split a global batch as evenly as can be; the parts join without gap or overlap.

    What cannot be shared evenly goes to lower ranks: rank 0, whose running statistics count, always has a sample.
    """
    return BatchShare(
        begin=cursor - (-batch * rank // world_size),
        end=cursor - (-batch * (rank + 1) // world_size),
    )


def micro_batches(share: BatchShare, size: int) -> Iterator[BatchShare]:
    """Cut a share into micro-batches; the last may be smaller."""
    for begin in range(share.begin, share.end, size):
        yield BatchShare(begin=begin, end=min(begin + size, share.end))


def sample_at(place: int, *, size: int, seed: int) -> tuple[int, int]:
    """(epoch, sample) at a place of the endless order; each epoch has an order of its own."""
    epoch, within = divmod(place, size)
    return epoch, _order(size, seed, epoch)(within)


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, key=mix_all(seed, epoch))
