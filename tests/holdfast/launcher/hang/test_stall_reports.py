"""Several launchers judge one world: each its own ranks, by their boards and by the reports of the other
launchers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError
from holdfast.launcher.hang.detectors.observation import HangSettings, HangVerdict, Observed, ObservedRank
from holdfast.launcher.hang.detectors.watchdog import Watchdog
from holdfast.launcher.hang.stall_reports import RemoteStalls, Stall
from holdfast.launcher.membership import messages
from holdfast.launcher.membership.messages import Hello
from holdfast.telemetry.activity import Activity
from holdfast.telemetry.activity_page import Reading

TICK = 0.1
A = Activity
PAIR = AttemptId(1, 1)


@dataclass
class Launcher:
    """Some ranks, a clock, and the reports of the other launchers."""

    ranks: tuple[int, ...]
    clock: float
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(HangSettings(min_step=1.0)))
    said: tuple[Stall, ...] = ()
    heard: dict[int, tuple[Stall, ...]] = field(default_factory=dict)
    outdated: bool = False


class World:
    """Launchers and their ranks. The simulation has one time, and each host's clock has an offset."""

    def __init__(self, *ranks_of: int, latency: float = 0.01) -> None:
        numbers = count()
        ranks = [tuple(next(numbers) for _ in range(ranks)) for ranks in ranks_of]
        self.launchers = [Launcher(mine, clock=1e5 * 7**place) for place, mine in enumerate(ranks)]
        self.size, self.now, self.latency = sum(ranks_of), 0.0, latency
        self.stopped: set[int] = set()
        self.letters: list[tuple[float, int, int, tuple[Stall, ...]]] = []
        first = Reading(pid=1, signal=45, beat=0.0, activity=A.COMPUTE, since=0.0, step=0, stepped=0.0, made=0)
        self.readings = dict.fromkeys(range(self.size), first)

    def enter(self, activity: Activity, *ranks: int) -> None:
        for rank in ranks or range(self.size):
            self.readings[rank] = replace(self.readings[rank], activity=activity, since=self.now)

    def step(self) -> None:
        """Let all ranks complete a step now."""
        for rank, was in self.readings.items():
            self.readings[rank] = replace(
                was, activity=A.COMPUTE, since=self.now, step=was.step + 1, stepped=self.now, made=was.made + 1
            )

    def train(self, steps: int = 20, seconds: float = 0.1) -> None:
        for _ in range(steps):
            assert self.wait(seconds) == []
            self.step()

    def check(self, place: int) -> tuple[HangVerdict, ...]:
        """Let one launcher check its ranks, and report to the others."""
        launcher = self.launchers[place]
        told = tuple(stall for stalls in launcher.heard.values() for stall in stalls)
        seen = Observed(
            attempt_id=PAIR,
            world_size=self.size,
            ranks_here=tuple(
                ObservedRank(slot=100 + rank, rank=rank, reading=self.board(rank)) for rank in launcher.ranks
            ),
            remote=RemoteStalls(stalls=told, outdated=launcher.outdated),
        )
        verdicts = launcher.watchdog.judge(seen, self.now + launcher.clock)
        stalls = launcher.watchdog.stalls(seen, self.now + launcher.clock)
        if stalls != launcher.said:
            launcher.said = stalls
            others = [other for other in range(len(self.launchers)) if other != place]
            self.letters += [(self.now + self.latency, place, other, stalls) for other in others]
        return verdicts

    def board(self, rank: int) -> Reading:
        """Return a board as its launcher reads it, by the clock of their host."""
        if rank not in self.stopped:
            self.readings[rank] = replace(self.readings[rank], beat=self.now)
        reading = self.readings[rank]
        clock = next(launcher.clock for launcher in self.launchers if rank in launcher.ranks)
        return replace(
            reading, beat=reading.beat + clock, since=reading.since + clock, stepped=reading.stepped + clock
        )

    def deliver(self) -> None:
        due = [letter for letter in self.letters if letter[0] <= self.now]
        self.letters = [letter for letter in self.letters if letter[0] > self.now]
        for _, sender, to, stalls in due:
            self.launchers[to].heard[sender] = stalls

    def wait(self, seconds: float) -> list[tuple[int, HangVerdict]]:
        """Let all launchers check every 0.1 s, one after the other, until one acts or the time is over."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            acts: list[tuple[int, HangVerdict]] = []
            for place in range(len(self.launchers)):
                self.now += TICK / len(self.launchers)
                self.deliver()
                acts += [(place, verdict) for verdict in self.check(place)]
            if acts:
                return acts
        return []


@pytest.fixture
def world() -> World:
    made = World(1, 2, 1)
    made.train()
    return made


def test_mismatched_collectives_are_found_within_a_second(
    world: World,
) -> None:
    """One launcher ends the attempt."""
    world.enter(A.VOTE, 1)
    since = world.now
    assert world.wait(0.1) == []  # the others still compute
    world.enter(A.AVERAGE, 0, 2, 3)
    ((place, verdict),) = world.wait(5)
    assert world.now - since <= 1.0
    assert (place, verdict.slot, verdict.rank, verdict.kills) == (1, 101, 1, False)
    assert verdict.message == (
        f"rank 1 has waited for {verdict.seconds:.1f} s in vote after step 20 (deadline 0.68 s);"
        " waiting: ranks 0, 2, 3 for its gradients: each waits for the other"
    )
    assert world.wait(100) == [], "nobody else acts"


def test_resolved_deadlock_is_judged_again_when_it_returns(world: World) -> None:
    world.enter(A.AVERAGE)
    assert world.wait(0.65) == []
    world.step()
    world.train(5)
    world.enter(A.AVERAGE)
    assert [verdict.rank for _, verdict in world.wait(1)] == [3]


def test_rank_in_the_same_collective_as_the_others_is_named(world: World) -> None:
    world.enter(A.AVERAGE)
    ((place, verdict),) = world.wait(5)
    assert (place, verdict.rank) == (2, 3)


@pytest.mark.parametrize("activity", [A.DATA, A.EVALUATION, A.CHECKPOINT, A.PARKED, A.DONE])
def test_nobody_is_blamed_while_one_rank_anywhere_is_outside(world: World, activity: Activity) -> None:
    world.enter(A.AVERAGE)
    world.enter(activity, 3)
    assert world.wait(100) == []


def test_who_waits_in_vain_for_one_that_computes_is_not_blamed(world: World) -> None:
    world.enter(A.AVERAGE, 0, 1, 2)
    since = world.now
    ((place, verdict),) = world.wait(5)
    assert (place, verdict.rank, verdict.kills) == (2, 3, True)
    assert world.now - since <= 1.0
    assert verdict.message.endswith("; waiting: ranks 0, 1, 2 for its gradients")


def test_a_launcher_that_is_not_heard_is_unknown(world: World) -> None:
    world.enter(A.AVERAGE)
    world.enter(A.VOTE, 1)
    for launcher in world.launchers:
        launcher.outdated = True
    assert world.wait(100) == []
    world.launchers[1].outdated = False
    assert [verdict.rank for _, verdict in world.wait(1)] == [1]


def test_launcher_without_stall_reports_is_unknown_for_a_while(world: World) -> None:
    """After the longest deadline, its ranks count as stalled."""
    world.launchers[2].watchdog.settings = HangSettings(enabled=False)
    for launcher in world.launchers[:2]:
        launcher.watchdog.settings = HangSettings(startup=60, data=60, checkpoint=60, evaluation=60, min_step=1)
    world.enter(A.AVERAGE)
    assert world.wait(60) == []
    assert all(not verdict.kills for _, verdict in world.wait(5))


def test_what_was_taken_back_counts_no_more(world: World) -> None:
    world.enter(A.AVERAGE)
    world.wait(0.5)
    world.enter(A.EVALUATION, 3)
    assert world.wait(100) == []


def test_a_rank_that_shows_no_sign_of_life_is_blamed_alone(world: World) -> None:
    """The others wait for that rank in a collective of the script, so all ranks are late."""
    world.stopped.add(3)
    acts = world.wait(5)
    assert [(place, verdict.rank) for place, verdict in acts] == [(2, 3)]


def test_no_hurry_if_no_rank_of_any_launcher_would_remain(world: World) -> None:
    assert world.wait(8.3) == []  # for example, all compile again
    assert len(world.wait(0.5)) > 0


def test_ranks_stopped_under_every_launcher_are_ended(world: World) -> None:
    world.stopped.update(range(world.size))
    assert world.wait(8.3) == []
    assert len(world.wait(1.0)) > 0


def test_a_silent_launcher_saves_only_who_shows_signs_of_life(world: World) -> None:
    world.enter(A.AVERAGE, 1, 2, 3)
    world.launchers[0].outdated = True
    assert world.wait(100) == []
    world.stopped.add(0)
    assert [verdict.rank for _, verdict in world.wait(2)] == [0]


def test_stalls_travel_with_what_launchers_say_of_themselves() -> None:
    stall = Stall(attempt_id=PAIR, rank=3, activity=A.VOTE, step=9, silent=False, seconds=0.6, deadline=0.85)
    hello = Hello(stalls=(stall,))
    assert messages.from_json(messages.to_json(hello)) == hello
    older = {name: value for name, value in messages.to_json(hello).items() if name != "stalls"}
    assert messages.from_json(older) == Hello()
    with pytest.raises(DocumentError):
        messages.from_json({**older, "stalls": [{"rank": 3}]})


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(
    base=st.floats(0.01, 2.0),
    share=st.floats(0.0, 1.0),
    launchers=st.lists(st.integers(1, 2), min_size=2, max_size=3),
    latency=st.floats(0.0, 0.4),
    seed=st.integers(0, 2**32),
)
def test_no_schedule_with_progress_is_ever_judged_hung(
    base: float, share: float, launchers: list[int], latency: float, seed: int
) -> None:
    """Stragglers at three times the usual step, evaluations, slow networks. Launchers check and receive at any
    time."""
    dice = random.Random(seed)
    world, deaf = World(*launchers, latency=latency), dice.choice([0.0, 0.3])
    looks = [0.0] * len(launchers)
    for _ in range(25):
        began, done = world.now, {}
        for rank in range(world.size):
            takes = base * dice.uniform(0.8, 1.2) * (2.5 if dice.random() < share else 1)
            done[rank] = began + takes
        guest = dice.randrange(world.size) if dice.random() < 0.1 else None  # evaluates before it computes
        pause = 0.0 if guest is None else dice.uniform(0, 20 * base)
        travels = base * dice.uniform(0, 0.5)
        end = max(at + (pause if rank == guest else 0.0) for rank, at in done.items()) + travels
        changes = [(at + (pause if rank == guest else 0.0), rank, A.AVERAGE) for rank, at in done.items()]
        if guest is not None:
            world.enter(A.EVALUATION, guest)
            changes.append((began + pause, guest, A.COMPUTE))
        changes.sort()
        while min(looks) < end:
            place = looks.index(min(looks))
            moment = looks[place]
            while changes and changes[0][0] <= moment:
                world.now, rank, activity = changes.pop(0)
                world.enter(activity, rank)
            world.now = moment
            world.deliver()
            world.launchers[place].outdated = dice.random() < deaf
            assert world.check(place) == ()
            looks[place] += dice.uniform(0.1, 0.2)
        for at, rank, activity in changes:
            world.now = at
            world.enter(activity, rank)
        world.now = end
        world.step()
