"""Which gangs wait for room, in which order they get it, and what those before a gang leave of it.

Pure. It is worked out once for the passes of a moment (``lines``), not by each pass: of a thousand gangs that wait
each would weigh all that are older.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from holdfast_operator.capacity import Room
from holdfast_operator.fitting import place_rival
from holdfast_operator.seen import NodeView, Rival, Usage


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a line is made of."""

    nodes: tuple[NodeView, ...] = ()
    usage: tuple[Usage, ...] = ()
    rivals: tuple[Rival, ...] = ()
    jobs: frozenset[str] = frozenset()  # all that there are, whether they wait or not


class Line:
    """The gangs that wait: those whose gates are lifted first, then by age."""

    def __init__(self, known: Known, now: datetime) -> None:
        self.rivals = known.rivals
        self._later = [rival for rival in known.rivals if _tries_later(rival, now)]
        in_turn = sorted((rival for rival in known.rivals if not _tries_later(rival, now)), key=_turn)
        self._turns = [_turn(rival) for rival in in_turn]
        self._left = [(Room(known.nodes, known.usage, now), 0)]
        empty = Room(known.nodes, (), now)
        for rival in in_turn:
            self._left.append(_after(rival, *self._left[-1], empty))

    def outlived(self, now: datetime) -> bool:
        """Whether a gang that was to try again later may by now."""
        return not all(_tries_later(rival, now) for rival in self._later)

    def before(self, created: datetime, key: str) -> tuple[Room, int]:
        """What those who go first leave to a gang whose gates are not lifted, and how many pods they are."""
        room, others = self._left[bisect_left(self._turns, (True, created, key))]
        return room.copy(), others


def waiting(line: Line | None, but: str) -> Iterable[Rival]:
    """The gangs of other jobs whose gates are not lifted."""
    return (rival for rival in (line.rivals if line else ()) if not rival.lifted and rival.key != but)


def _tries_later(rival: Rival, now: datetime) -> bool:
    return not rival.lifted and rival.retry_at is not None and now < rival.retry_at


def _turn(rival: Rival) -> tuple[bool, datetime, str]:
    return not rival.lifted, rival.created, rival.key


def _after(rival: Rival, room: Room, others: int, empty: Room) -> tuple[Room, int]:
    """What is left when this one has its place. A gang that not even an empty cluster could hold blocks nobody."""
    left = room.copy()
    found = place_rival(left, rival)
    if not found:
        return room, others
    if found < rival.pods and not rival.lifted and place_rival(empty.copy(), rival) < rival.pods:
        return room, others
    return left, others + found
