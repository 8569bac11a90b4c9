"""Proof that no sample was left out or used twice: a sum of hashes that does not depend on the order. Pure.

Each completed step adds the hashes of the samples that its ranks read. The expected sum at a cursor depends only on
the dataset's size and the seed, so it can be checked afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.hashing import MASK64, mix_all
from holdfast.training.data.sample_range import SampleRange, place_of


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

    def without(self, epoch: int, sample: int) -> Audit:
        """Return the audit with one sample less."""
        return Audit((self.hash - mix_all(epoch, sample)) & MASK64, self.count - 1)

    def to_json(self) -> dict[str, Any]:
        return {"hash": f"{self.hash:016x}", "count": self.count}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Audit:
        return cls(int(value["hash"], 16), int(value["count"]))


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of an audit: whether every sample up to the cursor was consumed exactly once."""

    ok: bool
    seen: Audit
    expected: Audit
    skipped: int = 0
    """The number of samples that roll-backs excluded. They are not among the others."""

    unreadable: int = 0
    """How often a sample could not be read and was skipped. These count as consumed."""

    def __str__(self) -> str:
        told = f"{self.seen.count} samples, hash {self.seen.hash:016x}"
        told += f", {self.skipped} skipped" if self.skipped else ""
        told += f", {self.unreadable} unreadable" if self.unreadable else ""
        if self.ok:
            return f"exactly once ({told})"
        return f"WRONG: {told}, but expected {self.expected.count} samples, hash {self.expected.hash:016x}"


def expected_audit(*, size: int, seed: int, cursor: int, skipped: Sequence[SampleRange] = ()) -> Audit:
    """Return the audit if every sample below `cursor` was seen exactly once, and no skipped one.

    Complete epochs are summed in plain order, because a permutation does not change a sum.
    """
    from holdfast.training.data.cursor import sample_at

    end = place_of(cursor, skipped)
    epochs, rest = divmod(end, size)
    audit = Audit()
    for epoch in range(epochs):
        for sample in range(size):
            audit = audit.seen(epoch, sample)
    for place in range(end - rest, end):
        audit = audit.seen(*sample_at(place, size=size, seed=seed))
    for one in skipped:
        for place in range(one.begin, min(one.end, end)):
            audit = audit.without(*sample_at(place, size=size, seed=seed))
    return audit
