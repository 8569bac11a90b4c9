"""The first offences of a run against calm deadlines: an activity that takes longer than any step before."""

from __future__ import annotations

from typing import Final

from holdfast.launcher.hang.detectors.observation import ObservedRank
from holdfast.launcher.hang.detectors.rank_durations import RankDurations

_ADVICE: Final = "put work that is not part of a step into 'with job.phase(\"evaluation\")'"


class FirstOffences:
    """Warns of each kind of offence once, and remembers for how long ranks stopped that continued by themselves."""

    def __init__(self) -> None:
        self.pause: float | None = None
        self._stopped: dict[int, float] = {}  # by process ID
        self._warned: set[bool] = set()

    def note(self, ranks: RankDurations) -> tuple[str, ...]:
        """Return the warnings that are due now."""
        calm = [rank_here for rank_here in ranks.seen.ranks_here if ranks.calm(rank_here.reading)]
        stopped = {
            rank_here.reading.pid: quiet
            for rank_here in calm
            if (quiet := ranks.quiet(rank_here.reading)) > ranks.base(rank_here.reading)
        }
        alive = {rank_here.reading.pid for rank_here in ranks.seen.ranks_here}
        for pid, seconds in self._stopped.items():
            if pid in alive and pid not in stopped:
                self.pause = max(self.pause or 0.0, seconds)
        self._stopped = stopped
        return tuple(text for rank_here in calm if (text := self._warning(ranks, rank_here)))

    def ended(self) -> None:
        """A rank was ended, so the next offence is not the first."""
        self.pause = self.pause or 0.0

    def _warning(self, ranks: RankDurations, rank_here: ObservedRank) -> str:
        reading, base = rank_here.reading, ranks.base(rank_here.reading)
        taken, busy = ranks.awake(reading, reading.since), ranks.busy(rank_here)
        overdue = (
            taken > base if busy else rank_here.reading.pid in self._stopped and not ranks.awaits_busy(rank_here)
        )
        if not overdue or busy in self._warned or (ranks.silent(rank_here) and not busy):
            return ""
        self._warned.add(busy)
        state = "and uses its CPU" if busy else "and has stopped using its CPU"
        return (
            f"rank {rank_here.rank} has been in compute for {taken:.0f} s after step {reading.step} {state}: no step "
            f"has taken this long, and the rank counts as hung after {ranks.limit(rank_here):.0f} s; {_ADVICE}"
        )
