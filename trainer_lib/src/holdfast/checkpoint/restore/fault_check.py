"""Whether what a rank found bad is bad, or the rank's machine reads badly. Pure.

Invariant: nothing that all share is held for bad on the word of one rank, where another can look: memory, a network
or a page cache that flips bits would else have one good commit after the other moved aside. A digest that fits is
proof, so one rank that reads a part well is enough to clear it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.json_fields import JsonFields

Part = tuple[str, str, int, int]
"""A store's URL, a file of the commit at hand, and where the bytes begin and end; 0 and 0: its length and header."""


@dataclass(frozen=True, kw_only=True)
class Fault(JsonFields):
    """What a rank found wrong with a copy. `own`: its word is enough, as nobody else sees the copy, or as looking
    again changes nothing."""

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
    """What came of one rank's reading; `damage` and `error` are why it has not got everything."""

    host: str
    used: tuple[str, ...]
    faults: tuple[Fault, ...]
    damage: str = ""
    error: str = ""

    def without(self, cleared: Collection[Part]) -> Outcome:
        """But for the faults that are none."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.part not in cleared))


def asked(outcomes: Sequence[Outcome]) -> dict[Part, int]:
    """What is looked at once more, and by whom: a rank that has not found it bad, on another host if there is one."""
    found: dict[Part, set[int]] = {}
    for rank, outcome in enumerate(outcomes):
        for fault in outcome.faults:
            if not fault.own:
                found.setdefault(fault.part, set()).add(rank)
    return {part: witness for part, finders in found.items() for witness in _others(outcomes, finders)}


def _others(outcomes: Sequence[Outcome], finders: Collection[int]) -> Iterator[int]:
    """At most one."""
    hosts = {outcomes[rank].host for rank in finders}
    others = [rank for rank in range(len(outcomes)) if rank not in finders]
    yield from sorted(others, key=lambda rank: outcomes[rank].host in hosts)[:1]


def suspects(outcomes: Sequence[Outcome], cleared: Mapping[Part, int]) -> list[str]:
    """Of the ranks that lack something: what each could not read, and who can."""
    return [
        f"rank {rank} on {outcome.host} cannot read it in {fault.url} ({fault.reason}), "
        f"and rank {cleared[fault.part]} on {outcomes[cleared[fault.part]].host} can"
        for rank, outcome in enumerate(outcomes)
        for fault in [fault for fault in outcome.faults if outcome.damage and fault.part in cleared][:1]
    ]
