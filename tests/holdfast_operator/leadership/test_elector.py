"""Who leads. The rules one by one, then whole elections in which calls are lost, answers too, and processes sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_operator.errors import ClusterError, ConflictError
from holdfast_operator.leadership.elector import Callbacks, Elector
from holdfast_operator.leadership.lease import (
    Lease,
    LeaseTimings,
    LeaseView,
    Step,
    body_of,
    decide,
    given_back,
    held,
    leads,
    lease_of,
    seen,
)

TERMS = LeaseTimings()
OTHERS = Lease(holder="b", renewed="10:00", version="7")
OURS = replace(OTHERS, holder="a")


@pytest.mark.parametrize(
    ("lease", "step"),
    [
        (None, Step.TAKE),
        (replace(OTHERS, holder=""), Step.TAKE),
        (OURS, Step.TAKE),
        (OTHERS, Step.WAIT),
    ],
)
def test_a_lease_that_is_nobodys_or_was_ours_is_taken_at_once(lease: Lease | None, step: Step) -> None:
    assert decide(LeaseView(lease=lease, since=100.0), 100.0, "a", TERMS).step is step


def test_lease_is_taken_after_its_duration_unchanged() -> None:
    sight = LeaseView(lease=replace(OTHERS, seconds=40), since=100.0)
    assert decide(sight, 140.0, "a", TERMS).step is Step.WAIT
    decision = decide(sight, 140.1, "a", TERMS)
    assert (decision.step, decision.why) == (Step.TAKE, "b has not renewed the Lease for 40 s")


def test_only_a_change_of_the_lease_begins_its_time_anew() -> None:
    first = seen(LeaseView(), OTHERS, 100.0)
    same = seen(first, replace(OTHERS, version="8"), 105.0)
    assert same.since == 100.0
    assert same.lease is not None
    assert same.lease.version == "8", "the version is what a write refers to"
    assert seen(same, replace(OTHERS, renewed="10:01"), 107.0).since == 107.0


def test_the_times_in_a_lease_mean_nothing() -> None:
    for renewed in ("", "1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"):
        sight = LeaseView(lease=replace(OTHERS, renewed=renewed), since=100.0)
        assert decide(sight, 101.0, "a", TERMS).step is Step.WAIT


@pytest.mark.parametrize(
    ("lease", "at", "why"),
    [
        (OURS, 110.0, "could not be renewed for 10 s"),
        (OTHERS, 101.0, "b holds the Lease now"),
        (replace(OTHERS, holder=""), 101.0, "nobody holds"),
        (None, 101.0, "deleted"),
    ],
)
def test_a_leader_that_has_lost_the_lease_ends_and_says_why(lease: Lease | None, at: float, why: str) -> None:
    decision = decide(LeaseView(lease=lease, renewed_at=100.0), at, "a", TERMS)
    assert decision.step is Step.END
    assert why in decision.why


def test_a_leader_renews() -> None:
    assert decide(LeaseView(lease=OURS, renewed_at=100.0), 109.9, "a", TERMS).step is Step.RENEW


@pytest.mark.parametrize("seconds", [1, 5, 15, 60])
def test_a_leader_has_ended_before_another_one_may_take_over(seconds: int) -> None:
    terms = LeaseTimings(lease_seconds=seconds)
    last_call_ends = terms.give_up_seconds + sum(terms.call_seconds)
    assert last_call_ends == pytest.approx(seconds)
    assert 3 * terms.round_seconds < terms.give_up_seconds, "one lost call is no reason to end"


def test_what_is_written_comes_back() -> None:
    taken = held(OTHERS, me="a", url="https://10.0.0.9:8443", at="10:05", terms=TERMS)
    assert (taken.holder, taken.acquired, taken.transitions, taken.version) == ("a", "10:05", 1, "7")
    assert lease_of(body_of(taken, "ops")) == taken
    renewed = held(taken, me="a", url=taken.url, at="10:06", terms=TERMS)
    assert (renewed.acquired, renewed.renewed, renewed.transitions) == ("10:05", "10:06", 1)
    back = given_back(renewed, at="10:07")
    assert (back.holder, back.url, back.version) == ("", "", "7")
    assert "resourceVersion" not in body_of(held(None, me="a", url="", at="10:00", terms=TERMS), "ops")["metadata"]


def test_a_lease_that_somebody_edited_is_read() -> None:
    assert lease_of({"metadata": {"name": "x"}}) == Lease(holder="", seconds=15)
    assert lease_of({"spec": {"leaseDurationSeconds": -3}}).seconds == 1


# Whole elections


@dataclass(kw_only=True)
class World:
    """One Lease, and a clock for all. Calls take time, and may be lost on their way there or back."""

    clock: float = 0.0
    lease: Lease | None = None
    version: int = 0
    there: float = 0.0
    back: float = 0.0
    lost: str = ""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.clock)

    def read(self) -> Lease | None:
        return self._call(lambda: self.lease)

    def write(self, lease: Lease) -> Lease:
        def store() -> Lease:
            if lease.version != (self.lease.version if self.lease else ""):
                raise ConflictError("somebody was faster")
            self.version += 1
            self.lease = replace(lease, version=str(self.version))
            return self.lease

        return self._call(store)

    def _call(self, answer: Callable[[], Any]) -> Any:
        self.clock += self.there
        if self.lost == "there":
            raise ClusterError("no answer")
        found = answer()
        self.clock += self.back
        if self.lost == "back":
            raise ClusterError("no answer")
        return found


@dataclass(kw_only=True)
class Replica:
    """A process: an elector and what became of it."""

    world: World
    name: str
    ends: list[str] = field(default_factory=list)
    elected: int = 0
    follows: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        calls = Callbacks(elected=self._elect, ended=self.ends.append, follows=self.follows.append)
        self.elector = Elector(
            self.world,
            calls,
            me=self.name,
            url=f"https://{self.name}",
            terms=TERMS,
            now=self.world.now,
            clock=lambda: self.world.clock,
        )

    def _elect(self) -> None:
        self.elected += 1

    def round(self) -> float:
        return self.elector.round() if not self.ends else 0.0

    def leads(self) -> bool:
        return not self.ends and self.elector.leads()


def test_the_second_stands_by_and_knows_the_way_to_the_first() -> None:
    world = World()
    a, b = Replica(world=world, name="a"), Replica(world=world, name="b")
    a.round()
    b.round()
    assert (a.leads(), b.leads(), b.follows) == (True, False, ["https://a"])


def test_killed_leader_is_succeeded_after_its_lease() -> None:
    """It does not happen earlier."""
    world = World()
    a, b = Replica(world=world, name="a"), Replica(world=world, name="b")
    a.round()
    while not b.leads():
        world.clock += 2.0
        b.round()
    assert 15 < world.clock <= 15 + 2 * 2.0
    assert world.lease is not None
    assert (world.lease.holder, world.lease.transitions) == ("b", 1)


@pytest.mark.parametrize(("list_seconds", "waits"), [(3.0, 15.0), (20.0, 20.0)])
def test_time_of_the_first_list_counts_as_leaderless(list_seconds: float, waits: float) -> None:
    world = World()
    Replica(world=world, name="a").round()
    b = Replica(world=world, name="b")
    b.elector.look()
    world.clock += list_seconds
    b.round()
    while not b.leads():
        world.clock += 2.0
        b.round()
    assert waits <= world.clock <= waits + 2 * 2.0


def test_a_leader_that_renews_while_another_one_lists_leads_on() -> None:
    world = World()
    a, b = Replica(world=world, name="a"), Replica(world=world, name="b")
    a.round()
    b.elector.look()
    for _ in range(20):
        world.clock += 2.0
        a.round()
    b.round()
    assert (a.leads(), b.leads()) == (True, False)


def test_a_look_that_nobody_answers_is_made_later() -> None:
    world = World(lost="there")
    a = Replica(world=world, name="a")
    a.elector.look()
    world.lost = ""
    a.round()
    assert a.leads()


def test_a_lease_that_is_given_back_is_taken_in_the_next_round() -> None:
    world = World()
    a, b = Replica(world=world, name="a"), Replica(world=world, name="b")
    a.round()
    a.elector.stop(give_back=True)
    b.round()
    assert (a.leads(), b.leads()) == (False, True)


def test_who_still_acts_gives_nothing_back() -> None:
    world = World()
    a, b = Replica(world=world, name="a"), Replica(world=world, name="b")
    a.round()
    a.elector.stop(give_back=False)
    b.round()
    assert not b.leads()


def test_a_process_started_anew_under_its_name_leads_on_at_once() -> None:
    world = World()
    Replica(world=world, name="a").round()
    again = Replica(world=world, name="a")
    again.round()
    assert again.leads()
    assert world.lease is not None
    assert world.lease.transitions == 0


def test_a_leader_that_slept_does_not_act_and_ends_when_it_wakes() -> None:
    world = World()
    a, b = Replica(world=world, name="a"), Replica(world=world, name="b")
    a.round()
    b.round()
    world.clock += 16
    assert not a.leads(), "before its thread has looked at anything"
    b.round()
    a.round()
    assert a.ends
    assert b.leads()


def test_one_lost_answer_costs_nothing() -> None:
    world = World()
    a = Replica(world=world, name="a")
    a.round()
    for lost in ("back", "", "there", "", "back", "", ""):
        world.clock, world.lost = world.clock + 2.0, lost
        a.round()
    assert (a.leads(), a.elected, a.ends) == (True, 1, [])


@pytest.mark.parametrize("outdated", [False, True])
@given(begin=st.floats(0, 2), call=st.floats(0, sum(TERMS.call_seconds)))
def test_isolated_leader_ends_before_another_may_lead(outdated: bool, begin: float, call: float) -> None:
    world = World()
    a = Replica(world=world, name="a")
    a.round()
    world.clock += begin
    if outdated:
        assert world.lease is not None
        world.lease = replace(world.lease, version="edited by somebody")
        pause = a.round()
        world.clock += pause
    world.lost, world.there = "there", call
    for _ in range(100):
        pause = a.round()
        if a.ends:
            break
        world.clock += pause
    assert world.clock <= TERMS.lease_seconds + 1e-6
    assert a.ends == ["the Lease could not be renewed for 10 s"]


STEPS = st.tuples(
    st.sampled_from("abc"),
    st.floats(0, 6),
    st.sampled_from(["", "", "", "", "there", "back"]),
    st.floats(0, 2),
    st.floats(0, 3),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_at_no_time_do_two_lead(steps: list[tuple[str, float, str, float, float, bool]]) -> None:
    world = World()
    replicas = {name: Replica(world=world, name=name) for name in "abc"}
    for name, pause, lost, there, back, gone in steps:
        world.clock += pause
        assert sum(replica.leads() for replica in replicas.values()) <= 1
        world.lost, world.there, world.back = lost, there, back
        if gone:
            replicas[name] = Replica(world=world, name=name)
            replicas[name].elector.look()
            continue
        replicas[name].round()
        assert sum(replica.leads() for replica in replicas.values()) <= 1


def test_election_clock_runs_while_the_machine_sleeps() -> None:
    from holdfast_operator.runtime.clock import uptime

    before = uptime()
    with open("/proc/uptime") as file:  # noqa: PTH123 - not a regular file
        shown = float(file.read().split()[0])  # in hundredths, cut off
    assert before - 0.02 <= shown <= uptime()


def test_nobody_leads_who_was_never_elected() -> None:
    assert not leads(LeaseView(lease=OURS), 0.0, TERMS)
