"""Pods that the kubelet refuses at admission: said at once, tried ever more seldom, elsewhere if others take them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest
from sim import Make, Sim

from holdfast_operator.api import names as c

SYSCTL = ("SysctlForbidden", 'forbidden sysctl: "net.core.somaxconn" not allowlisted')
FULL = ("OutOfcpu", "Node didn't have enough resource: cpu, requested: 900, used: 1900, capacity: 2000")


def everywhere(sim: Sim, words: tuple[str, str] = SYSCTL) -> Sim:
    sim.refusing = dict.fromkeys(sim.nodes, words)
    return sim


def trains(sim: Sim, count: int = 3) -> Callable[[], bool]:
    return lambda: len(sim.world_names()) == count and sim.status.holds("Ready")


@pytest.mark.parametrize(
    ("words", "helps"),
    [
        (
            SYSCTL,
            "allow the sysctl on the nodes (allowedUnsafeSysctls of the kubelet), or remove it from the template",
        ),
        (FULL, "the scheduler does not count all that uses the node: look for static pods and reserved resources"),
        (("OutOfnvidia.com/gpu", "no"), "the scheduler does not count all that uses the node"),
        (("UnexpectedAdmissionError", "no devices"), "check the device plugin and the kubelet's log on the node"),
        (("Odd", "no"), "compare the template with what the node allows"),
    ],
)
def test_conditions_have_the_kubelets_reason_and_the_remedy(sim: Sim, words: tuple[str, str], helps: str) -> None:
    everywhere(sim, words).run(5)
    assert sim.status.summary == "PodRefused"
    for kind, holds in (("Degraded", True), ("Ready", False)):
        condition = sim.status.condition(kind)
        assert (condition.status, condition.reason) == (holds, "PodRefused")
        assert condition.message.startswith("The kubelet of node-")
        assert f"refused gpt-w2: {': '.join(words)}" in condition.message
        assert helps in condition.message
    assert any(reason == "PodRefused" and ": ".join(words) in message for reason, message in sim.events)
    assert (sim.status.incident_count, sim.status.incidents) == (0, ())


def test_job_refused_everywhere_fails_by_its_startup_deadline(make_sim: Make) -> None:
    sim = everywhere(make_sim(startupDeadlineSeconds=60))
    sim.run(70, until=lambda: sim.status.terminal)
    failed = sim.status.condition("Failed")
    assert failed.reason == "PodRefused"
    assert SYSCTL[1] in failed.message
    assert "startupDeadlineSeconds" in failed.message


def test_each_wait_is_longer_than_the_one_before_up_to_minutes(make_sim: Make) -> None:
    sim = everywhere(make_sim(replicas=1, minimum=1, startupDeadlineSeconds=3600))
    made: list[timedelta] = []
    begun = sim.now
    for _ in range(3000):
        known = len(sim.created_names)
        sim.tick()
        made += [sim.now - begun] * (len(sim.created_names) - known)
    waits = [later - before for before, later in pairwise(made)]
    assert all(before <= later for before, later in pairwise(waits))
    assert waits[0] < timedelta(seconds=25)
    assert c.TEMPLATE_RETRY_MAX <= waits[-1] < c.TEMPLATE_RETRY_MAX + timedelta(seconds=5)
    assert len(sim.status.avoided) <= c.REFUSING_NODES


def test_a_node_that_refuses_what_others_take_is_avoided(make_sim: Make) -> None:
    sim = make_sim(minimum=3)
    sim.refusing = {"node-1": FULL}
    sim.run(90, until=trains(sim))
    assert [(entry.node, entry.reason) for entry in sim.status.avoided] == [("node-1", "PodRefused")]
    assert len(sim.created_names) == 4
    assert sim.status.trouble is None
    assert (sim.status.incident_count, sim.counted) == (0, [])
    sim.run(700)
    assert sim.status.avoided == (), "it may be well again"


def test_a_single_worker_is_tried_on_another_node(make_sim: Make) -> None:
    sim = make_sim(replicas=1, minimum=1)
    sim.refusing = dict.fromkeys(["node-1", "node-2"], FULL)
    sim.run(120, until=trains(sim, 1))
    assert len(sim.created_names) == 3


def test_refusing_node_is_retried_without_other_capacity(make_sim: Make) -> None:
    sim = make_sim(replicas=1, minimum=1, nodes=1)
    sim.refusing = {"node-1": FULL}
    sim.run(30)
    assert sim.status.avoided == ()
    sim.refusing = {}
    sim.run(60, until=trains(sim, 1))


def test_what_refuses_all_pods_lets_the_job_keep_its_nodes(make_sim: Make) -> None:
    """Else one that is mended would wait for nodes to be good again."""
    sim = everywhere(make_sim(nodes=12))
    sim.run(200)
    assert len(sim.status.avoided) <= c.REFUSING_NODES
    sim.refusing = {}
    sim.run(300, until=trains(sim))


def test_refusal_of_a_worker_that_trained_is_an_incident(trained: Sim) -> None:
    """The kubelet restarted in between."""
    body = trained.pods[trained.uid("gpt-w1")]
    body["status"] = {"phase": "Failed", "reason": "NodeAffinity", "message": "Predicate NodeAffinity failed"}
    trained.run(60, until=lambda: trains(trained)() and "gpt-w1" not in trained.world_names())
    (incident,) = trained.status.incidents
    assert (incident.cause, incident.pod) == ("Infrastructure", "gpt-w1")
    assert trained.counted == ["Infrastructure"]
    assert (trained.status.trouble, trained.status.avoided) == (None, ())


def test_refused_replacement_is_retried_with_back_off(trained: Sim) -> None:
    """The job trains with fewer workers meanwhile."""
    everywhere(trained).end("gpt-w1", 137)
    trained.run(1800)
    assert trained.status.summary == "PodRefused"
    assert len(trained.world_names()) == 2
    assert not trained.status.terminal
    assert 5 < len(trained.created_names) < 16
    trained.refusing = {}
    trained.run(400, until=trains(trained))
    assert trained.status.trouble is None


def test_a_spare_that_is_refused_is_asked_for_ever_more_seldom(make_sim: Make) -> None:
    sim = make_sim(nodes=6)
    sim.body["spec"]["workers"]["spares"] = 1
    sim.run(60, until=lambda: len(sim.created_names) == 4 and trains(sim)())
    sim.run(20)
    everywhere(sim).end("gpt-w3", 137)
    sim.run(1800)
    assert len(sim.world_names()) == 3
    assert sim.counted == []
    assert 6 < len(sim.created_names) < 18
