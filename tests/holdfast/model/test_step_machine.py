"""The protocol of one step as pure transitions: no order of faults loses an applied step, or applies one twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from steps import NOTHING, Attempt, Process, Steps, ViolationError, WeakenedRules

from holdfast.core.errors import InvariantError
from holdfast.training.protocol.step_commit import RankState

PLACES = st.integers(min_value=0, max_value=7)
MOST_ALIVE = 5

BOUNDED = settings(
    derandomize=True,
    max_examples=300,
    stateful_step_count=80,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Machine(RuleBasedStateMachine):
    """Any order of steps, deaths, worlds, new processes and stale processes."""

    weakened = NOTHING

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps(3, self.weakened)
        self.join(self.steps.open(self.steps.alive()))

    def some(self, place: int) -> Process:
        alive = self.steps.alive() or [self.steps.new_process()]
        return alive[place % len(alive)]

    def world(self, place: int) -> Attempt:
        recent = list(self.steps.attempts.values())[-3:]
        return recent[-1 - place % len(recent)]

    def join(self, attempt: Attempt) -> None:
        for member in attempt.members:
            self.steps.enter(member, attempt)
        for act in (self.steps.settle, self.steps.copy):
            for member in attempt.members:
                act(member)

    # No faults

    @rule(place=PLACES, count=st.integers(min_value=1, max_value=3))
    def whole_steps(self, place: int, count: int) -> None:
        s = self.steps
        members = self.world(place).members
        for act in (s.average, s.prepare, s.vote, s.vote_returns) * count:
            for member in members:
                act(member)

    @rule(place=PLACES)
    def everybody_joins(self, place: int) -> None:
        self.join(self.world(place))

    # One transition of one process

    @rule(place=PLACES, who=PLACES)
    def enter(self, place: int, who: int) -> None:
        self.steps.enter(self.some(who), self.world(place))

    @rule(who=PLACES, mark=st.booleans())
    def settle(self, who: int, mark: bool) -> None:
        self.steps.settle(self.some(who), mark=mark)

    @rule(who=PLACES)
    def copy(self, who: int) -> None:
        self.steps.copy(self.some(who))

    @rule(place=PLACES, most=PLACES)
    def average(self, place: int, most: int) -> None:
        for member in self.world(place).members[: 1 + most]:
            self.steps.average(member)

    @rule(who=PLACES)
    def prepare(self, who: int) -> None:
        self.steps.prepare(self.some(who))

    @rule(who=PLACES)
    def vote(self, who: int) -> None:
        self.steps.vote(self.some(who))

    @rule(who=PLACES)
    def vote_returns(self, who: int) -> None:
        self.steps.vote_returns(self.some(who))

    # Worlds and faults

    @rule(members=st.sets(PLACES, min_size=1, max_size=4), new=st.integers(0, 2), generation=st.booleans())
    def next_world(self, members: set[int], new: int, generation: bool) -> None:
        chosen = dict.fromkeys(self.some(place) for place in sorted(members))
        room = MOST_ALIVE - len(self.steps.alive())
        chosen.update(dict.fromkeys(self.steps.new_process() for _ in range(min(new, room))))
        self.steps.open(chosen, generation=generation)

    @rule(who=PLACES)
    def kill(self, who: int) -> None:
        self.steps.kill(self.some(who))

    @rule(who=PLACES)
    def fail(self, who: int) -> None:
        self.steps.fail(self.some(who))

    @rule(who=PLACES, when=st.sampled_from(["optimizer", "copy"]))
    def tear(self, who: int, when: str) -> None:
        act: Callable[..., None] = self.steps.copy if when == "copy" else self.steps.vote_returns
        act(self.some(who), tears=True)

    @invariant()
    def holds(self) -> None:
        self.steps.check()


@pytest.mark.thorough
def test_no_order_of_faults_loses_a_step_or_applies_one_twice() -> None:
    run_state_machine_as_test(Machine, settings=BOUNDED)  # type: ignore[no-untyped-call]


# Each rule is needed: without it, and with the same faults, a step is lost, doubled or contradicted.


def three(weakened: WeakenedRules) -> tuple[Steps, list[Process]]:
    """Three ranks completed one step."""
    steps = Steps(3, weakened)
    world(steps, 0, 1, 2)
    together(steps, steps.average, steps.prepare, steps.vote, steps.vote_returns)
    return steps, steps.processes


def world(steps: Steps, *ranks: int) -> Attempt:
    attempt = steps.open(steps.processes[rank] for rank in ranks)
    for act in (lambda member: steps.enter(member, attempt), steps.settle, steps.copy):
        for member in attempt.members:
            act(member)
    return attempt


def together(steps: Steps, *acts: Callable[[Process], None]) -> None:
    for act in acts:
        for process in steps.alive():
            act(process)


def an_average_that_only_one_got(weakened: WeakenedRules) -> Steps:
    steps, (first, _, _) = three(weakened)
    together(steps, steps.average)
    steps.prepare(first)
    steps.kill(first)
    world(steps, 1, 2)
    return steps


def a_step_rolled_forward_without_the_laggard(weakened: WeakenedRules) -> Steps:
    steps, (first, _, _) = three(weakened)
    together(steps, steps.average)
    steps.prepare(first)
    steps.vote(first)
    world(steps, 0)
    world(steps, 0, 1)
    return steps


def an_idle_world_of_old_states(weakened: WeakenedRules) -> Steps:
    steps, _ = three(weakened)
    world(steps, 0)
    together(steps, steps.average, steps.prepare, steps.vote, steps.vote_returns)
    world(steps, 1, 2)
    world(steps, 0, 1, 2)
    return steps


def a_doubt_that_was_settled(weakened: WeakenedRules) -> Steps:
    steps, _ = three(weakened)
    together(steps, steps.average, steps.prepare, steps.vote)
    world(steps, 0, 1, 2)
    world(steps, 0, 1, 2)
    return steps


def a_vote_after_leaving(weakened: WeakenedRules) -> Steps:
    steps, (first, second, third) = three(weakened)
    together(steps, steps.average)
    for process in (first, second):
        steps.prepare(process)
        steps.vote(process)
    steps.enter(third, steps.open([third]))
    steps.prepare(third)
    steps.vote(third)
    steps.vote_returns(first)
    return steps


def a_failure_between_applying_and_marking(weakened: WeakenedRules) -> Steps:
    steps, (first, second, third) = three(weakened)
    together(steps, steps.average)
    for process in (first, second):
        steps.prepare(process)
        steps.vote(process)
    attempt = steps.open([first, second])
    for process in (first, second):
        steps.enter(process, attempt)
    steps.settle(first, mark=False)
    attempt = steps.open([first, second, third])
    for process in (first, second, third):
        steps.enter(process, attempt)
    return steps


def a_donor_that_dies_while_it_gives(weakened: WeakenedRules) -> Steps:
    steps, (first, second, third) = three(weakened)
    world(steps, 0, 1, 2)
    together(steps, steps.average)
    steps.prepare(first)
    steps.vote(first)
    attempt = steps.open([first, second, third])
    for process in (first, second, third):
        steps.enter(process, attempt)
    steps.copy(second)
    steps.copy(third)
    steps.kill(first)
    world(steps, 1, 2)
    return steps


NEEDED = [
    (an_average_that_only_one_got, WeakenedRules(vote=True), "goes on without it"),
    (a_step_rolled_forward_without_the_laggard, WeakenedRules(synced_mark=True), "disagree"),
    (an_idle_world_of_old_states, WeakenedRules(voted_mark=True), "goes on without it"),
    (a_doubt_that_was_settled, WeakenedRules(doubts_with_unequal_marks=True), "twice"),
    (a_vote_after_leaving, WeakenedRules(leave_before_showing=True), "goes on without it"),
    (a_failure_between_applying_and_marking, WeakenedRules(settle_and_mark_as_one=True), "disagree"),
    (a_donor_that_dies_while_it_gives, WeakenedRules(keep_until_all_arrived=True), "goes on without it"),
]


@pytest.mark.parametrize(("story", "weakened", "broken"), NEEDED)
def test_each_rule_is_needed(
    story: Callable[[WeakenedRules], Steps], weakened: WeakenedRules, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    story(NOTHING).check()
    if weakened.doubts_with_unequal_marks:
        monkeypatch.setattr(RankState, "in_doubt", property(lambda self: self.prepared_step is not None))
    with pytest.raises((ViolationError, InvariantError), match=broken):
        story(weakened).check()
