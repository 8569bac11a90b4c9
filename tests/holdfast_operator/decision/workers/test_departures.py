"""Workers on nodes that will go drain, and their replacements come at once."""

from __future__ import annotations

import pytest
from sim import Make, Sim


def test_a_cordon_moves_a_worker_only_if_another_node_has_room(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=2)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(30, until=lambda: len(sim.world_names()) == 2)
    sim.nodes[sim.node_of("gpt-w0")]["spec"]["unschedulable"] = True
    sim.run(20)
    assert sim.world_names() == ["gpt-w0", "gpt-w1"]
    sim.nodes[sim.node_of("gpt-w1")]["status"]["allocatable"]["cpu"] = "2"
    sim.tick()
    assert sim.document["directives"]["drain"] == ["uid-gpt-w0"]
    sim.run(30, until=lambda: sim.world_names() == ["gpt-w1", "gpt-w2"])


def _cordoned_but_for_one_place(sim: Sim, *cordoned: str) -> None:
    sim.obeys = True
    sim.add_node("spare", cpu="1")
    for node in cordoned:
        sim.nodes[node]["spec"]["unschedulable"] = True


def test_as_many_workers_leave_cordoned_nodes_as_fit_elsewhere(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=3)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    _cordoned_but_for_one_place(sim, "node-1", "node-2", "node-3")
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    sim.run(60)
    assert sim.world_names() == ["gpt-w1", "gpt-w2", "gpt-w3"]
    assert sim.counted == ["Interruption"]


def test_as_many_workers_leave_one_cordoned_node_as_find_room(make_sim: Make) -> None:
    sim = make_sim(replicas=4, minimum=4, nodes=2)
    sim.run(60, until=lambda: len(sim.world_names()) == 4)
    _cordoned_but_for_one_place(sim, "node-1")
    sim.run(60, until=lambda: "gpt-w4" in sim.world_names())
    sim.run(60)
    assert len(sim.world_names()) == 4
    assert sim.counted == ["Interruption"]


def test_noticed_workers_find_room_before_those_of_cordons(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=3)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    _cordoned_but_for_one_place(sim, sim.node_of("gpt-w0"))
    sim.notice("gpt-w2")
    sim.run(60, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w3"])
    assert sim.node_of("gpt-w3") == "spare"


def recommend(sim: Sim, *names: str) -> None:
    """The cloud advises to leave the nodes of these workers."""
    for name in names:
        sim.notice(name)
        sim.pods[sim.uid(name)]["notices"][0]["action"] = "rebalance"
    sim.run(10)


def test_a_recommendation_moves_only_new_workers(trained: Sim) -> None:
    node = trained.node_of("gpt-w1")
    recommend(trained, "gpt-w1")
    assert trained.document["directives"]["drain"] == []
    assert [entry.node for entry in trained.status.avoided] == [node]
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    assert trained.node_of("gpt-w3") != node


def test_a_recommendation_is_ignored_without_capacity_elsewhere(make_sim: Make) -> None:
    """Clouds advise to leave many nodes that they never take."""
    sim = make_sim(nodes=3)
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    nodes = {sim.node_of(name) for name in sim.names()}
    recommend(sim, *sim.names())
    assert {entry.node for entry in sim.status.avoided} == nodes
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert sim.node_of("gpt-w3") in nodes
    sim.notice("gpt-w0")  # this one goes indeed
    sim.run(60, until=lambda: "gpt-w4" in sim.world_names())
    assert sim.node_of("gpt-w4") != sim.node_of("gpt-w0")


@pytest.mark.parametrize("action", ["migrate", "freeze", "maintenance"])
def test_a_node_that_is_only_disturbed_is_kept(trained: Sim, action: str) -> None:
    trained.notice("gpt-w1")
    trained.pods["uid-gpt-w1"]["notices"][0]["action"] = action
    trained.run(10)
    assert trained.document["directives"]["drain"] == []
    assert trained.status.avoided == ()


@pytest.mark.parametrize(
    "taint",
    [
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "cloud.google.com/impending-node-termination",
        "node.cloudprovider.kubernetes.io/shutdown",
    ],
)
def test_a_node_that_is_tainted_to_go_is_drained_and_avoided(trained: Sim, taint: str) -> None:
    """By an autoscaler that scales down, a handler of notices, or the cloud itself."""
    node = trained.node_of("gpt-w1")
    trained.nodes[node]["spec"]["taints"] = [{"key": taint, "effect": "NoSchedule"}]
    trained.tick()
    assert trained.document["directives"]["drain"] == ["uid-gpt-w1"]
    assert "gpt-w3" in trained.names(), "its replacement is asked for at once"
    trained.end("gpt-w1", 75)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30)
    assert trained.node_of("gpt-w3") != node
    assert {entry.node for entry in trained.status.avoided} == {node}
    assert trained.counted == ["Interruption"]
    (incident,) = trained.status.incidents
    assert incident.reason == "NodeLeaving"
    assert taint in incident.message
    trained.nodes[node]["spec"]["taints"] = []  # a scale-down that was broken off
    trained.run(10)
    assert trained.status.avoided == ()


def test_a_taint_that_says_something_else_moves_nobody(trained: Sim) -> None:
    node = trained.node_of("gpt-w1")
    trained.nodes[node]["spec"]["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    trained.run(10)
    assert trained.document["directives"]["drain"] == []
    assert trained.status.avoided == ()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate", "preempt", "redeploy", "reboot"])
def test_a_worker_on_a_node_that_any_cloud_takes_away_drains(trained: Sim, action: str) -> None:
    trained.notice("gpt-w1")
    trained.pods["uid-gpt-w1"]["notices"][0]["action"] = action
    trained.tick()
    assert trained.document["directives"]["drain"] == ["uid-gpt-w1"]


def test_a_pod_ended_by_a_taint_on_a_good_node_is_interrupted(trained: Sim) -> None:
    trained.obeys = True
    trained.nodes[trained.node_of("gpt-w1")]["spec"]["taints"] = [{"key": "maintenance", "effect": "NoExecute"}]
    trained.evict("gpt-w1", "DeletionByTaintManager")
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    assert trained.counted == ["Interruption"]
    assert "stopped reporting" not in str(trained.events)


def test_a_worker_that_does_not_leave_in_time_is_deleted(trained: Sim) -> None:
    for name in trained.nodes:  # no room for a replacement, so its generation stays
        trained.nodes[name]["status"]["allocatable"]["cpu"] = "1"
    trained.notice("gpt-w2")
    trained.nodes.pop("node-4")
    trained.run(40)
    assert "gpt-w2" in trained.running()
    trained.run(60, until=lambda: "gpt-w2" not in trained.running())
