"""One memory exhaustion of a container is one incident, however many of its processes the kernel kills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership import events
from holdfast.launcher.membership.document import Budget
from holdfast.launcher.membership.messages import Failure, Incident, Priority, Remedy
from holdfast.launcher.membership.oom_incidents import GAP, SPAN, better, noted

KINDS = {
    "OutOfMemory": (Cause.OOM, Priority.OOM),
    "MemberLost": (Cause.INFRASTRUCTURE, Priority.MEMBER_LOST),
    "RankKilled": (Cause.INFRASTRUCTURE, Priority.KILLED),
    "PeerLost": (Cause.INFRASTRUCTURE, Priority.PEER_LOST),
    "Exception": (Cause.APPLICATION, Priority.EXCEPTION),
    "Drained": (Cause.INTERRUPTION, Priority.MEMBER_LOST),
}


def failure(reason: str, pod: str) -> Failure:
    cause, priority = KINDS[reason]
    return Failure(cause=cause, reason=reason, message=reason, priority=priority, pod=pod, exit_code=137)


def ends(*told: tuple[float, str, str]) -> list[AttemptId | None]:
    """Return the attempt ID of the incident to which each end (time, reason, pod) belongs."""
    known, found = None, []
    for attempt, (at, reason, pod) in enumerate(told, start=1):
        incident = Incident(
            attempt_id=AttemptId(1, attempt), failure=failure(reason, pod), action=Remedy.WAIT, detected=at
        )
        known = noted(known, incident)
        assert noted(known, incident) == known, "hearing it again changes nothing"
        found.append(None if known is None else known.counted_with(incident.attempt_id))
    return found


def test_kernel_ends_a_rank_then_another_and_the_launcher() -> None:
    """All three ends are one incident."""
    assert ends((0.0, "OutOfMemory", "w2"), (0.4, "OutOfMemory", "w2"), (0.9, "MemberLost", "w2")) == [
        None,
        AttemptId(1, 1),
        AttemptId(1, 1),
    ]


@pytest.mark.parametrize(
    ("known", "told", "kept"),
    [
        ("OutOfMemory", "PeerLost", "OutOfMemory"),
        ("OutOfMemory", "Exception", "Exception"),
        ("Exception", "PeerLost", "PeerLost"),
        (None, "PeerLost", "PeerLost"),
    ],
)
def test_a_lost_peer_does_not_replace_a_memory_exhaustion(known: str | None, told: str, kept: str) -> None:
    before = None if known is None else failure(known, "w2")
    assert better(before, failure(told, "w0")).reason == kept


@pytest.mark.parametrize(
    ("reason", "pod", "part"),
    [
        ("PeerLost", "w0", True),
        ("RankKilled", "w2", True),
        ("MemberLost", "w0", False),
        ("RankKilled", "w0", False),
        ("OutOfMemory", "w0", False),
        ("Exception", "w2", False),
        ("Drained", "w2", False),
    ],
)
def test_only_the_same_pod_or_an_unknown_cause_joins_it(reason: str, pod: str, part: bool) -> None:
    (_, found) = ends((0.0, "OutOfMemory", "w2"), (1.0, reason, pod))
    assert (found == AttemptId(1, 1)) is part


def test_oom_after_the_default_pause_is_counted_again() -> None:
    assert ends((0.0, "OutOfMemory", "w2"), (GAP, "OutOfMemory", "w2")) == [None, None]


def test_lost_peers_by_themselves_are_part_of_nothing() -> None:
    assert ends((0.0, "PeerLost", "w0"), (0.1, "PeerLost", "w0")) == [None, None]


@given(
    told=st.lists(
        st.tuples(st.floats(0.0, 4.0), st.sampled_from(sorted(KINDS)), st.sampled_from(["w0", "w1"])), max_size=12
    )
)
def test_nothing_of_its_own_is_ever_swallowed(told: list[tuple[float, str, str]]) -> None:
    at, timed = 0.0, []
    for pause, reason, pod in told:
        at += pause
        timed.append((at, reason, pod))
    found = ends(*timed)
    for (when, reason, pod), whole in zip(timed, found, strict=True):
        if whole is None:
            continue
        began, first, where = timed[whole.attempt - 1]
        assert first == "OutOfMemory", "it begins with a kill for memory"
        assert when - began < SPAN, "however long the chain is"
        assert reason not in {"Exception", "Drained"}
        assert reason == "PeerLost" or pod == where
    for kill, reason, pod in timed:
        counted = [
            when for (when, _, where), whole in zip(timed, found, strict=True) if whole is None and where == pod
        ]
        assert reason != "OutOfMemory" or any(when <= kill < when + SPAN for when in counted), "with its own pod's"


# Simulated launchers


def training(**settings: object) -> Simulation:
    sim = Simulation(3, replace_lost=False, **settings)  # type: ignore[arg-type]
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() >= 2)
    return sim


def kill_for_memory(sim: Simulation, uid: str) -> None:
    pod = sim.pods[uid]
    assert pod.training is not None
    attempt_id = pod.training.world.attempt_id
    pod.training.alive.discard(uid)
    pod.process = None
    pod.local.append(events.RankFailed(attempt_id=attempt_id, failure=failure("OutOfMemory", uid)))


def in_attempt(sim: Simulation, number: int, *uids: str) -> bool:
    now = sim.training_now()
    return now is not None and now.world.attempt_id == AttemptId(1, number) and sim.trains_with(*uids)


def exhaust(sim: Simulation) -> None:
    """Kill the rank of w2, its replacement, and the launcher, as the kernel does."""
    kill_for_memory(sim, "w2")
    assert sim.run(5, lambda: in_attempt(sim, 2, "w0", "w1", "w2"))
    kill_for_memory(sim, "w2")
    assert sim.run(5, lambda: in_attempt(sim, 3, "w0", "w1", "w2"))
    sim.crash("w2")
    assert sim.run(10, lambda: sim.trains_with("w0", "w1"))


def test_exhausted_container_is_counted_once_on_every_launcher() -> None:
    sim = training()
    exhaust(sim)
    for uid in ("w0", "w1"):
        state = sim.pods[uid].state
        assert [(attempt_id, cause) for attempt_id, cause, _ in state.history] == [(AttemptId(1, 1), Cause.OOM)]


def test_an_exhausted_container_spends_its_budget_once() -> None:
    sim = training(budgets=(Budget(cause=Cause.OOM, max_restarts=1, window=3600.0),))
    exhaust(sim)
    assert [pod.uid for pod in sim.alive()] == ["w0", "w1"]
    kept = {uid: [i.part_of for i in sim.pods[uid].state.incidents] for uid in ("w0", "w1")}
    assert all(part in (None, AttemptId(1, 1)) for parts in kept.values() for part in parts), kept


def test_launcher_killed_for_memory_spends_no_other_budget() -> None:
    sim = training(budgets=(Budget(cause=Cause.INFRASTRUCTURE, max_restarts=0, window=3600.0),))
    exhaust(sim)
    assert sim.trains_with("w0", "w1")


def test_late_oom_kill_outranks_the_lost_peers_reported_first() -> None:
    sim = training()
    sim.operator_up = False
    pod = sim.pods["w2"]
    assert pod.training is not None
    attempt_id = pod.training.world.attempt_id
    for uid in ("w0", "w1"):
        lost = failure("PeerLost", uid)
        sim.pods[uid].local.append(events.RankFailed(attempt_id=attempt_id, failure=lost))
    assert sim.run(5, lambda: all(one.state.failed == attempt_id for one in sim.alive()))
    sim.feed(pod, events.RankFailed(attempt_id=attempt_id, failure=failure("OutOfMemory", "w2")))
    assert sim.run(10, lambda: in_attempt(sim, 2, "w0", "w1", "w2"))
    for one in sim.alive():
        (known,) = one.state.incidents
        assert (known.failure.cause, known.failure.pod) == (Cause.OOM, "w2"), one.uid
        assert [cause for _, cause, _ in one.state.history] == [Cause.OOM]
