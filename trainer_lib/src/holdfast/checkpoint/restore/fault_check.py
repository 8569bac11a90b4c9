"""Decide whether a rank found corrupt data, or whether its machine reads incorrectly. Pure.

Invariant: one rank's report does not make shared data corrupt if another rank can check it. Otherwise, memory, a
network or a page cache that flips bits would quarantine one valid checkpoint after the other. A matching digest is
proof: one rank that reads a part correctly is enough to clear it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.json_fields import JsonFields

Part = tuple[str, str, int, int]
"""A store's URL, a file of the checkpoint, and the range of the bytes. The range 0, 0 is the length and header."""


@dataclass(frozen=True, kw_only=True)
class Fault(JsonFields):
    """A fault that a rank found in a copy.

    With `own`, this rank's report is enough: no other rank can read the copy, or reading again changes nothing.
    """

    url: str
    reason: str
    file: str = ""
    begin: int = 0
    end: int = 0
    own: bool = False

    @property
    def part(self) -> Part:
        return self.url, self.file, self.begin, self.end


@dataclass(frozen=True, kw_only=True)
class Outcome(JsonFields):
    """The result of one rank's read. `damage` and `error` explain why the rank lacks something."""

    host: str
    used: tuple[str, ...]
    faults: tuple[Fault, ...]
    damage: str = ""
    error: str = ""

    def without(self, cleared: Collection[Part]) -> Outcome:
        """Return the outcome without the faults that were cleared."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.part not in cleared))


def questions_of(outcomes: Sequence[Outcome]) -> dict[Part, int]:
    """Return the parts to check again, with the rank that checks each.

    It is a rank that did not find the part corrupt, on another host if there is one.
    """
    found: dict[Part, set[int]] = {}
    for rank, outcome in enumerate(outcomes):
        for fault in outcome.faults:
            if not fault.own:
                found.setdefault(fault.part, set()).add(rank)
    return {part: witness for part, finders in found.items() for witness in _others(outcomes, finders)}


def _others(outcomes: Sequence[Outcome], finders: Collection[int]) -> Iterator[int]:
    """Yield at most one rank."""
    hosts = {outcomes[rank].host for rank in finders}
    others = [rank for rank in range(len(outcomes)) if rank not in finders]
    yield from sorted(others, key=lambda rank: outcomes[rank].host in hosts)[:1]


def suspects(outcomes: Sequence[Outcome], cleared: Mapping[Part, int]) -> list[str]:
    """Describe the ranks that lack something: what each could not read, and which rank can."""
    return [
        f"rank {rank} on {outcome.host} cannot read it in {fault.url} ({fault.reason}), "
        f"and rank {cleared[fault.part]} on {outcomes[cleared[fault.part]].host} can"
        for rank, outcome in enumerate(outcomes)
        for fault in [fault for fault in outcome.faults if outcome.damage and fault.part in cleared][:1]
    ]
