"""Detects ranks that keep others waiting longer than their deadline."""

from __future__ import annotations

from holdfast.launcher.hang.detectors.observation import HangVerdict, Observed, Sight
from holdfast.launcher.hang.detectors.rank_durations import RankDurations
from holdfast.launcher.hang.detectors.verdicts import blame, waits
from holdfast.launcher.hang.stall_reports import in_collective
from holdfast.telemetry.activity import Activity


def overdue(ranks: RankDurations) -> tuple[HangVerdict, ...]:
    """Return verdicts on the local ranks that are late; if some show no sign of life, only on those."""
    late = [(sight, limit) for sight, limit in ranks.limits() if ranks.age(sight) > limit]
    mute = [(sight, limit) for sight, limit in late if ranks.silent(sight)]
    if not mute and (ranks.seen.elsewhere.outdated or _mute_elsewhere(ranks)):
        return ()  # a report will arrive soon, or a remote rank is about to be ended
    late = mute or [(sight, limit) for sight, limit in late if not ranks.awaits_busy(sight)]
    if len(late) == len(ranks.seen.sights) and _all_elsewhere(ranks.seen, silent=bool(mute)):
        patient = [(sight, ranks.patient(limit)) for sight, limit in late]
        late = [(sight, limit) for sight, limit in patient if ranks.age(sight) > limit]
    blamed = {sight.rank for sight, _ in late}
    text = waits(_waiters(ranks.seen, blamed), known=_known(ranks.seen, blamed))
    return tuple(_late(ranks, sight, limit, text) for sight, limit in late)


def _mute_elsewhere(ranks: RankDurations) -> bool:
    """Whether another launcher is about to end one of its ranks that shows no sign of life."""
    return any(
        stall.silent and ranks.reported_seconds(stall) > stall.deadline for stall in ranks.seen.elsewhere.stalls
    )


def _all_elsewhere(seen: Observed, *, silent: bool) -> bool:
    """Whether every remote rank of the world has a long activity too (with `silent`: is stopped)."""
    stalls = seen.elsewhere.stalls
    others = {stall.rank for stall in stalls if (stall.silent if silent else not stall.waits)}
    return len(others | {sight.rank for sight in seen.sights}) == seen.world_size


def _waiters(seen: Observed, blamed: set[int]) -> list[tuple[int, Activity]]:
    here = [(sight.rank, sight.reading.activity) for sight in seen.sights if sight.rank not in blamed]
    there = [(stall.rank, stall.activity) for stall in seen.elsewhere.stalls if stall.waits]
    return [(rank, activity) for rank, activity in (*here, *there) if in_collective(activity)]


def _known(seen: Observed, blamed: set[int]) -> bool:
    """Whether the activity of every rank is known."""
    told = {stall.rank for stall in seen.elsewhere.stalls}
    return len(told | blamed | {sight.rank for sight in seen.sights}) == seen.world_size


def _late(ranks: RankDurations, sight: Sight, limit: float, waits: str) -> HangVerdict:
    did = "has been busy"
    if ranks.by_beat(sight):
        did = "has shown no sign of life"
    elif ranks.repeats and sight.reading.activity is Activity.COMPUTE:
        waits += "; put work that is not a step into 'with job.phase(\"evaluation\")'"
    return blame(ranks, sight, (ranks.age(sight), limit), did, waits)
