"""Detects ranks that left their attempt and do not come to the next one."""

from __future__ import annotations

from holdfast.launcher.hang.detectors.observation import AbsentRank, HangVerdict
from holdfast.launcher.hang.detectors.rank_durations import RankDurations
from holdfast.launcher.hang.detectors.verdicts import blame
from holdfast.telemetry.activity import Activity


def absent_ranks(ranks: RankDurations) -> tuple[HangVerdict, ...]:
    """Return verdicts on the local ranks that left an attempt and are late for the next one."""
    spent = [
        (absent_rank, *_spent(ranks, absent_rank)) for absent_rank in ranks.seen.absent if _must_come(absent_rank)
    ]
    overdue_ranks = [
        (absent_rank, seconds, limit)
        for absent_rank, seconds, limit in spent
        if seconds > limit and not _may_wait(ranks, absent_rank)
    ]
    if not _state_is_kept(ranks, {absent_rank.slot for absent_rank, _, _ in overdue_ranks}):
        # The remote ranks that left are unknown: they may be late as well.
        with_long_limit = [
            (absent_rank, took, ranks.with_long_limit(limit)) for absent_rank, took, limit in overdue_ranks
        ]
        overdue_ranks = [
            (absent_rank, seconds, limit) for absent_rank, seconds, limit in with_long_limit if seconds > limit
        ]
    return tuple(_verdict(ranks, absent_rank, (seconds, limit)) for absent_rank, seconds, limit in overdue_ranks)


def _must_come(absent_rank: AbsentRank) -> bool:
    activity = absent_rank.reading.activity
    return activity is not Activity.DONE and (activity is not Activity.PARKED or absent_rank.awaited)


def _may_wait(ranks: RankDurations, absent_rank: AbsentRank) -> bool:
    return not ranks.silent(absent_rank.rank_here) and ranks.awaits_busy(absent_rank.rank_here)


def _spent(ranks: RankDurations, absent_rank: AbsentRank) -> tuple[float, float]:
    """Return for how long the rank has kept others waiting, and its deadline, in seconds."""
    rank_here, reading, by_beat = absent_rank.rank_here, absent_rank.reading, _by_beat(ranks, absent_rank)
    forms = reading.activity is Activity.SYNC
    limit = ranks.settings.startup if forms and not by_beat else ranks.limit(rank_here)
    return ranks.awake(reading, max(absent_rank.left_at, reading.beat if by_beat else ranks.began(reading))), limit


def _state_is_kept(ranks: RankDurations, overdue_ranks: set[int]) -> bool:
    """Whether a local rank that has made steps and is not late waits for the others, with its state."""
    here = (*ranks.seen.ranks_here, *(absent_rank.rank_here for absent_rank in ranks.seen.absent))
    waiting = [
        rank_here for rank_here in here if rank_here.slot not in overdue_ranks and rank_here.reading.activity.waiting
    ]
    return any(rank_here.reading.made > 0 and not ranks.silent(rank_here) for rank_here in waiting)


def _by_beat(ranks: RankDurations, absent_rank: AbsentRank) -> bool:
    """Whether only signs of life count: a rank that forms groups or applies a step has a long deadline otherwise."""
    activity = absent_rank.reading.activity
    silent = ranks.silent(absent_rank.rank_here)
    return activity is Activity.PARKED or (silent and activity in (Activity.SYNC, Activity.APPLY))


def _verdict(ranks: RankDurations, absent_rank: AbsentRank, spent: tuple[float, float]) -> HangVerdict:
    by_beat = _by_beat(ranks, absent_rank)
    did = "has shown no sign of life" if by_beat else "left its attempt and has been busy"
    waits = "the others wait for it to form the world" if absent_rank.awaited else "the next world will wait for it"
    return blame(ranks, absent_rank.rank_here, spent, did, waits)
