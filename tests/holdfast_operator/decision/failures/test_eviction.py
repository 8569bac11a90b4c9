"""A pod that the kubelet evicts: for its own limit that is the script's failure, for the node's sake it is none."""

from __future__ import annotations

from typing import Any

import pytest
from sim import Make, Sim

POD = "gpt-w1"
FULL = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Mi". '
LOW = "The node was low on resource: memory. Container trainer was using 9Gi, request is 8Gi"


def evict(sim: Sim, *, code: int | None = 137, message: str = FULL, pressed: bool = False) -> None:
    """What a kubelet writes once the containers have ended. Only the node's pressure is a disruption of the pod."""
    body = sim.pods[sim.uid(POD)]
    if code is not None:
        sim.end(POD, code)
    else:
        body["status"] = {"phase": "Failed"}
    body["status"] |= {"reason": "Evicted", "message": message}
    if pressed:
        target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
        body["status"]["conditions"] = [target]


def sigterm(sim: Sim) -> None:
    """The launcher reports that it leaves, and does so, before anybody knows why it was told to."""
    told = sim.incident_of(POD, cause="Interruption", reason="Drained") | {"message": f"{POD} leaves: SIGTERM"}
    sim.world = None
    sim.pods[sim.uid(POD)]["dead"] = True
    sim.incidents[told["generation"], told["attempt"]] = told


@pytest.fixture(params=["ends first", "told first", "told long before"])
def filled(trained: Sim, request: Any) -> Sim:
    """A training job of which one pod was evicted for its own limit, in each order of what is heard of it."""
    if request.param == "ends first":
        evict(trained)
        sigterm(trained)
    else:
        sigterm(trained)
        trained.run(1 if request.param == "told first" else 6)
        evict(trained, code=75)
    trained.run(60, until=lambda: len(trained.world_names()) == 3 and POD not in trained.world_names())
    trained.run(20)
    return trained


def test_eviction_for_the_pods_limit_is_an_application_failure(filled: Sim) -> None:
    (incident,) = filled.status.incidents
    assert (incident.cause, incident.reason, incident.pod) == ("Application", "Evicted", POD)
    assert FULL.strip() in incident.message
    assert {count.cause: len(count.times) for count in filled.status.incidents_by_cause if count.times} == {
        "Application": 1
    }
    assert any(FULL.strip() in message for _, message in filled.events)


def test_repeated_full_disk_uses_the_budget(make_sim: Make) -> None:
    sim = make_sim(replicas=1, minimum=1)
    for _ in range(600):
        sim.tick()
        for body in sim.pods.values() if sim.world is not None else ():
            sim.end_pod(body, 137)
            body["status"] |= {"reason": "Evicted", "message": FULL}
    assert sim.status.condition("Failed").reason == "ApplicationBudgetExceeded"
    assert FULL.strip() in sim.status.condition("Failed").message
    assert sim.counted == ["Application"] * 4


@pytest.mark.parametrize("code", [None, 137, 75])
def test_eviction_before_training_uses_the_budget(make_sim: Make, code: int | None) -> None:
    sim = make_sim(replicas=1, minimum=1)
    for _ in range(600):
        sim.tick()
        for name in [name for name in sim.names() if "nodeName" in sim.pods[sim.uid(name)]["spec"]]:
            body = sim.pods[sim.uid(name)]
            if body["status"]["phase"] in ("Pending", "Running"):
                if code is None:
                    body["status"] = {"phase": "Failed"}
                else:
                    sim.end(name, code)
                body["status"] |= {"reason": "Evicted", "message": FULL}
                sim.heard.clear()
    assert sim.status.condition("Failed").reason == "ApplicationBudgetExceeded"
    assert sim.counted == ["Application"] * 4


@pytest.mark.parametrize("later", [0, 6])
def test_eviction_for_node_pressure_is_an_interruption(trained: Sim, later: int) -> None:
    """The message is that of the kubelet."""
    sigterm(trained)
    trained.run(later)
    evict(trained, code=75, message=LOW, pressed=True)
    trained.run(60, until=lambda: len(trained.world_names()) == 3 and POD not in trained.world_names())
    (incident,) = trained.status.incidents
    assert (incident.cause, incident.reason) == ("Interruption", "TerminationByKubelet")
    assert LOW in incident.message
    assert trained.counted == ["Interruption"]


def test_exit_code_after_an_eviction_matches_no_rule(make_sim: Make) -> None:
    rules = [{"name": "r", "action": "FailJob", "onSignals": ["SIGKILL"]}]
    sim = make_sim(recovery={"rules": rules})
    sim.run(60, until=lambda: sim.status.summary == "Training")
    evict(sim)
    sim.run(60, until=lambda: len(sim.world_names()) == 3 and POD not in sim.world_names())
    assert [incident.decision for incident in sim.status.incidents] == ["RecreatePodByDefault"]


def test_what_is_evicted_waits_before_it_is_replaced(trained: Sim) -> None:
    sigterm(trained)
    trained.run(6)
    evict(trained)
    trained.settle()
    assert trained.status.backoff_until is not None
    assert trained.status.backoff_until > trained.now
    assert len(trained.created_names) == 3
