"""The state of the hang detection between two looks."""

from __future__ import annotations

from typing import Final

from holdfast.core.attempt import AttemptId
from holdfast.launcher.hang.cpu_progress import CpuProgress
from holdfast.launcher.hang.cpu_starvation import Starvation
from holdfast.launcher.hang.detectors.absent_ranks import absent_ranks
from holdfast.launcher.hang.detectors.first_offences import FirstOffences
from holdfast.launcher.hang.detectors.mismatched import mismatched
from holdfast.launcher.hang.detectors.observation import HangSettings, HangVerdict, Observed, ObservedRank, Waits
from holdfast.launcher.hang.detectors.overdue import overdue
from holdfast.launcher.hang.detectors.pace import Pace, Pauses
from holdfast.launcher.hang.detectors.rank_durations import NEVER, RankDurations
from holdfast.launcher.hang.stall_reports import ReportedSeconds, Stall
from holdfast.telemetry.activity import Activity

# Only the first detector with a result reports: a rank that left explains why others are late or wait.
_DETECTORS: Final = (absent_ranks, overdue, mismatched)


class Watchdog:
    """Keeps the inputs of the deadlines. Each look judges all ranks."""

    def __init__(self, settings: HangSettings = HangSettings()) -> None:  # noqa: B008 - immutable
        self.settings = settings
        self._pauses = Pauses()
        self._starvation = Starvation()
        self._progress = CpuProgress()
        self._pace = Pace()
        self._offences = FirstOffences()
        self.warnings: tuple[str, ...] = ()  # of the last look
        self._reported = ReportedSeconds()
        self._reported_stalls: dict[tuple[int, Activity, float, bool, bool], Stall] = {}
        self._step = -1
        self._hung_at = -1
        self._hung_in: AttemptId | None = None
        self._repeats = 0
        self._mismatch: Waits = frozenset()

    def judge(self, seen: Observed, now: float) -> tuple[HangVerdict, ...]:
        """Return verdicts on the processes that hang."""
        self._pauses.look(now)
        self._starvation.note(seen.cpu_waits, now)
        self._progress.note(seen.cpu_runs, now)
        self._pace.note(seen, now)
        self._reported.note(seen.remote.stalls, now)
        readings = [rank_here.reading for rank_here in seen.ranks_here] + [
            absent_rank.reading for absent_rank in seen.absent
        ]
        self._step = max((reading.step for reading in readings), default=-1)
        if self._step > self._hung_at:
            self._repeats = 0
        if not self.settings.enabled:
            return ()
        ranks = self._observe(seen, now)
        self.warnings = self._offences.note(ranks)
        for detect in _DETECTORS:
            if verdicts := detect(ranks):
                self._count(seen.attempt_id)
                self._mismatch = verdicts[0].waits or self._mismatch
                return verdicts
        return ()

    def _observe(self, seen: Observed, now: float) -> RankDurations:
        return RankDurations(
            seen=seen,
            now=now,
            settings=self.settings,
            pauses=self._pauses,
            starvation=self._starvation,
            progress=self._progress,
            pace=self._pace,
            reported=self._reported,
            repeats=self._repeats,
            mismatch=self._mismatch,
            pause=self._offences.pause,
        )

    def remote_hang(self, attempt_id: AttemptId) -> None:
        """Another launcher reported a hang of its rank in this attempt.

        A further hang of any rank before the next step counts as a repetition. Several hangs in one attempt count as
        one.
        """
        if attempt_id != self._hung_in:
            self._count(attempt_id)

    def _count(self, attempt_id: AttemptId) -> None:
        self._offences.ended()
        self._hung_in = attempt_id
        self._repeats, self._hung_at = self._repeats + 1, max(self._step, self._hung_at)

    def stalls(self, seen: Observed, now: float) -> tuple[Stall, ...]:
        """Return the long activities of local ranks for other launchers; unchanged while the activities last."""
        told: dict[tuple[int, Activity, float, bool, bool], Stall] = {}
        ranks = self._observe(seen, now)
        for rank_here in seen.ranks_here if self.settings.enabled else ():
            reading = rank_here.reading
            key = (rank_here.slot, reading.activity, reading.since, ranks.stopped(reading), ranks.busy(rank_here))
            known = self._reported_stalls.get(key)
            stall = known if known and known.attempt_id == seen.attempt_id else _reportable(ranks, rank_here)
            if stall is not None:
                told[key] = stall
        self._reported_stalls = told
        return tuple(told.values())


def _reportable(ranks: RankDurations, rank_here: ObservedRank) -> Stall | None:
    if rank_here.reading.activity in NEVER:
        return None
    return ranks.stall(rank_here) if ranks.worth_reporting(rank_here) else None
