"""The queue of gangs that wait for capacity, and the capacity that earlier gangs leave to a gang. Pure.

The queue is computed once for several passes (``lines``), because with a thousand gangs each pass would otherwise
compare all older ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from holdfast_operator.scheduling.capacity import FreeCapacity
from holdfast_operator.scheduling.fit import place_rival
from holdfast_operator.scheduling.waiting_gang import GangPriority, WaitingGang
from holdfast_operator.views import NodeUsage, NodeView, PodView


@dataclass(frozen=True, kw_only=True)
class GangQueueInput:
    """The input of a queue."""

    nodes: tuple[NodeView, ...] = ()
    usage: tuple[NodeUsage, ...] = ()
    rivals: tuple[WaitingGang, ...] = ()
    jobs: frozenset[str] = frozenset()  # all jobs, waiting or not, except those that wait unobserved


class GangQueue:
    """The waiting gangs: first those with lifted gates, then by priority, then by age."""

    def __init__(self, known: GangQueueInput, now: datetime) -> None:
        self.rivals = known.rivals
        self._later = [rival for rival in known.rivals if _tries_later(rival, now)]
        in_turn = sorted((rival for rival in known.rivals if not _tries_later(rival, now)), key=_turn)
        self._turns = [_turn(rival) for rival in in_turn]
        self._usage = known.usage
        self._lower: dict[int, tuple[NodeUsage, ...]] = {}
        self._left = [(FreeCapacity(known.nodes, known.usage, now), 0)]
        self._empty = FreeCapacity(known.nodes, (), now)
        self._could_begin: dict[str, bool] = {}
        for rival in in_turn:
            self._left.append(self._after(rival, *self._left[-1]))

    def outlived(self, now: datetime) -> bool:
        """Return whether the back-off of a gang has ended since the queue was computed."""
        return not all(_tries_later(rival, now) for rival in self._later)

    def could_begin(self, rival: WaitingGang) -> bool:
        """Return whether an empty cluster could hold the minimum with which the gang may start."""
        if rival.key not in self._could_begin:
            least = rival.least or rival.pods
            asked = replace(rival, pods=least, on_demand=min(rival.on_demand, least))
            self._could_begin[rival.key] = place_rival(self._empty.copy(), asked) == least
        return self._could_begin[rival.key]

    def before(self, standing: GangPriority, created: datetime, key: str) -> tuple[Iterator[FreeCapacity], int]:
        """Return the capacities that earlier gangs leave to a gated gang, and the number of their pods.

        The first entry is the free capacity. For a gang that may displace pods of lower priority, the second is the
        capacity without these pods.
        """
        room, others = self._left[bisect_left(self._turns, (True, -standing.priority, created, key))]
        return self._rooms(room, standing), others

    def _rooms(self, room: FreeCapacity, standing: GangPriority) -> Iterator[FreeCapacity]:
        yield room.copy()
        lower = self._displaced_by(standing)
        if lower:
            yield room.without(lower)

    def _displaced_by(self, standing: GangPriority) -> tuple[NodeUsage, ...]:
        if not standing.preempts:
            return ()
        if standing.priority not in self._lower:
            lower = tuple(usage for usage in self._usage if usage.priority < standing.priority)
            self._lower[standing.priority] = lower
        return self._lower[standing.priority]

    def _after(self, rival: WaitingGang, room: FreeCapacity, others: int) -> tuple[FreeCapacity, int]:
        """Return the capacity after this gang has its place.

        A gang that not even an empty cluster could hold takes none.
        """
        left, found = _placed(rival, room, self._displaced_by(rival.standing))
        if not found:
            return room, others
        if found < rival.pods and not rival.lifted and place_rival(self._empty.copy(), rival) < rival.pods:
            return room, others
        return left, others + found


def waiting(line: GangQueue, but: str) -> Iterable[WaitingGang]:
    """Return the gated gangs of other jobs."""
    return (rival for rival in line.rivals if not rival.lifted and rival.key != but)


def standing_of(pods: Iterable[PodView]) -> GangPriority | None:
    """Return the lowest priority of these pods; None without pods."""
    found = tuple(pods)
    if not found:
        return None
    return GangPriority(
        priority=min(pod.priority for pod in found),
        preempts=all(pod.preempts for pod in found),
    )


def _tries_later(rival: WaitingGang, now: datetime) -> bool:
    return not rival.lifted and rival.retry_at is not None and now < rival.retry_at


def _turn(rival: WaitingGang) -> tuple[bool, int, datetime, str]:
    return not rival.lifted, -rival.standing.priority, rival.created, rival.key


def _placed(rival: WaitingGang, room: FreeCapacity, lower: tuple[NodeUsage, ...]) -> tuple[FreeCapacity, int]:
    """Place the gang, if necessary instead of pods of lower priority.

    Return the capacity and the number of placed pods. The displaced pods still count: for gangs that may not displace
    them, their capacity is taken twice.
    """
    left = room.copy()
    found = place_rival(left, rival)
    if found == rival.pods or not lower:
        return left, found
    freed = room.without(lower)
    trial = freed.copy()
    more = place_rival(trial, rival)
    if more <= found:
        return left, found
    left = room.copy()
    left.put(trial.beyond(freed))
    return left, more
