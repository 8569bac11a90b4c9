"""Which rank hangs, judged by what its main thread does and for how long. Pure: time is a parameter.

Each launcher judges its own ranks by their boards, and those of the others by what their launchers say (`stalls`);
it acts on its own ranks only, so that of all launchers one acts.

- A rank whose end is in its own hands is hung when it takes longer than the deadline of what it does. The deadline of
  a step follows the median of the last steps; until enough are known, first steps may compile.
- A rank that waits for others is not to blame, however long it waits, unless it shows no sign of life.
- After a step comes what a script does beside it (it logs, or asks a loader of its own): that has the time of data,
  and a rank is to blame earlier only if it shows no sign of life.
- When all ranks of a world wait, nobody is to blame and nobody will come: their collectives do not match. The odd
  one out is named, and the attempt is ended without killing anyone: all can leave it by themselves.
- A launcher that was not heard just now is unknown: its ranks do not count as waiting, and meanwhile no rank is
  blamed that shows signs of life.
- A rank that said that it left its attempt has the deadline of what it does from then on; in the next world others
  wait for it. One that waits for that world only has to show signs of life.
- When a verdict would leave no rank of the world with its state, there is no hurry: whatever slows down all alike is
  rather a long step than a hang. Of ranks that left, only those here are known, so that one of them must be left.
- Of several that are late, those without a sign of life are to blame: the others may wait for them in a
  collective of the script's own.
- A second hang at the same step may be a step that takes so long: the deadline grows until a step is made.
- Time in which the launcher itself did not run counts for nobody; time in which a rank stood in line for a CPU does
  not count for that rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from holdfast.core.attempt import AttemptId, Json
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.cpu_starvation import Starvation
from holdfast.launcher.hang.stall_reports import NOBODY, Elsewhere, Hearsay, Stall, in_collective
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

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
# What is promised counts from the first who waits in vain; the others come to wait up to a step later.
_WAIT_SHARE: Final = 0.8
# Others are told early enough to know of all ranks when the first deadline is over.
_TOLD_SHARE: Final = 0.6
# So many hangs at one step are the script's own doing, and its budget ends them.
_SCRIPTS_OWN: Final = 3

_NEVER: Final = frozenset({Activity.PARKED, Activity.DONE})
_BETWEEN_WORLDS: Final = frozenset({Activity.SYNC, Activity.PARKED})


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
class Stray:
    """One local rank that left its attempt. `awaited`: it has a place in the present one, and has not taken it."""

    slot: int
    rank: int
    reading: Reading
    left_at: float
    awaited: bool


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The local ranks that entered the attempt, at one moment; those that did not yet; and what others say."""

    pair: AttemptId
    world_size: int
    sights: tuple[Sight, ...]
    strays: tuple[Stray, ...] = ()
    elsewhere: Elsewhere = NOBODY
    cpu_waits: Mapping[int, float] = field(default_factory=dict)
    """By process: how long it stood in line for a CPU, all in all."""


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """A rank that hangs, and the one line that says who waited for whom."""

    slot: int
    rank: int
    activity: Activity
    seconds: float
    deadline: float
    message: str
    repeats: int  # hangs before this one since a step was made
    kills: bool = True  # False: it is enough that all leave the attempt

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
        return now - since - self.lost(since, now)

    def lost(self, since: float, now: float) -> float:
        """How much of it does not."""
        return sum(max(0.0, min(end, now) - max(start, since)) for start, end in self._spans)


@dataclass(kw_only=True)
class Pace:
    """How long steps take: of worlds by their size, and the first ones of processes."""

    _steps: dict[int, deque[float]] = field(default_factory=dict)
    _base: tuple[AttemptId, int, int, float | None] | None = None  # pair, slot, step, since when if that was seen
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
        self._starvation = Starvation()
        self._pace = Pace()
        self._hearsay = Hearsay()
        self._told: dict[tuple[int, Activity, float, bool], Stall] = {}
        self._step = -1
        self._hung_at = -1
        self._hung_in: AttemptId | None = None
        self._repeats = 0
        self._mismatch: frozenset[tuple[AttemptId, int, Activity, int]] = frozenset()

    def judge(self, seen: Observed, now: float) -> tuple[HangVerdict, ...]:
        """Who hangs now."""
        self._pauses.look(now)
        self._starvation.note(seen.cpu_waits, now)
        self._pace.note(seen, now)
        self._hearsay.note(seen.elsewhere.stalls, now)
        readings = [sight.reading for sight in seen.sights] + [stray.reading for stray in seen.strays]
        self._step = max((reading.step for reading in readings), default=-1)
        if self._step > self._hung_at:
            self._repeats = 0
        if not self.settings.enabled:
            return ()
        verdicts = self._astray(seen, now) or self._overdue(seen, now) or self._mismatched(seen, now)
        if verdicts:
            self._count(seen.pair)
        return verdicts

    def hung_elsewhere(self, pair: AttemptId) -> None:
        """Another launcher found a rank of its own that hangs: another hang before the next step is a repetition,
        whoever hangs then. Several at once are one."""
        if pair != self._hung_in:
            self._count(pair)

    def _count(self, pair: AttemptId) -> None:
        self._hung_in = pair
        self._repeats, self._hung_at = self._repeats + 1, max(self._step, self._hung_at)

    def stalls(self, seen: Observed, now: float) -> tuple[Stall, ...]:
        """What the other launchers must know of the ranks here; the same as long as it is so."""
        told: dict[tuple[int, Activity, float, bool], Stall] = {}
        for sight in seen.sights if self.settings.enabled else ():
            reading = sight.reading
            key = (sight.slot, reading.activity, reading.since, self._stopped(reading, now))
            known = self._told.get(key)
            stall = known if known and known.pair == seen.pair else self._stall(sight, seen, now)
            if stall is not None:
                told[key] = stall
        self._told = told
        return tuple(told.values())

    def _stall(self, sight: Sight, seen: Observed, now: float) -> Stall | None:
        if sight.reading.activity in _NEVER:
            return None
        stall = self._standing(sight, seen, now)
        return stall if stall.silent or stall.seconds >= _TOLD_SHARE * stall.deadline else None

    def _standing(self, sight: Sight, seen: Observed, now: float) -> Stall:
        reading, silent = sight.reading, self._stopped(sight.reading, now)
        if in_collective(reading.activity) and not silent:
            seconds, limit = self._awake(reading, reading.since, now), self._wait_limit(reading, seen.world_size)
        else:
            seconds, limit = self._age(sight, now), self._limit(sight, seen.world_size, now)
        return Stall(
            pair=seen.pair,
            rank=sight.rank,
            activity=reading.activity,
            step=reading.step,
            silent=silent,
            seconds=round(seconds, 3),
            deadline=round(limit, 3),
        )

    # Those who keep others waiting

    def _overdue(self, seen: Observed, now: float) -> tuple[HangVerdict, ...]:
        late = [(sight, limit) for sight, limit in self._limits(seen, now) if self._age(sight, now) > limit]
        mute = [(sight, limit) for sight, limit in late if self._silent(sight, now)]
        if not mute and (seen.elsewhere.unheard or self._mute_elsewhere(seen, now)):
            return ()  # it will soon be known, or is about to be ended
        late = mute or late
        if len(late) == len(seen.sights) and _all_elsewhere(seen, silent=bool(mute)):
            patient = [(sight, max(limit, min(limit * _NO_HURRY, self.settings.startup))) for sight, limit in late]
            late = [(sight, limit) for sight, limit in patient if self._age(sight, now) > limit]
        blamed = {sight.rank for sight, _ in late}
        waits = _waits(_waiters(seen, blamed), known=_known(seen, blamed))
        return tuple(self._late(sight, limit, waits, now) for sight, limit in late)

    def _mute_elsewhere(self, seen: Observed, now: float) -> bool:
        """Whether another launcher is about to end a rank of its own that shows no sign of life."""
        return any(
            stall.silent and self._hearsay.seconds(stall, self._pauses.awake, now) > stall.deadline
            for stall in seen.elsewhere.stalls
        )

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
        return max(step, _SILENT_SYNC_SECONDS) if reading.activity in _BETWEEN_WORLDS else step

    def _wait_limit(self, reading: Reading, world_size: int) -> float:
        """How long a rank may wait when all others wait too."""
        step = None if reading.activity is Activity.SYNC else self._step_limit(reading, world_size)
        return self.settings.startup if step is None else _WAIT_SHARE * step

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
        return self._awake(reading, reading.beat if self._by_beat(sight, now) else reading.since, now)

    def _awake(self, reading: Reading, since: float, now: float) -> float:
        """How much of this time counts for a rank. A host that is short of CPUs holds up both: it counts once."""
        lost = max(self._pauses.lost(since, now), self._starvation.seconds(reading.pid, since))
        return max(0.0, now - since - lost)

    def _by_beat(self, sight: Sight, now: float) -> bool:
        """Whether only a sign of life is asked of it."""
        activity = sight.reading.activity
        return activity.waiting or (activity is Activity.APPLY and self._silent(sight, now))

    def _silent(self, sight: Sight, now: float) -> bool:
        return self._awake(sight.reading, sight.reading.beat, now) > LEAST_SECONDS

    def _stopped(self, reading: Reading, now: float) -> bool:
        """Whether it may be stopped: who waits for such a rank must not be taken for its equal."""
        return self._awake(reading, reading.beat, now) > _LATE_BEAT_SECONDS

    # Those who left their attempt, and do not come to the next one

    def _astray(self, seen: Observed, now: float) -> tuple[HangVerdict, ...]:
        spent = [(stray, *self._spent(stray, seen, now)) for stray in seen.strays if _must_come(stray)]
        late = [(stray, seconds, limit) for stray, seconds, limit in spent if seconds > limit]
        if not self._state_is_kept(seen, {stray.slot for stray, _, _ in late}, now):
            # What the strays of other launchers do is unknown: theirs may be as long at it.
            startup = self.settings.startup
            patient = [(stray, took, max(limit, min(limit * _NO_HURRY, startup))) for stray, took, limit in late]
            late = [(stray, seconds, limit) for stray, seconds, limit in patient if seconds > limit]
        return tuple(self._stray(stray, (seconds, limit), now) for stray, seconds, limit in late)

    def _spent(self, stray: Stray, seen: Observed, now: float) -> tuple[float, float]:
        """How long it has kept others waiting, and how long it may."""
        sight, reading, by_beat = _sight(stray), stray.reading, self._stray_by_beat(stray, now)
        forms = reading.activity is Activity.SYNC
        limit = self.settings.startup if forms and not by_beat else self._limit(sight, seen.world_size, now)
        return self._awake(reading, max(stray.left_at, reading.beat if by_beat else reading.since), now), limit

    def _state_is_kept(self, seen: Observed, late: set[int], now: float) -> bool:
        """Whether a rank here that made steps, and is not late itself, waits for the others with what it has."""
        here = (*seen.sights, *(_sight(stray) for stray in seen.strays))
        waiting = [sight for sight in here if sight.slot not in late and sight.reading.activity.waiting]
        return any(sight.reading.made > 0 and not self._silent(sight, now) for sight in waiting)

    def _stray_by_beat(self, stray: Stray, now: float) -> bool:
        """Whether only its signs of life count: what forms or applies has much time as long as it shows some."""
        activity = stray.reading.activity
        silent = self._silent(_sight(stray), now)
        return activity is Activity.PARKED or (silent and activity in (Activity.SYNC, Activity.APPLY))

    def _stray(self, stray: Stray, spent: tuple[float, float], now: float) -> HangVerdict:
        by_beat = self._stray_by_beat(stray, now)
        did = "has shown no sign of life" if by_beat else "left its attempt and has been busy"
        waits = "the others wait for it to form the world" if stray.awaited else "the next world will wait for it"
        return self._blame(_sight(stray), spent, did, waits)

    # Those who wait for each other

    def _mismatched(self, seen: Observed, now: float) -> tuple[HangVerdict, ...]:
        here = tuple(self._standing(sight, seen, now) for sight in seen.sights)
        if not here or not all(wait.waits for wait in here) or seen.world_size == 1:
            return ()
        everyone = (*here, *self._waits_elsewhere(seen, now))
        whole = not seen.elsewhere.unheard and {wait.rank for wait in everyone} == set(range(seen.world_size))
        waits = everyone if whole else here
        limit = max(wait.deadline for wait in everyone) if whole else self.settings.longest
        seconds, odd = min(wait.seconds for wait in waits), _odd(waits)
        slot = next((sight.slot for sight in seen.sights if sight.rank == odd.rank), None)
        knot = frozenset((wait.pair, wait.rank, wait.activity, wait.step) for wait in waits)
        if slot is None or seconds <= limit or knot == self._mismatch:
            return ()
        self._mismatch = knot
        others = [(wait.rank, wait.activity) for wait in waits if wait is not odd]
        text = f"{_waits(others, known=whole)}: each waits for the other"
        place = (odd.rank, odd.activity, odd.step)
        return (self._verdict(place, (seconds, limit), "has waited", text, slot=slot, kills=False),)

    def _waits_elsewhere(self, seen: Observed, now: float) -> tuple[Stall, ...]:
        waits = [stall for stall in seen.elsewhere.stalls if stall.waits]
        return tuple(replace(stall, seconds=self._hearsay.seconds(stall, self._pauses.awake, now)) for stall in waits)

    # Words

    def _late(self, sight: Sight, limit: float, waits: str, now: float) -> HangVerdict:
        did = "has been busy"
        if self._by_beat(sight, now):
            did = "has shown no sign of life"
        elif self._repeats and sight.reading.activity is Activity.COMPUTE:
            waits += "; what is not a step belongs into 'with job.phase(\"evaluation\")'"
        return self._blame(sight, (self._age(sight, now), limit), did, waits)

    def _blame(self, sight: Sight, spent: tuple[float, float], did: str, waits: str) -> HangVerdict:
        place = (sight.rank, sight.reading.activity, sight.reading.step)
        return self._verdict(place, spent, did, waits, slot=sight.slot)

    def _verdict(
        self,
        place: tuple[int, Activity, int],
        spent: tuple[float, float],
        did: str,
        waits: str,
        *,
        slot: int,
        kills: bool = True,
    ) -> HangVerdict:
        (rank, activity, step), (seconds, limit) = place, spent
        text = (
            f"rank {rank} {did} for {seconds:.1f} s in {activity} after step {step} (deadline {limit:.3g} s); {waits}"
        )
        return HangVerdict(
            slot=slot,
            rank=rank,
            activity=activity,
            seconds=seconds,
            deadline=limit,
            message=text,
            repeats=self._repeats,
            kills=kills,
        )


def _sight(stray: Stray) -> Sight:
    return Sight(slot=stray.slot, rank=stray.rank, reading=stray.reading)


def _must_come(stray: Stray) -> bool:
    activity = stray.reading.activity
    return activity is not Activity.DONE and (activity is not Activity.PARKED or stray.awaited)


def _all_elsewhere(seen: Observed, *, silent: bool) -> bool:
    """Whether every rank of the world that is not here is long at something too (or, `silent`, stopped)."""
    stalls = seen.elsewhere.stalls
    others = {stall.rank for stall in stalls if (stall.silent if silent else not stall.waits)}
    return len(others | {sight.rank for sight in seen.sights}) == seen.world_size


def _odd(waits: Sequence[Stall]) -> Stall:
    """Who is where the fewest are; of equals the highest rank."""
    places = [(wait.activity, wait.step) for wait in waits]
    return min(waits, key=lambda wait: (places.count((wait.activity, wait.step)), -wait.rank))


def _waiters(seen: Observed, blamed: set[int]) -> list[tuple[int, Activity]]:
    here = [(sight.rank, sight.reading.activity) for sight in seen.sights if sight.rank not in blamed]
    there = [(stall.rank, stall.activity) for stall in seen.elsewhere.stalls if stall.waits]
    return [(rank, activity) for rank, activity in (*here, *there) if in_collective(activity)]


def _known(seen: Observed, blamed: set[int]) -> bool:
    """Whether it is known of every rank what it does."""
    told = {stall.rank for stall in seen.elsewhere.stalls}
    return len(told | blamed | {sight.rank for sight in seen.sights}) == seen.world_size


def _waits(waiters: Sequence[tuple[int, Activity]], *, known: bool) -> str:
    if not waiters:
        return "no rank waits for it" if known else "others wait for it"
    by_activity: dict[Activity, list[int]] = {}
    for rank, activity in waiters:
        by_activity.setdefault(activity, []).append(rank)
    parts = [f"{_ranks(ranks)} for {_WANTED[activity]}" for activity, ranks in by_activity.items()]
    return f"waiting: {', '.join(parts)}" + ("" if known else ", and others")


_WANTED: Final = {
    Activity.AVERAGE: "its gradients",
    Activity.VOTE: "its vote",
    Activity.SYNC: "it to form the world",
}


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:16]) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
