"""The first offences of a run against calm deadlines: an activity that takes longer than any step before."""

from __future__ import annotations

from typing import Final

from holdfast.launcher.hang.detectors.observation import Sight
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
        calm = [sight for sight in ranks.seen.sights if ranks.calm(sight.reading)]
        stopped = {
            sight.reading.pid: quiet
            for sight in calm
            if (quiet := ranks.quiet(sight.reading)) > ranks.base(sight.reading)
        }
        alive = {sight.reading.pid for sight in ranks.seen.sights}
        for pid, seconds in self._stopped.items():
            if pid in alive and pid not in stopped:
                self.pause = max(self.pause or 0.0, seconds)
        self._stopped = stopped
        return tuple(text for sight in calm if (text := self._warning(ranks, sight)))

    def ended(self) -> None:
        """A rank was ended, so the next offence is not the first."""
        self.pause = self.pause or 0.0

    def _warning(self, ranks: RankDurations, sight: Sight) -> str:
        reading, base = sight.reading, ranks.base(sight.reading)
        taken, busy = ranks.awake(reading, reading.since), ranks.busy(sight)
        late = taken > base if busy else sight.reading.pid in self._stopped and not ranks.awaits_busy(sight)
        if not late or busy in self._warned or (ranks.silent(sight) and not busy):
            return ""
        self._warned.add(busy)
        state = "and uses its CPU" if busy else "and has stopped using its CPU"
        return (
            f"rank {sight.rank} has been in compute for {taken:.0f} s after step {reading.step} {state}: no step has "
            f"taken this long, and the rank counts as hung after {ranks.limit(sight):.0f} s; {_ADVICE}"
        )
