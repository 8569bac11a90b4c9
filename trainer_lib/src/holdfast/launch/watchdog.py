"""Which local rank hangs, judged by what its main thread does and for how long. Pure: time is a parameter.

- A rank whose end is in its own hands is hung when it takes longer than the deadline of what it does. The deadline of
  a step follows the median of the last steps; until enough are known, first steps may compile.
- A rank that waits for others is not to blame, however long it waits, unless it shows no sign of life.
- After a step comes what a script does beside it (it logs, or asks a loader of its own): that has the time of data,
  and a rank is to blame earlier only if it shows no sign of life.
- When all ranks of a world wait, nobody is to blame and nobody will come: their collectives do not match, and the
  odd one out is ended. Of a world that is partly elsewhere that is only known after the longest of all deadlines.
- When a verdict would leave no rank of the world with its state, there is no hurry: whatever slows down all alike is
  rather a long step than a hang.
- Of several that are late, those without a sign of life are to blame: the others may wait for them in a
  collective of the script's own.
- A second hang at the same step may be a step that takes so long: the deadline grows until a step is made.
- Time in which the launcher itself did not run counts for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.activity import Activity
from holdfast.constants import Cause
from holdfast.errors import DocumentError
from holdfast.progress import Reading
from holdfast.worlds import Json, Pair

# Promised are max(1 s, 5 × the median step); what is short of that is the time between two looks, and their cost.
STEP_FACTOR: Final = 4.5
LEAST_SECONDS: Final = 0.85
# Steps that must be known before they make a deadline, of the world and of the process itself.
KNOWN_STEPS: Final = 5
_REMEMBERED: Final = 50
# Silence of a rank that waits: before steps are known, and while groups form and state is moved.
_SILENT_SECONDS: Final = 30.0
_SILENT_SYNC_SECONDS: Final = 5.0
_LATE_BEAT_SECONDS: Final = 0.4
# First steps of a new process, against the slowest that was seen of earlier ones.
_FIRST_SECONDS: Final = 10.0
_FIRST_FACTOR: Final = 5.0
_NO_HURRY: Final = 10.0
_GROWTH: Final = 4.0
_MOST_GROWTH: Final = 6
# So many hangs at one step are the script's own doing, and its budget ends them.
_SCRIPTS_OWN: Final = 3

_NEVER: Final = frozenset({Activity.PARKED, Activity.DONE})


@dataclass(frozen=True, kw_only=True)
class HangSettings:
    """Deadlines in seconds; `step` None: from the measured steps."""

    enabled: bool = True
    step: float | None = None
    startup: float = 1200.0
    data: float = 900.0
    checkpoint: float = 900.0
    evaluation: float = 3600.0

    @classmethod
    def from_settings(cls, settings: Json) -> HangSettings:
        """Read `settings.hangDetection` of a membership; what is not there has its default."""
        given: Json = settings.get("hangDetection") or {}
        startup = settings.get("startupDeadlineSeconds", cls.startup)
        step = given.get("stepTimeout", "Auto")
        try:
            return cls(
                enabled=step != "Off",
                step=None if step in ("Auto", "Off") else float(step),
                startup=float(given.get("startupTimeoutSeconds", startup)),
                data=float(given.get("dataTimeoutSeconds", cls.data)),
                checkpoint=float(given.get("checkpointTimeoutSeconds", cls.checkpoint)),
                evaluation=float(given.get("evaluationTimeoutSeconds", cls.evaluation)),
            )
        except (TypeError, ValueError) as error:
            raise DocumentError(f"hangDetection cannot be read: {error}") from error

    @property
    def longest(self) -> float:
        """However busy a rank elsewhere is, its launcher has ended it by then."""
        return max(self.startup, self.data, self.checkpoint, self.evaluation, self.step or 0.0)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One local rank of the present attempt."""

    slot: int
    rank: int
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The local ranks that entered the attempt, at one moment."""

    pair: Pair
    world_size: int
    sights: tuple[Sight, ...]

    @property
    def whole(self) -> bool:
        """Whether these are all ranks of the world."""
        return len(self.sights) == self.world_size


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A rank that hangs, and the one line that says who waited for whom."""

    slot: int
    rank: int
    reading: Reading
    seconds: float
    deadline: float
    message: str
    repeats: int  # hangs before this one since a step was made

    @property
    def cause(self) -> Cause:
        """Whose budget it is: again and again at one step, it is the script's."""
        return Cause.APPLICATION if self.repeats >= _SCRIPTS_OWN else Cause.INFRASTRUCTURE


@dataclass(kw_only=True)
class Pauses:
    """When the launcher did not run: a host without CPU time, a machine that was suspended."""

    tick: float = 0.1
    late: float = 0.25
    _last: float | None = None
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))

    def look(self, now: float) -> None:
        """The launcher runs."""
        if self._last is not None and now - self._last > self.late:
            self._spans.append((self._last + self.tick, now))
        self._last = now

    def awake(self, since: float, now: float) -> float:
        """How much of this time counts."""
        lost = (max(0.0, min(end, now) - max(start, since)) for start, end in self._spans)
        return now - since - sum(lost)


@dataclass(kw_only=True)
class Pace:
    """How long steps take: of worlds by their size, and the first ones of processes."""

    _steps: dict[int, deque[float]] = field(default_factory=dict)
    _base: tuple[Pair, int, int, float | None] | None = None  # pair, slot, step, since when if that was seen
    _starting: dict[int, float] = field(default_factory=dict)  # by slot: the longest of its first steps so far
    _first: float | None = None

    def note(self, seen: Observed, now: float) -> None:
        """Take in what the ranks made since the last look."""
        self._note_first(seen, now)
        if not seen.sights:
            return
        leader = min(seen.sights, key=lambda sight: sight.rank)
        key, at = (seen.pair, leader.slot), leader.reading
        if self._base is None or self._base[:2] != key:
            self._base = (*key, at.step, None)
        elif at.step > self._base[2]:
            _, _, step, since = self._base
            if since is not None:
                known = self._steps.setdefault(seen.world_size, deque(maxlen=_REMEMBERED))
                made = at.step - step  # as many as fitted between two looks, each as long as their mean
                known.extend([(at.stepped - since) / made] * min(made, _REMEMBERED))
            self._base = (*key, at.step, at.stepped)

    def median(self, world_size: int) -> float | None:
        """Of a world of this size; one of another size tells as much as it can."""
        known = {size: median(steps) for size, steps in self._steps.items() if len(steps) >= KNOWN_STEPS}
        if world_size in known:
            return known[world_size]
        return max((value * max(1.0, size / world_size) for size, value in known.items()), default=None)

    def first(self, startup: float) -> float:
        """How long a first step may take."""
        if self._first is None:
            return startup
        return min(startup, max(_FIRST_SECONDS, _FIRST_FACTOR * self._first))

    def _note_first(self, seen: Observed, now: float) -> None:
        starting: dict[int, float] = {}
        for sight in seen.sights:
            took, reading = self._starting.get(sight.slot, 0.0), sight.reading
            if reading.made >= KNOWN_STEPS:
                self._first = max(self._first or 0.0, took)
            elif reading.activity is Activity.COMPUTE:
                starting[sight.slot] = max(took, now - reading.since)
            else:
                starting[sight.slot] = took
        self._starting = starting


class Watchdog:
    """Remembers what deadlines are made of; each look judges all ranks."""

    def __init__(self) -> None:
        self.settings = HangSettings()
        self._pauses = Pauses()
        self._pace = Pace()
        self._hung_at = -1
        self._repeats = 0

    def judge(self, seen: Observed, now: float) -> tuple[Verdict, ...]:
        """Who hangs now."""
        self._pauses.look(now)
        self._pace.note(seen, now)
        step = max((sight.reading.step for sight in seen.sights), default=-1)
        if step > self._hung_at:
            self._repeats = 0
        if not self.settings.enabled or not seen.sights:
            return ()
        verdicts = self._overdue(seen, now) or self._mismatched(seen, now)
        if verdicts:
            self._repeats, self._hung_at = self._repeats + 1, max(step, self._hung_at)
        return verdicts

    # Those who keep others waiting

    def _overdue(self, seen: Observed, now: float) -> tuple[Verdict, ...]:
        late = [(sight, limit) for sight, limit in self._limits(seen, now) if self._age(sight, now) > limit]
        late = [(sight, limit) for sight, limit in late if self._silent(sight, now)] or late
        if seen.whole and len(late) == len(seen.sights):
            patient = [(sight, max(limit, min(limit * _NO_HURRY, self.settings.startup))) for sight, limit in late]
            late = [(sight, limit) for sight, limit in patient if self._age(sight, now) > limit]
        blamed = {sight.slot for sight, _ in late}
        waiters = [sight for sight in seen.sights if sight.slot not in blamed and _in_collective(sight.reading)]
        waits = _waits(waiters, elsewhere=not seen.whole)
        return tuple(self._late(sight, limit, waits, now) for sight, limit in late)

    def _limits(self, seen: Observed, now: float) -> Iterable[tuple[Sight, float]]:
        for sight in seen.sights:
            if sight.reading.activity not in _NEVER:
                yield sight, self._limit(sight, seen.world_size, now)

    def _limit(self, sight: Sight, world_size: int, now: float) -> float:
        reading = sight.reading
        settings = self.settings
        fixed = {
            Activity.STARTUP: settings.startup,
            Activity.RESTORE: settings.startup,
            Activity.DATA: settings.data,
            Activity.CHECKPOINT: settings.checkpoint,
            Activity.EVALUATION: settings.evaluation,
        }
        if reading.activity in fixed:
            return fixed[reading.activity]
        if reading.activity is Activity.APPLY and not self._silent(sight, now):
            return settings.data
        step = self._step_limit(reading, world_size)
        if reading.activity is Activity.COMPUTE:
            return self._pace.first(settings.startup) if step is None else step
        if step is None:
            return _SILENT_SECONDS
        return max(step, _SILENT_SYNC_SECONDS) if reading.activity is Activity.SYNC else step

    def _step_limit(self, reading: Reading, world_size: int) -> float | None:
        """None: not enough steps are known."""
        if reading.made < KNOWN_STEPS:
            return None
        if self.settings.step is not None:
            return self.settings.step
        known = self._pace.median(world_size)
        if known is None:
            return None
        return max(LEAST_SECONDS, STEP_FACTOR * known) * _GROWTH ** min(self._repeats, _MOST_GROWTH)

    def _age(self, sight: Sight, now: float) -> float:
        """For how long it has kept others waiting; who waits himself only does by showing no sign of life."""
        reading = sight.reading
        return self._pauses.awake(reading.beat if self._by_beat(sight, now) else reading.since, now)

    def _by_beat(self, sight: Sight, now: float) -> bool:
        """Whether only a sign of life is asked of it."""
        activity = sight.reading.activity
        return activity.waiting or (activity is Activity.APPLY and self._silent(sight, now))

    def _silent(self, sight: Sight, now: float) -> bool:
        return self._pauses.awake(sight.reading.beat, now) > LEAST_SECONDS

    # Those who wait for each other

    def _mismatched(self, seen: Observed, now: float) -> tuple[Verdict, ...]:
        readings = [sight.reading for sight in seen.sights]
        if seen.world_size == 1 or not all(_in_collective(reading) for reading in readings):
            return ()
        if any(self._pauses.awake(reading.beat, now) > _LATE_BEAT_SECONDS for reading in readings):
            return ()  # who waits for a stopped rank would be taken for its equal; its silence is judged soon
        seconds = min(self._pauses.awake(reading.since, now) for reading in readings)
        limit = self._common_limit(seen)
        if seconds <= limit:
            return ()
        odd = _odd(seen.sights)
        others = [sight for sight in seen.sights if sight is not odd]
        text = f"{_waits(others, elsewhere=not seen.whole)}: each waits for the other"
        return (self._verdict(odd, "has waited", seconds, limit, text),)

    def _common_limit(self, seen: Observed) -> float:
        if not seen.whole:
            return self.settings.longest
        if any(sight.reading.activity is Activity.SYNC for sight in seen.sights):
            return self.settings.startup
        limits = [self._step_limit(sight.reading, seen.world_size) for sight in seen.sights]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else self.settings.startup

    # Words

    def _late(self, sight: Sight, limit: float, waits: str, now: float) -> Verdict:
        seconds = self._age(sight, now)
        if self._by_beat(sight, now):
            return self._verdict(sight, "has shown no sign of life", seconds, limit, waits)
        if self._repeats and sight.reading.activity is Activity.COMPUTE:
            waits += "; what is not a step belongs into 'with job.phase(\"evaluation\")'"
        return self._verdict(sight, "has been busy", seconds, limit, waits)

    def _verdict(self, sight: Sight, did: str, seconds: float, limit: float, waits: str) -> Verdict:
        reading = sight.reading
        return Verdict(
            slot=sight.slot,
            rank=sight.rank,
            reading=reading,
            seconds=seconds,
            deadline=limit,
            message=(
                f"rank {sight.rank} {did} for {seconds:.1f} s in {reading.activity} after step {reading.step}"
                f" (deadline {limit:.3g} s); {waits}"
            ),
            repeats=self._repeats,
        )


def _in_collective(reading: Reading) -> bool:
    return reading.activity.waiting and reading.activity is not Activity.PARKED


def _odd(sights: Sequence[Sight]) -> Sight:
    """Who is where the fewest are; of equals the highest rank."""
    places = [(sight.reading.activity, sight.reading.step) for sight in sights]
    return min(sights, key=lambda s: (places.count((s.reading.activity, s.reading.step)), -s.rank))


def _waits(waiters: Sequence[Sight], *, elsewhere: bool) -> str:
    if not waiters:
        return "others wait for it" if elsewhere else "no rank waits for it"
    by_activity: dict[Activity, list[int]] = {}
    for sight in waiters:
        by_activity.setdefault(sight.reading.activity, []).append(sight.rank)
    parts = [f"{_ranks(ranks)} for {_WANTED[activity]}" for activity, ranks in by_activity.items()]
    return f"waiting: {', '.join(parts)}" + (", and others" if elsewhere else "")


_WANTED: Final = {
    Activity.AVERAGE: "its gradients",
    Activity.VOTE: "its vote",
    Activity.SYNC: "it to form the world",
    Activity.PARKED: "a world",
}


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:16]) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
