"""Proof that no sample was skipped or used twice: a sum of hashes that does not depend on the order. Pure.

Each completed step adds the hashes of the samples that its ranks read. The expected sum at a cursor depends only on
the dataset's size and the seed, so it can be checked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.hashing import MASK64, mix_all


@dataclass(frozen=True)
class Audit:
    """The number of samples, and the sum of their hashes modulo 2^64."""

    hash: int = 0
    count: int = 0

    def __add__(self, other: Audit) -> Audit:
        return Audit((self.hash + other.hash) & MASK64, self.count + other.count)

    def seen(self, epoch: int, sample: int) -> Audit:
        """Return the audit with one more sample."""
        return Audit((self.hash + mix_all(epoch, sample)) & MASK64, self.count + 1)

    def to_json(self) -> dict[str, Any]:
        return {"hash": f"{self.hash:016x}", "count": self.count}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Audit:
        return cls(int(value["hash"], 16), int(value["count"]))


def expected_audit(*, size: int, seed: int, cursor: int) -> Audit:
    """Return the audit if every place below `cursor` was seen exactly once.

    Complete epochs are summed in plain order, because a permutation does not change a sum.
    """
    from holdfast.training.data.cursor import sample_at

    epochs, rest = divmod(cursor, size)
    audit = Audit()
    for epoch in range(epochs):
        for sample in range(size):
            audit = audit.seen(epoch, sample)
    for place in range(cursor - rest, cursor):
        audit = audit.seen(*sample_at(place, size=size, seed=seed))
    return audit
