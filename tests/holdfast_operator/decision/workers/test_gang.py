"""All workers of a gang start together, or none holds a place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sim import Make, Sim

from holdfast_operator.api.status import operator_state
from holdfast_operator.decision.plan import CreatePod, LiftGate
from holdfast_operator.decision.snapshot import CreationError
from holdfast_operator.scheduling.waiting_gang import rival_of


def share(*sims: Any) -> None:
    """These jobs live on the same nodes."""
    for sim in sims:
        sim.nodes, sim.leases = sims[0].nodes, sims[0].leases
        sim.peers = [other for other in sims if other is not sim]


def together(sims: list[Any], seconds: int, until: Callable[[], bool]) -> None:
    for _ in range(seconds):
        if until():
            return
        for sim in sims:
            sim.tick()
    assert until(), [(sim.body["metadata"]["name"], sim.status.summary, sim.plan().message) for sim in sims]


def test_no_gate_lifts_before_all_pods_exist(sim: Sim) -> None:
    plan = sim.plan()
    assert [type(action) for action in plan.actions].count(CreatePod) == 3
    sim.apply(plan, actions=2)
    assert len(sim.names()) < 3
    assert not any(isinstance(action, LiftGate) for action in sim.plan().actions)
    sim.settle()
    assert sim.status.gang.lifted_at is not None
    assert not any("schedulingGates" in body["spec"] for body in sim.pods.values())


def test_gang_without_capacity_keeps_its_gates(make_sim: Make) -> None:
    sim = make_sim(replicas=3, nodes=1)
    sim.run(30)
    assert all(body["spec"]["schedulingGates"] for body in sim.pods.values())
    assert "capacity for 2 of 3 workers" in sim.status.condition("Ready").message
    sim.nodes["node-9"] = {**sim.nodes["node-1"], "metadata": {"name": "node-9", "labels": {}}}
    sim.leases["node-9"] = sim.now
    sim.run(30, until=lambda: len(sim.world_names()) == 3)


def test_unbound_gang_is_cancelled_with_back_off(make_sim: Make) -> None:
    """The back-off increases each time."""
    sim = make_sim(replicas=2, minimum=2)
    sim.unplaceable = True
    waits = []
    for attempt in (1, 2, 3):
        sim.run(400, until=lambda attempt=attempt: sim.status.gang.attempts == attempt)
        retry = sim.status.gang.retry_at
        assert retry is not None
        waits.append((retry - sim.now).total_seconds())
    assert waits == sorted(set(waits))
    sim.unplaceable = False
    sim.run(400, until=lambda: len(sim.world_names()) == 2)
    assert sim.status.incident_count == 0
    assert len(set(sim.created_names)) == len(sim.created_names)


def test_a_cancelled_gang_is_a_warning(make_sim: Make) -> None:
    sim = make_sim()
    sim.unplaceable = True
    sim.settle()
    sim.now += timedelta(seconds=61)
    assert ("GangTimeout", True) in [(event.reason, event.warning) for event in sim.plan().events]


def test_training_workers_are_not_cancelled_with_unbound_ones(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=2, nodes=3)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.settle()
    sim.nodes["node-3"]["cut"] = True  # the room that was counted on goes before the scheduler comes to it
    sim.run(40, until=lambda: len(sim.world_names()) == 2)
    first = sim.world_names()
    sim.run(90)
    assert sim.world_names() == first
    assert not any(worker.gated for worker in sim.status.workers)
    assert any(reason == "GangTimeout" for reason, _ in sim.events)
    sim.nodes["node-3"].pop("cut")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)


def test_without_a_gang_each_worker_keeps_its_node(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=3, scheduling={"gang": "None"})
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.nodes["node-3"]["cut"] = True
    sim.run(10)
    (left,) = (body for body in sim.pods.values() if not body["spec"].get("nodeName"))
    left["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}
    ]
    sim.run(290)
    assert not any("schedulingGates" in body["spec"] for body in sim.pods.values())
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]  # nobody is taken back
    assert sim.world_names() == []
    assert sim.status.summary == "Unschedulable"
    sim.nodes["node-3"].pop("cut")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)


def test_elastic_job_without_a_gang_starts_with_bound_workers(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=2, nodes=3, scheduling={"gang": "None"})
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.nodes["node-3"]["cut"] = True
    sim.run(120, until=lambda: len(sim.world_names()) == 2)
    sim.nodes["node-3"].pop("cut")
    sim.run(400, until=lambda: len(sim.world_names()) == 3)
    assert sim.status.incident_count == 0


def test_two_gangs_of_two_thirds_each_both_finish(make_sim: Make) -> None:
    """Submitted together on three places: the older trains, the younger holds nothing, then trains as well."""
    older, younger = (make_sim(name=name, replicas=2, minimum=2, nodes=3) for name in ("alpha", "beta"))
    for node in older.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    share(older, younger)
    together([younger, older], 60, lambda: len(older.world_names()) == 2)
    assert not younger.running()
    assert younger.status.summary == "WaitingForCapacity"
    older.complete_at = older.step + 3
    together([younger, older], 60, lambda: older.status.holds("Complete"))
    together([younger, older], 90, lambda: len(younger.world_names()) == 2)
    younger.complete_at = younger.step + 3
    together([younger, older], 60, lambda: younger.status.holds("Complete"))


def two_of_two_thirds(make_sim: Make, *, priority: int, lingers: int = 0) -> tuple[Any, Any]:
    """One that trains on two of three places, and a younger one, of this priority, that wants two as well."""
    first, urgent = (make_sim(name=name, replicas=2, minimum=2, nodes=3) for name in ("alpha", "beta"))
    for node in first.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    first.lingers, urgent.priority = timedelta(seconds=lingers), priority
    share(first, urgent)
    together([first], 60, lambda: len(first.world_names()) == 2)
    return first, urgent


def test_higher_priority_uses_capacity_of_a_lower_one(make_sim: Make) -> None:
    first, urgent = two_of_two_thirds(make_sim, priority=10)
    together([urgent, first], 60, lambda: len(urgent.world_names()) == 2)
    together([urgent, first], 30, lambda: bool(first.status.incidents))
    assert [(told.cause, told.reason) for told in first.status.incidents] == [
        ("Interruption", "PreemptionByScheduler")
    ]
    assert urgent.status.gang.attempts == 0
    for _ in range(90):
        urgent.tick()
        first.tick()
    assert len(urgent.world_names()) == 2, "what it displaced waits behind it"
    urgent.complete_at = urgent.step + 3
    together([urgent, first], 120, lambda: len(first.world_names()) == 2)
    assert first.status.incident_count == 1


def test_a_gang_of_the_same_priority_displaces_nobody(make_sim: Make) -> None:
    first, other = two_of_two_thirds(make_sim, priority=0)
    for _ in range(120):
        first.tick()
        other.tick()
    assert first.status.incident_count == 0
    assert other.status.summary == "WaitingForCapacity"


def test_a_gang_that_never_preempts_only_goes_first(make_sim: Make) -> None:
    first, urgent = two_of_two_thirds(make_sim, priority=10)
    older = make_sim(name="aged", replicas=2, minimum=2, nodes=3)
    urgent.preempts = False
    share(first, urgent, older)
    for _ in range(60):
        for one in (first, older, urgent):
            one.tick()
    assert first.status.incident_count == 0
    assert "in addition to 1 worker of jobs that go first" in older.plan().message
    assert urgent.status.summary == "WaitingForCapacity"
    first.complete_at = first.step + 3
    together([first, older, urgent], 90, lambda: len(urgent.world_names()) == 2)
    assert not older.running()


def test_gang_waits_for_its_victims(make_sim: Make) -> None:
    """It waits as long as their grace period."""
    first, urgent = two_of_two_thirds(make_sim, priority=10, lingers=200)
    together([urgent, first], 30, lambda: urgent.status.gang.lifted_at is not None)
    for _ in range(120):
        urgent.tick()
        first.tick()
    assert urgent.status.gang.attempts == 0
    assert "1 of them until pods of lower priority have left" in urgent.plan().message
    together([urgent, first], 120, lambda: len(urgent.world_names()) == 2)
    assert urgent.created_names == ["beta-w0", "beta-w1"]


def make_no_room_after(seconds: int, urgent: Any, first: Any) -> None:
    """The scheduler clears its word then, and tells nobody to go any more."""
    for _ in range(seconds):
        urgent.tick()
        first.tick()
    for body in urgent.pods.values():
        body["status"].pop("nominatedNodeName", None)
    urgent.preempts = False


def test_short_pause_of_a_preemption_cancels_no_gang(make_sim: Make) -> None:
    first, urgent = two_of_two_thirds(make_sim, priority=10, lingers=200)
    together([urgent, first], 30, lambda: urgent.status.gang.lifted_at is not None)
    make_no_room_after(120, urgent, first)
    urgent.run(50)
    assert urgent.status.gang.attempts == 0
    urgent.preempts = True
    together([urgent, first], 200, lambda: len(urgent.world_names()) == 2)
    assert urgent.status.gang.attempts == 0


def test_ended_preemption_cancels_the_gang(make_sim: Make) -> None:
    first, urgent = two_of_two_thirds(make_sim, priority=10, lingers=200)
    together([urgent, first], 30, lambda: urgent.status.gang.lifted_at is not None)
    make_no_room_after(120, urgent, first)
    urgent.run(90, until=lambda: urgent.status.gang.attempts == 1)
    told = next(message for reason, message in urgent.events if reason == "GangTimeout")
    assert "were not scheduled within 18" in told, "since its gates were lifted"


def test_gang_with_only_some_nominated_pods_is_cancelled(make_sim: Make) -> None:
    first, urgent = two_of_two_thirds(make_sim, priority=10, lingers=200)
    together([urgent, first], 30, lambda: urgent.status.gang.lifted_at is not None)
    free = set(first.nodes) - {first.node_of(name) for name in first.names()}
    first.nodes[free.pop()]["spec"]["unschedulable"] = True  # the room that was counted on goes
    first.nodes[first.node_of("alpha-w1")]["spec"]["unschedulable"] = True
    urgent.run(90, until=lambda: urgent.status.gang.attempts == 1)
    assert any(reason == "GangTimeout" for reason, _ in urgent.events)
    assert sum(bool(body["status"].get("nominatedNodeName")) for body in urgent.pods.values()) == 1


def test_a_gang_does_not_wait_for_ever_for_those_that_do_not_go(make_sim: Make) -> None:
    first, urgent = two_of_two_thirds(make_sim, priority=10, lingers=100_000)
    together([urgent, first], 30, lambda: urgent.status.gang.lifted_at is not None)
    for seconds in (3000, 500):
        urgent.tick(seconds)
        first.tick(seconds)
        assert urgent.status.gang.attempts == 0
    urgent.tick(200)
    assert urgent.status.gang.attempts == 1


def test_a_gang_that_no_empty_cluster_could_hold_blocks_nobody(make_sim: Make) -> None:
    huge, small = make_sim(name="alpha", replicas=30, nodes=2), make_sim(name="beta", replicas=2, minimum=2, nodes=2)
    share(huge, small)
    together([huge, small], 30, lambda: len(small.world_names()) == 2)
    assert not huge.running()


def test_a_gang_whose_pods_are_refused_holds_back_nobody(make_sim: Make) -> None:
    older, younger = (make_sim(name=name, replicas=2, minimum=2, nodes=1) for name in ("alpha", "beta"))
    share(older, younger)
    older.refusal = CreationError(reason="QuotaExceeded", message="exceeded quota: pods")
    older.apply(older.plan(), actions=0)
    together([younger], 30, lambda: len(younger.world_names()) == 2)


def test_a_gang_that_found_no_node_before_keeps_its_turn(make_sim: Make) -> None:
    older = make_sim(name="alpha", replicas=2, minimum=2, nodes=1)
    older.settle()
    status = older.body["status"]
    state = dict(operator_state.decode(status))
    state["gang"] = {key: value for key, value in state["gang"].items() if key != "liftedTime"}
    for reason, has_turn in (("Unschedulable", True), ("VolumeMissing", False)):
        state["trouble"] = {"reason": reason, "message": "x", "since": "2026-01-31T12:00:00Z"}
        status["operatorState"] = operator_state.encode(state)
        assert (rival_of(older.body) is not None) is has_turn


def test_a_job_without_a_gang_has_no_turn(make_sim: Make) -> None:
    older = make_sim(name="alpha", replicas=2, minimum=2, nodes=1, scheduling={"gang": "None"})
    assert rival_of(older.body) is None
    older.unplaceable = True
    older.run(5)
    assert rival_of(older.body) is None


def test_a_job_that_cannot_be_read_holds_back_nobody(make_sim: Make) -> None:
    volume = {"volume": {"claimName": "checkpoints"}, "intervalSteps": "soon"}
    older = make_sim(name="alpha", replicas=2, minimum=2, nodes=1, checkpoint=volume)
    younger = make_sim(name="beta", replicas=2, minimum=2, nodes=1)
    share(older, younger)
    older.settle()
    assert older.status.summary == "InvalidSpec"
    together([younger], 30, lambda: len(younger.world_names()) == 2)


def test_a_gang_in_its_back_off_lets_a_younger_one_go(make_sim: Make) -> None:
    older, younger = (make_sim(name=name, replicas=2, minimum=2, nodes=1) for name in ("alpha", "beta"))
    older.unplaceable = True
    share(older, younger)
    together([older], 100, lambda: older.status.gang.retry_at is not None)
    together([younger], 30, lambda: len(younger.world_names()) == 2)


def test_a_replacement_waits_for_no_gang(trained: Sim) -> None:
    trained.end("gpt-w1", 137)
    trained.settle()
    assert "schedulingGates" not in trained.pods[trained.uid("gpt-w3")]["spec"]


def test_a_replacement_that_avoids_good_nodes_is_made_anew(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=2)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(30, until=lambda: len(sim.world_names()) == 2)
    node = sim.node_of("gpt-w0")
    sim.kill_node(node)
    sim.run(60, until=lambda: "gpt-w2" in sim.names())
    sim.heal_node(node, rebooted=True)
    sim.run(120, until=lambda: len(sim.world_names()) == 2)
    assert sim.node_of(sim.world_names()[-1]) == node


def test_the_timeout_is_looked_at_in_time(make_sim: Make) -> None:
    sim = make_sim()
    sim.unplaceable = True
    sim.settle()
    assert sim.plan().requeue_after is not None
    assert timedelta(seconds=sim.plan().requeue_after) <= timedelta(seconds=60)


NO_LIMIT = {"budgets": [], "backoff": {"initialSeconds": 0, "maxSeconds": 1}}
"""As often and as fast as the schema allows."""


def test_failing_gang_does_not_delay_another_job(make_sim: Make) -> None:
    alone = make_sim(name="beta", replicas=2, minimum=2, nodes=3)
    beside = make_sim(name="beta", replicas=2, minimum=2, nodes=3)
    loop = make_sim(name="alpha", replicas=3, minimum=3, nodes=3, recovery=NO_LIMIT)
    share(loop, beside)
    assert ticks_of_start_and_recovery(alone, lambda: None) == ticks_of_start_and_recovery(beside, failing(loop))
    assert loop.status.incident_count > 20
    assert beside.status.incident_count == 1
    assert beside.created_names == ["beta-w0", "beta-w1", "beta-w2"]


def failing(sim: Sim) -> Callable[[], None]:
    """A tick in which whatever of this job runs ends with 1."""

    def tick() -> None:
        sim.tick()
        for name in sim.running():
            sim.end(name, 1)

    return tick


def ticks_of_start_and_recovery(sim: Sim, beside: Callable[[], None]) -> tuple[int, int]:
    def ticks(until: Callable[[], bool]) -> int:
        for count in range(200):
            if until():
                return count
            beside()
            sim.tick()
        raise AssertionError(sim.plan().message)

    started = ticks(lambda: sim.world_names() == ["beta-w0", "beta-w1"])
    for _ in range(60):
        beside()
        sim.tick()
    assert sim.world_names() == ["beta-w0", "beta-w1"]
    sim.end("beta-w0", 137)
    return started, ticks(lambda: sim.world_names() == ["beta-w1", "beta-w2"])


def test_a_gang_that_fails_whenever_it_runs_pauses_ever_longer(make_sim: Make) -> None:
    sim = make_sim(recovery={"budgets": []})
    tick = failing(sim)
    for _ in range(1200):
        tick()
    # 5 s, 10 s, … 300 s, less the jitter, and some seconds for each start.
    assert len(sim.created_names) <= 3 * 10
    assert sim.status.incident_count == len(sim.created_names) // 3
    assert len(sim.status.incidents) <= 10
