"""Detects ranks that wait for each other because their collectives do not match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.launcher.hang.detectors.observation import HangVerdict
from holdfast.launcher.hang.detectors.rank_durations import RankDurations
from holdfast.launcher.hang.detectors.verdicts import verdict, waits
from holdfast.launcher.hang.stall_reports import Stall


def mismatched(ranks: RankDurations) -> tuple[HangVerdict, ...]:
    """Return a verdict on the rank that differs, if it is local. No rank is killed: all can leave the attempt."""
    here = tuple(ranks.stall(rank_here) for rank_here in ranks.seen.ranks_here)
    if not here or not all(wait.waits for wait in here) or ranks.seen.world_size == 1:
        return ()
    everyone = (*here, *_remote_waits(ranks))
    every_rank = set(range(ranks.seen.world_size))
    complete = not ranks.seen.remote.outdated and {wait.rank for wait in everyone} == every_rank
    waiting = everyone if complete else here
    limit = max(wait.deadline for wait in everyone) if complete else ranks.settings.longest
    seconds, minority = min(wait.seconds for wait in waiting), _minority(waiting)
    slot = next((rank_here.slot for rank_here in ranks.seen.ranks_here if rank_here.rank == minority.rank), None)
    mismatch = frozenset((wait.attempt_id, wait.rank, wait.activity, wait.step) for wait in waiting)
    if slot is None or seconds <= limit or mismatch == ranks.mismatch:
        return ()
    others = [(wait.rank, wait.activity) for wait in waiting if wait is not minority]
    text = f"{waits(others, known=complete)}: each waits for the other"
    place = (minority.rank, minority.activity, minority.step)
    return (
        replace(verdict(ranks, place, (seconds, limit), "has waited", text, slot=slot), kills=False, waits=mismatch),
    )


def _remote_waits(ranks: RankDurations) -> tuple[Stall, ...]:
    waits = [stall for stall in ranks.seen.remote.stalls if stall.waits]
    return tuple(replace(stall, seconds=ranks.reported_seconds(stall)) for stall in waits)


def _minority(waits: Sequence[Stall]) -> Stall:
    """Return the rank at the place with the fewest ranks; of several, the highest rank."""
    places = [(wait.activity, wait.step) for wait in waits]
    return min(waits, key=lambda wait: (places.count((wait.activity, wait.step)), -wait.rank))
