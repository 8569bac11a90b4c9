"""Detects ranks that keep others waiting longer than their deadline."""

from __future__ import annotations

from holdfast.launcher.hang.detectors.observation import HangVerdict, Observed, ObservedRank
from holdfast.launcher.hang.detectors.rank_durations import RankDurations
from holdfast.launcher.hang.detectors.verdicts import blame, waits
from holdfast.launcher.hang.stall_reports import in_collective
from holdfast.telemetry.activity import Activity


def overdue(ranks: RankDurations) -> tuple[HangVerdict, ...]:
    """Return verdicts on the local ranks that are late; if some show no sign of life, only on those."""
    overdue_ranks = [(rank_here, limit) for rank_here, limit in ranks.limits() if ranks.age(rank_here) > limit]
    silent_ranks = [(rank_here, limit) for rank_here, limit in overdue_ranks if ranks.silent(rank_here)]
    if not silent_ranks and (ranks.seen.remote.outdated or _silent_remotely(ranks)):
        return ()  # a report will arrive soon, or a remote rank is about to be ended
    overdue_ranks = silent_ranks or [
        (rank_here, limit) for rank_here, limit in overdue_ranks if not ranks.awaits_busy(rank_here)
    ]
    if len(overdue_ranks) == len(ranks.seen.ranks_here) and _all_remote_stalled(
        ranks.seen, silent=bool(silent_ranks)
    ):
        with_long_limit = [(rank_here, ranks.with_long_limit(limit)) for rank_here, limit in overdue_ranks]
        overdue_ranks = [(rank_here, limit) for rank_here, limit in with_long_limit if ranks.age(rank_here) > limit]
    blamed = {rank_here.rank for rank_here, _ in overdue_ranks}
    text = waits(_waiters(ranks.seen, blamed), known=_known(ranks.seen, blamed))
    return tuple(_verdict(ranks, rank_here, limit, text) for rank_here, limit in overdue_ranks)


def _silent_remotely(ranks: RankDurations) -> bool:
    """Whether another launcher is about to end one of its ranks that shows no sign of life."""
    return any(stall.silent and ranks.reported_seconds(stall) > stall.deadline for stall in ranks.seen.remote.stalls)


def _all_remote_stalled(seen: Observed, *, silent: bool) -> bool:
    """Whether every remote rank of the world has a long activity too (with `silent`: is stopped)."""
    stalls = seen.remote.stalls
    others = {stall.rank for stall in stalls if (stall.silent if silent else not stall.waits)}
    return len(others | {rank_here.rank for rank_here in seen.ranks_here}) == seen.world_size


def _waiters(seen: Observed, blamed: set[int]) -> list[tuple[int, Activity]]:
    here = [
        (rank_here.rank, rank_here.reading.activity) for rank_here in seen.ranks_here if rank_here.rank not in blamed
    ]
    there = [(stall.rank, stall.activity) for stall in seen.remote.stalls if stall.waits]
    return [(rank, activity) for rank, activity in (*here, *there) if in_collective(activity)]


def _known(seen: Observed, blamed: set[int]) -> bool:
    """Whether the activity of every rank is known."""
    reported = {stall.rank for stall in seen.remote.stalls}
    return len(reported | blamed | {rank_here.rank for rank_here in seen.ranks_here}) == seen.world_size


def _verdict(ranks: RankDurations, rank_here: ObservedRank, limit: float, waits: str) -> HangVerdict:
    did = "has been busy"
    if ranks.by_beat(rank_here):
        did = "has shown no sign of life"
    elif ranks.repeats and rank_here.reading.activity is Activity.COMPUTE:
        waits += "; put work that is not a step into 'with job.phase(\"evaluation\")'"
    return blame(ranks, rank_here, (ranks.age(rank_here), limit), did, waits)
