"""The messages of the hang detectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.launcher.hang.detectors.observation import HangVerdict, ObservedRank
from holdfast.launcher.hang.detectors.rank_durations import RankDurations
from holdfast.telemetry.activity import Activity

_AWAITED: Final = {
    Activity.AVERAGE: "its gradients",
    Activity.VOTE: "its vote",
    Activity.SYNC: "it to form the world",
}


def blame(
    ranks: RankDurations, rank_here: ObservedRank, spent: tuple[float, float], did: str, waits: str
) -> HangVerdict:
    """Return the verdict on one local rank."""
    place = (rank_here.rank, rank_here.reading.activity, rank_here.reading.step)
    return verdict(ranks, place, spent, did, waits, slot=rank_here.slot)


def verdict(
    ranks: RankDurations,
    place: tuple[int, Activity, int],
    spent: tuple[float, float],
    did: str,
    waits: str,
    *,
    slot: int,
) -> HangVerdict:
    """Return a verdict. `place` is rank, activity and step; `spent` is the time and its deadline in seconds."""
    (rank, activity, step), (seconds, limit) = place, spent
    text = f"rank {rank} {did} for {seconds:.1f} s in {activity} after step {step} (deadline {limit:.3g} s); {waits}"
    return HangVerdict(
        slot=slot,
        rank=rank,
        activity=activity,
        seconds=seconds,
        deadline=limit,
        message=text,
        repeats=ranks.repeats,
    )


def waits(waiters: Sequence[tuple[int, Activity]], *, known: bool) -> str:
    """Return which ranks wait for which activity, for the message of a verdict."""
    if not waiters:
        return "no rank waits for it" if known else "others wait for it"
    by_activity: dict[Activity, list[int]] = {}
    for rank, activity in waiters:
        by_activity.setdefault(activity, []).append(rank)
    parts = [f"{_ranks(ranks)} for {_AWAITED[activity]}" for activity, ranks in by_activity.items()]
    return f"waiting: {', '.join(parts)}" + ("" if known else ", and others")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:16]) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
