"""The smaller policies, each on its own: facts, causes, fences, avoided nodes, unreadable and ended jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast_operator.api import names as c
from holdfast_operator.api.status import AvoidedNode, Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import avoided_nodes, causes
from holdfast_operator.decision.workers import fencing
from holdfast_operator.views import Exit, NodeView, PodView

Make = Callable[..., Any]
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
GOOD = NodeView(name="n", boot_id="b1", lease_renewed=NOW)


def pod(**changes: Any) -> PodView:
    return replace(PodView(name="gpt-w0", uid="u", incarnation=0, node="n", phase="Failed"), **changes)


def tainted(key: str) -> NodeView:
    """A node that is heard of, with a taint that ends pods."""
    return replace(GOOD, taints=((key, "", "NoExecute"),))


@pytest.mark.parametrize(
    ("view", "node", "cause", "reason"),
    [
        (pod(exit=Exit(code=137, reason="OOMKilled")), GOOD, "OOM", "OOMKilled"),
        (pod(exit=Exit(code=137, reason="Error")), GOOD, "Infrastructure", "Killed"),
        (pod(exit=Exit(code=1, reason="Error")), GOOD, "Application", "ExitCode"),
        (pod(exit=Exit(code=139, reason="Error")), GOOD, "Application", "ExitCode"),
        (pod(exit=Exit(code=255, reason="Unknown")), GOOD, "Infrastructure", "ExitStatusUnknown"),
        (pod(exit=Exit(code=255, reason="Error")), GOOD, "Application", "ExitCode"),
        (pod(exit=Exit(code=70)), GOOD, "Infrastructure", "LauncherFailed"),
        (pod(exit=Exit(code=75)), GOOD, "Interruption", "DrainedOnRequest"),
        (pod(exit=Exit(code=1, cause="OOM", reason="CudaOOM")), GOOD, "OOM", "CudaOOM"),
        (pod(exit=Exit(code=127)), GOOD, "", "HoldfastMissing"),
        (pod(exit=Exit(code=128, reason="StartError", message="permission denied")), GOOD, "", "ContainerFailed"),
        (pod(exit=Exit(code=75), deleted_at=NOW), GOOD, "Interruption", "PodDeleted"),
        (pod(exit=Exit(code=137), disruption="EvictionByEvictionAPI"), GOOD, "Interruption", "EvictionByEvictionAPI"),
        (pod(exit=Exit(code=75), failure_reason="Evicted"), GOOD, "Application", "Evicted"),
        (pod(exit=Exit(code=0), failure_reason="Evicted"), GOOD, "Application", "Evicted"),
        (pod(failure_reason="Evicted"), GOOD, "Application", "Evicted"),
        (
            pod(failure_reason="Evicted", disruption="TerminationByKubelet"),
            GOOD,
            "Interruption",
            "TerminationByKubelet",
        ),
        (pod(exit=Exit(code=137, reason="OOMKilled"), failure_reason="Evicted"), GOOD, "OOM", "OOMKilled"),
        (pod(disruption="PreemptionByScheduler"), GOOD, "Interruption", "PreemptionByScheduler"),
        (pod(disruption="DeletionByTaintManager"), replace(GOOD, ready=False), "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), None, "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), tainted(c.TAINT_UNREACHABLE), "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), tainted(c.TAINT_NOT_READY), "Infrastructure", "NodeLost"),
        (pod(disruption="DeletionByTaintManager"), tainted("maintenance"), "Interruption", "DeletionByTaintManager"),
        (
            pod(exit=Exit(code=1, cause="Application", reason="Exception"), deleted_at=NOW),
            GOOD,
            "Application",
            "Exception",
        ),
        (pod(deleted_at=NOW), replace(GOOD, ready=False), "Infrastructure", "NodeLost"),
        (pod(), GOOD, "Infrastructure", "PodRefused"),
    ],
)
def test_causes_are_those_of_the_contract(view: PodView, node: NodeView | None, cause: str, reason: str) -> None:
    verdict = causes.of_exit(view, node, NOW)
    assert (verdict.cause, verdict.reason) == (cause, reason)
    assert verdict.message


LOST = Worker(
    incarnation=0, batch=0, phase=Phase.LOST, pod_uid="u", node="n", boot_id="b1", grace_seconds=30, since=NOW
)


@pytest.mark.parametrize(
    ("worker", "node", "proved"),
    [
        (LOST, replace(GOOD, ready=False), False),
        (LOST, replace(GOOD, lease_renewed=NOW - timedelta(hours=9)), False),
        (LOST, None, True),
        (LOST, replace(GOOD, boot_id="b2"), True),
        (LOST, replace(GOOD, taints=(("node.kubernetes.io/out-of-service", "x", "NoExecute"),)), True),
        (replace(LOST, absent_since=NOW), GOOD, False),
        (replace(LOST, node="", absent_since=NOW), GOOD, True),
        (replace(LOST, node=""), GOOD, False),
    ],
)
def test_a_silent_node_proves_nothing(observed: Any, worker: Worker, node: NodeView | None, proved: bool) -> None:
    status = replace(observed.status, workers=(worker,), incarnations=1)
    seen = replace(observed, nodes=(node,) if node else (), status=status)
    draft = fencing.apply(PlanDraft(seen=seen, now=NOW + timedelta(minutes=9), status=status))
    assert (fencing.proved_gone(draft) == {"u"}) is proved


def test_avoided_nodes_are_forgotten_in_time_when_gone_and_when_alive_again(observed: Any) -> None:
    def entry(node: str, reason: str, minutes: int = 5) -> AvoidedNode:
        return AvoidedNode(node=node, reason=reason, until=NOW + timedelta(minutes=minutes))

    nodes = (replace(GOOD, name="alive"), replace(GOOD, name="dead", ready=False), replace(GOOD, name="noticed"))
    entries = (
        entry("alive", "NodeLost"),
        entry("dead", "NodeLost"),
        entry("gone", "AWSNotice"),
        entry("noticed", "AWSNotice"),
    )
    status = replace(observed.status, avoided=entries)
    draft = PlanDraft(seen=replace(observed, nodes=nodes), now=NOW, status=status)
    assert [item.node for item in avoided_nodes.apply(draft).status.avoided] == ["dead", "noticed"]
    later = replace(draft, now=NOW + timedelta(minutes=6))
    assert avoided_nodes.apply(later).status.avoided == ()


def test_what_cannot_be_read_says_so_once_and_is_left_alone(trained: Any) -> None:
    before = trained.names()
    trained.body["spec"]["workers"]["replicas"] = "three"
    trained.settle()
    trained.run(20)
    assert trained.names() == before
    assert trained.status.status == "InvalidSpec"
    assert "spec.workers.replicas" in trained.status.condition("Degraded").message
    assert [reason for reason, _ in trained.events].count("InvalidSpec") == 1
    assert trained.status.membership.generation == 1


def test_a_mended_resource_goes_on(trained: Any) -> None:
    trained.body["spec"]["workers"]["replicas"] = "three"
    trained.tick()
    trained.body["spec"]["workers"]["replicas"] = 3
    trained.run(10, until=lambda: trained.status.status == "Training")
    assert not trained.status.holds("Degraded")


def test_a_failed_job_stops_what_runs_and_keeps_what_ended(make_sim: Make) -> None:
    sim = make_sim(recovery={"budgets": [{"cause": "Infrastructure", "maxRestarts": 0}]})
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: sim.status.holds("Failed"))
    sim.run(10)
    assert sim.names() == ["gpt-w1"]
    assert sim.status.ready == "0/3"


def test_a_job_on_its_way_out_is_left_to_the_garbage_collector(trained: Any) -> None:
    trained.body["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    trained.end("gpt-w1", 137)
    plan = trained.plan()
    assert not plan.actions
    assert plan.status == trained.status


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


def _cordoned_but_for_one_place(sim: Any, *cordoned: str) -> None:
    sim.obeys = True
    sim.add_node("spare", cpu="1")
    for node in cordoned:
        sim.nodes[node]["spec"]["unschedulable"] = True


def test_as_many_leave_cordoned_nodes_as_find_room_and_the_others_train_on(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=3)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    _cordoned_but_for_one_place(sim, "node-1", "node-2", "node-3")
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    sim.run(60)
    assert sim.world_names() == ["gpt-w1", "gpt-w2", "gpt-w3"]
    assert sim.counted == ["Interruption"]


def test_of_several_workers_on_one_cordoned_node_as_many_leave_as_find_room(make_sim: Make) -> None:
    sim = make_sim(replicas=4, minimum=4, nodes=2)
    sim.run(60, until=lambda: len(sim.world_names()) == 4)
    _cordoned_but_for_one_place(sim, "node-1")
    sim.run(60, until=lambda: "gpt-w4" in sim.world_names())
    sim.run(60)
    assert len(sim.world_names()) == 4
    assert sim.counted == ["Interruption"]


def test_who_must_go_takes_room_before_who_leaves_a_cordoned_node(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=3)
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    _cordoned_but_for_one_place(sim, sim.node_of("gpt-w0"))
    sim.notice("gpt-w2")
    sim.run(60, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w3"])
    assert sim.node_of("gpt-w3") == "spare"


def recommend(sim: Any, *names: str) -> None:
    """The cloud advises to leave the nodes of these workers."""
    for name in names:
        sim.notice(name)
        sim.pods[sim.uid(name)]["notices"][0]["action"] = "rebalance"
    sim.run(10)


def test_a_recommendation_takes_nobody_away_and_new_workers_go_elsewhere(trained: Any) -> None:
    node = trained.node_of("gpt-w1")
    recommend(trained, "gpt-w1")
    assert trained.document["directives"]["drain"] == []
    assert [entry.node for entry in trained.status.avoided] == [node]
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    assert trained.node_of("gpt-w3") != node


def test_where_no_other_node_has_capacity_a_recommendation_is_passed_by(make_sim: Make) -> None:
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
def test_a_node_that_is_only_disturbed_is_neither_left_nor_avoided(trained: Any, action: str) -> None:
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
def test_a_node_that_is_tainted_to_go_is_left_after_a_commit_and_not_used_meanwhile(trained: Any, taint: str) -> None:
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


def test_a_taint_that_says_something_else_moves_nobody(trained: Any) -> None:
    node = trained.node_of("gpt-w1")
    trained.nodes[node]["spec"]["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    trained.run(10)
    assert trained.document["directives"]["drain"] == []
    assert trained.status.avoided == ()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate", "preempt", "redeploy", "reboot"])
def test_a_worker_on_a_node_that_any_cloud_takes_away_drains(trained: Any, action: str) -> None:
    trained.notice("gpt-w1")
    trained.pods["uid-gpt-w1"]["notices"][0]["action"] = action
    trained.tick()
    assert trained.document["directives"]["drain"] == ["uid-gpt-w1"]


def test_a_taint_that_ends_pods_on_a_node_that_is_well_is_an_interruption(trained: Any) -> None:
    trained.obeys = True
    trained.nodes[trained.node_of("gpt-w1")]["spec"]["taints"] = [{"key": "maintenance", "effect": "NoExecute"}]
    trained.evict("gpt-w1", "DeletionByTaintManager")
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    assert trained.counted == ["Interruption"]
    assert "stopped reporting" not in str(trained.events)


def test_a_worker_that_does_not_leave_in_time_is_deleted(trained: Any) -> None:
    for name in trained.nodes:  # no room for a replacement, so its generation stays
        trained.nodes[name]["status"]["allocatable"]["cpu"] = "1"
    trained.notice("gpt-w2")
    trained.nodes.pop("node-4")
    trained.run(40)
    assert "gpt-w2" in trained.running()
    trained.run(60, until=lambda: "gpt-w2" not in trained.running())


def test_pods_of_the_past_are_kept_for_their_logs_but_not_all(trained: Any) -> None:
    for _ in range(6):
        trained.end(trained.running()[0], 137)
        trained.tick()
        trained.run(60, until=lambda: len(trained.world_names()) == 3)
    ended = [name for name in trained.names() if name not in trained.running()]
    assert len(ended) == 3
    assert len(trained.status.workers) <= 3 + 3


def test_incidents_are_kept_to_the_newest_ten_and_none_is_counted_again(trained: Any) -> None:
    for _ in range(12):
        trained.end(trained.running()[-1], 137)
        trained.tick()
        trained.run(60, until=lambda: len(trained.world_names()) == 3 and trained.status.ready == "3/3")
    old = {"generation": 1, "attempt": 1}
    for incident in list(trained.incidents.values())[:2]:
        trained.incidents[(0, 0)] = {**incident, **old}
    trained.run(5)
    assert [incident.number for incident in trained.status.incidents] == list(range(3, 13))
    assert trained.status.restart_count == 12
    assert old in trained.document["acknowledged"]


def test_a_crash_before_any_world_counts_once_for_the_whole_gang(make_sim: Make) -> None:
    sim = make_sim(recovery={"backoff": {"initialSeconds": 5, "maxSeconds": 60}})
    counts = []
    for _ in range(70):
        sim.tick()
        for name in sim.running():
            if sim.world is None:
                sim.end(name, 1)
        counts.append(sim.status.restart_count)
        if sim.status.terminal:
            break
    assert sim.status.status == "ApplicationBudgetExceeded"
    assert sim.status.restart_count == 4
    assert len(sim.created_names) == 12


def test_a_status_that_lost_its_roster_adopts_the_pods_that_there_are(trained: Any) -> None:
    """As after a restored backup, or when another version wrote what cannot be read: nothing is doubled."""
    trained.body["status"]["placement"] = {"workers": None, "countedBatch": "many", "of": {"the": "future"}}
    trained.body["status"]["incarnations"] = 0
    trained.run(10)
    assert trained.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert trained.world_names() == trained.names()
    assert trained.status.incarnations == 3
    assert trained.status.membership.generation == 1
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
