"""``scheduling.queue``: a queue admits the workers, and the gang starts when all of them are admitted."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from sim import Make, Sim

from holdfast_operator.api import names as c
from holdfast_operator.api.status import ConditionType
from holdfast_operator.scheduling.waiting_gang import rival_of

QUEUED = {"scheduling": {"queue": "team-a"}}


@pytest.fixture
def queued(make_sim: Make) -> Sim:
    """Three workers that start together or not at all, just made."""
    sim = make_sim(replicas=3, minimum=3, **QUEUED)
    sim.settle()
    return sim


def admit(sim: Sim, *names: str) -> None:
    """As Kueue does it: the gate goes, and labels of the flavor come."""
    for body in sim.pods.values():
        if body["metadata"]["name"] in names:
            gates = [gate for gate in body["spec"].pop("schedulingGates") if gate["name"] != c.QUEUE_GATE]
            body["spec"] |= {"schedulingGates": gates} if gates else {}


def gates(sim: Sim) -> dict[str, list[str]]:
    found = {body["metadata"]["name"]: body["spec"].get("schedulingGates", []) for body in sim.pods.values()}
    return {name: [gate["name"] for gate in listed] for name, listed in sorted(found.items())}


def reason(sim: Sim) -> tuple[str, str]:
    ready = sim.status.condition(ConditionType.READY)
    return ready.reason, ready.message


def test_pods_name_the_queue_without_kueue_too(queued: Sim) -> None:
    """They are gated."""
    assert {body["metadata"]["labels"][c.LABEL_QUEUE] for body in queued.pods.values()} == {"team-a"}
    assert list(gates(queued).values()) == [[c.GANG_GATE, c.QUEUE_GATE]] * 3
    queued.run(600)
    assert list(gates(queued).values()) == [[c.GANG_GATE, c.QUEUE_GATE]] * 3
    word, message = reason(queued)
    assert word == "WaitingForQueue"
    assert "0 of 3 workers are admitted by queue team-a" in message
    assert "Kueue, with its integration of pods" in message
    assert queued.names() == ["gpt-w0", "gpt-w1", "gpt-w2"], "who waits for nothing but the queue keeps its turn"


def test_the_gang_starts_when_all_are_admitted(queued: Sim) -> None:
    admit(queued, "gpt-w0", "gpt-w2")
    queued.run(60)
    assert reason(queued) == (
        "WaitingForQueue",
        "2 of 3 workers are admitted by queue team-a; they start together",
    )
    assert gates(queued)["gpt-w0"] == [c.GANG_GATE]
    admit(queued, "gpt-w1")
    queued.run(30, until=lambda: len(queued.world_names()) == 3)
    assert not any(gates(queued).values())


def test_an_elastic_job_begins_with_those_that_are_admitted(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=2, **QUEUED)
    sim.settle()
    admit(sim, "gpt-w0", "gpt-w2")
    sim.run(90, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2"])
    sim.run(30, until=lambda: "gpt-w3" in sim.names())
    assert gates(sim)["gpt-w3"] == [c.QUEUE_GATE]
    sim.run(300)
    assert "gpt-w3" in sim.names(), "it keeps its turn"
    admit(sim, "gpt-w3")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)


def test_replacement_waits_for_quota(make_sim: Make) -> None:
    """The other workers train meanwhile."""
    sim = make_sim(replicas=3, minimum=2, **QUEUED)
    sim.settle()
    admit(sim, *sim.names())
    sim.run(30, until=lambda: len(sim.world_names()) == 3)
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "gpt-w3" in sim.names())
    sim.run(10)
    assert sim.world_names() == ["gpt-w0", "gpt-w2"]
    assert gates(sim)["gpt-w3"] == [c.QUEUE_GATE]
    admit(sim, "gpt-w3")
    sim.run(60, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])


def test_insufficient_quota_is_released_until_the_next_try(queued: Sim) -> None:
    admit(queued, "gpt-w0")
    queued.run(int(c.QUEUE_PATIENCE.total_seconds()) - 10)
    assert queued.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    queued.run(20, until=lambda: not queued.names())
    told = dict(queued.events)["QueueTimeout"]
    assert "2 of 3 workers were not admitted by queue team-a within 300 s; gang cancelled" in told
    retry = queued.status.gang.retry_at
    assert timedelta(seconds=9) < retry - queued.now < timedelta(seconds=21)
    queued.run(8)
    assert queued.names() == []
    queued.run(20, until=lambda: queued.names() == ["gpt-w3", "gpt-w4", "gpt-w5"])
    admit(queued, *queued.names())
    queued.run(30, until=lambda: len(queued.world_names()) == 3)
    assert queued.counted == []


def test_unadmitted_gang_reserves_no_capacity(queued: Sim) -> None:
    assert rival_of(queued.body) is None
    queued.unplaceable = True
    admit(queued, *queued.names())
    queued.tick()
    rival = rival_of(json.loads(json.dumps(queued.body)))
    assert rival is not None
    assert rival.pods == 3


def test_a_gate_that_somebody_else_set_is_waited_for_as_well(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3)
    sim.apply(sim.plan())
    for body in sim.pods.values():
        body["spec"]["schedulingGates"].append({"name": "example.org/approval"})
    sim.run(120)
    assert reason(sim) == (
        "WaitingForQueue",
        "0 of 3 workers are admitted by the owner of example.org/approval; they start together",
    )
    assert "GangTimeout" not in dict(sim.events)
