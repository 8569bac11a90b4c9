"""A container that is out of memory is one incident, even if several launchers report several of its processes."""

from __future__ import annotations

from failing_jobs import training
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Make, Sim

from holdfast_operator.api import names as c
from holdfast_operator.api.times import format_time

POD = "gpt-w2"
OOM = ("OOM", "OutOfMemory", POD)
GONE = ("Infrastructure", "MemberLost", POD)
MISSED = ("Infrastructure", "PeerLost", "gpt-w0")


def ended(sim: Sim, word: tuple[str, str, str], part_of: tuple[int, int] | None = None) -> tuple[int, int]:
    """End the world, and let the remaining launchers report why. Return its attempt."""
    attempt_id = (sim.world["generation"], sim.world["attempt"])
    sim.world = None
    tell(sim, attempt_id, word, part_of)
    return attempt_id


def tell(
    sim: Sim, attempt_id: tuple[int, int], word: tuple[str, str, str], part_of: tuple[int, int] | None = None
) -> None:
    cause, reason, pod = word
    sim.incidents[attempt_id] = {
        "generation": attempt_id[0],
        "attempt": attempt_id[1],
        "cause": cause,
        "action": "InPlace",
        "reason": reason,
        "message": f"{pod}: {reason}",
        "pod": pod,
        "rank": 2,
        "exitCode": None,
        "node": None,
        "detectedTime": format_time(sim.now),
        "resumedTime": None,
        "lostSteps": None,
        "partOf": {"generation": part_of[0], "attempt": part_of[1]} if part_of else None,
    }
    sim.report()
    sim.settle()


def test_step_that_is_repeated_with_more_memory_is_listed_and_not_counted(make_sim: Make) -> None:
    sim = training(make_sim, budgets=[{"cause": "OOM", "maxRestarts": 0}])
    for _ in range(3):
        ended(sim, ("OOM", "OutOfMemoryRetried", POD))
        sim.run(30, until=lambda: sim.world is not None)
    assert [incident.decision for incident in sim.status.incidents] == ["IgnoreByDefault"] * 3
    assert counted(sim) == {}
    assert sim.status.backoff_until is None
    assert not sim.status.terminal
    ended(sim, OOM)
    sim.run(30, until=lambda: sim.status.terminal)
    assert sim.status.condition("Failed").reason == "OOMBudgetExceeded"


def counted(sim: Sim) -> dict[str, int]:
    return {count.cause: len(count.times) for count in sim.status.incidents_by_cause if count.times}


def exhaust(sim: Sim, *, ends: int = 3) -> None:
    """The kernel ends a rank, the one that takes its place, and the launcher with the container."""
    first = ended(sim, OOM)
    for _ in range(ends - 2):
        sim.tick()
        ended(sim, OOM, first)
    sim.tick()
    sim.end(POD, 137, reason="OOMKilled")
    ended(sim, GONE, first)


def acknowledged(sim: Sim) -> set[tuple[int, int]]:
    assert sim.document is not None
    return {(attempt_id["generation"], attempt_id["attempt"]) for attempt_id in sim.document["acknowledged"]}


def test_ends_of_one_exhaustion_are_one_incident(trained: Sim) -> None:
    """All of them are acknowledged."""
    exhaust(trained)
    trained.run(60, until=lambda: len(trained.world_names()) == 3)
    trained.run(20)
    assert counted(trained) == {"OOM": 1}
    (incident,) = trained.status.incidents
    assert (incident.cause, incident.pod, incident.action) == ("OOM", POD, "RecreatePod")
    assert incident.resumed is not None
    assert {(1, 1), (1, 2), (1, 3)} <= acknowledged(trained)
    assert "gpt-w3" in trained.names()


def test_containers_end_belongs_to_the_exhaustion(trained: Sim) -> None:
    """The kubelet may report a plain kill."""
    ended(trained, OOM)
    trained.tick()
    trained.world = None
    trained.end(POD, 137)
    trained.run(40)
    assert counted(trained) == {"OOM": 1}


def test_a_container_that_ends_long_after_is_another_incident(trained: Sim) -> None:
    ended(trained, OOM)
    trained.run(c.SAME_EXHAUSTION.total_seconds() + 1)
    trained.end(POD, 137, reason="OOMKilled")
    trained.run(40)
    assert counted(trained) == {"OOM": 2}


def test_a_part_of_what_nobody_told_is_an_incident_of_its_own(trained: Sim) -> None:
    ended(trained, OOM, (1, 0))
    trained.run(10)
    assert counted(trained) == {"OOM": 1}


def test_oom_kill_replaces_lost_peers_reported_before(trained: Sim) -> None:
    attempt_id = ended(trained, MISSED)
    assert counted(trained) == {"Infrastructure": 1}
    tell(trained, attempt_id, OOM)
    assert counted(trained) == {"OOM": 1}
    (incident,) = trained.status.incidents
    assert (incident.cause, incident.reason, incident.pod) == ("OOM", "OutOfMemory", POD)
    tell(trained, attempt_id, MISSED)
    assert counted(trained) == {"OOM": 1}, "and never go back"


def test_container_rule_matches_a_counted_exhaustion(make_sim: Make) -> None:
    """The container's end is counted with its ranks."""
    rule = {"name": "leaks", "action": "FailJob", "onOOM": "Container"}
    sim = make_sim(recovery={"rules": [rule]})
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    exhaust(sim)
    sim.run(10)
    assert sim.status.holds("Failed")
    assert "leaks" in sim.status.condition("Failed").message


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.sampled_from([OOM, MISSED]),
    more=st.lists(st.tuples(st.sampled_from([OOM, MISSED, GONE]), st.integers(1, 2)), max_size=2),
    late=st.integers(0, 1),
)
def test_however_it_is_told_it_is_counted_once(
    make_sim: Make, first: tuple[str, str, str], more: list[tuple[tuple[str, str, str], int]], late: int
) -> None:
    sim = make_sim()
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    began = ended(sim, first)
    tell(sim, began, OOM)
    for word, seconds in more:
        sim.run(seconds)
        ended(sim, word, began)
        sim.run(late)
    sim.tick()
    sim.world = None
    sim.end(POD, 137, reason="OOMKilled")
    sim.run(40)
    assert counted(sim) == {"OOM": 1}
    assert len(sim.status.incidents) == 1
