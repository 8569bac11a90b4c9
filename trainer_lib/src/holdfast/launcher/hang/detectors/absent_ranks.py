"""Detects ranks that left their attempt and do not come to the next one."""

from __future__ import annotations

from holdfast.launcher.hang.detectors.observation import AbsentRank, HangVerdict
from holdfast.launcher.hang.detectors.rank_durations import RankDurations
from holdfast.launcher.hang.detectors.verdicts import blame
from holdfast.telemetry.activity import Activity


def absent_ranks(ranks: RankDurations) -> tuple[HangVerdict, ...]:
    """Return verdicts on the local ranks that left an attempt and are late for the next one."""
    spent = [(stray, *_spent(ranks, stray)) for stray in ranks.seen.strays if _must_come(stray)]
    late = [(stray, seconds, limit) for stray, seconds, limit in spent if seconds > limit]
    if not _state_is_kept(ranks, {stray.slot for stray, _, _ in late}):
        # The remote ranks that left are unknown: they may be late as well.
        patient = [(stray, took, ranks.patient(limit)) for stray, took, limit in late]
        late = [(stray, seconds, limit) for stray, seconds, limit in patient if seconds > limit]
    return tuple(_stray(ranks, stray, (seconds, limit)) for stray, seconds, limit in late)


def _must_come(stray: AbsentRank) -> bool:
    activity = stray.reading.activity
    return activity is not Activity.DONE and (activity is not Activity.PARKED or stray.awaited)


def _spent(ranks: RankDurations, stray: AbsentRank) -> tuple[float, float]:
    """Return for how long the rank has kept others waiting, and its deadline, in seconds."""
    sight, reading, by_beat = stray.sight, stray.reading, _by_beat(ranks, stray)
    forms = reading.activity is Activity.SYNC
    limit = ranks.settings.startup if forms and not by_beat else ranks.limit(sight)
    return ranks.awake(reading, max(stray.left_at, reading.beat if by_beat else reading.since)), limit


def _state_is_kept(ranks: RankDurations, late: set[int]) -> bool:
    """Whether a local rank that has made steps and is not late waits for the others, with its state."""
    here = (*ranks.seen.sights, *(stray.sight for stray in ranks.seen.strays))
    waiting = [sight for sight in here if sight.slot not in late and sight.reading.activity.waiting]
    return any(sight.reading.made > 0 and not ranks.silent(sight) for sight in waiting)


def _by_beat(ranks: RankDurations, stray: AbsentRank) -> bool:
    """Whether only signs of life count: a rank that forms groups or applies a step has a long deadline otherwise."""
    activity = stray.reading.activity
    silent = ranks.silent(stray.sight)
    return activity is Activity.PARKED or (silent and activity in (Activity.SYNC, Activity.APPLY))


def _stray(ranks: RankDurations, stray: AbsentRank, spent: tuple[float, float]) -> HangVerdict:
    by_beat = _by_beat(ranks, stray)
    did = "has shown no sign of life" if by_beat else "left its attempt and has been busy"
    waits = "the others wait for it to form the world" if stray.awaited else "the next world will wait for it"
    return blame(ranks, stray.sight, spent, did, waits)
