"""Whole passes over a small cluster: what is written where, in which order, and what a crash or a conflict leaves."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sick_cluster import MARK, START, Body, Crash, FakeCluster, World

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.errors import ClusterError, ConflictError, RejectedError
from holdfast_operator.remediation.act import node_event
from holdfast_operator.remediation.plan import Decision
from holdfast_operator.remediation.settings import AlertRule


@pytest.fixture
def world() -> World:
    return World("n0", "n1", "n2")


def test_from_an_alert_to_a_drained_node_and_back(world: World) -> None:
    world.cluster.add_pod("web", "n0")
    world.cluster.add_pod("logs", "n0", kind="DaemonSet")
    world.alert("n0")
    world.run()
    world.run()
    world.run()
    assert world.cluster.writes == ["history 1", "n0 Drain unschedulable=True", "evict web"]
    assert list(world.cluster.pods) == ["logs"], "what belongs to the node stays on it"
    world.alert("n0", status="resolved")
    world.run(1)
    world.run(10)
    assert world.cluster.writes[3:] == [
        "n0 Drain unschedulable=as it was",
        "history 1",
        "n0 no mark unschedulable=None",
    ]
    assert not world.cluster.nodes["n0"]["spec"]["unschedulable"]
    told = ["NodeCordoned", "NodeDraining", "NodeDrained", "AlertsResolved", "NodeReleased"]
    assert world.reasons() == told, "each once, however many passes say the same"


def test_from_an_alert_to_a_machine_that_is_replaced(world: World) -> None:
    world.alert("n0", "Dead")
    world.run()
    world.run(1)
    assert world.cluster.writes == [
        "history 1",
        "n0 Replace unschedulable=True",
        "history 1",
        "n0 Replace unschedulable=as it was",
        "terminate n0",
    ]
    assert world.run() is None, "the node is gone, nothing is left to do"
    assert world.metric('holdfast_remediation_actions_total{action="Terminate",result="ok"} 1.0')


def test_an_eviction_that_a_budget_forbids_is_retried(world: World) -> None:
    world.cluster.add_pod("web", "n0")
    world.cluster.protected.add("web")
    world.alert("n0")
    world.run()
    for _ in range(3):
        assert world.run(1) == 2.0
    assert world.metric('holdfast_remediation_actions_total{action="Evict",result="blocked"} 3.0')
    world.run(15)
    assert world.reasons()[-1] == "DrainIncomplete"
    world.cluster.protected.clear()
    world.run(1)
    assert world.cluster.pods == {}


def test_with_force_the_deadline_is_the_last_word() -> None:
    world = World("n0", "n1", force=True)
    world.cluster.add_pod("web", "n0")
    world.cluster.protected.add("web")
    world.alert("n0")
    world.run()
    world.run(14)
    assert "web" in world.cluster.pods
    world.run(2)
    assert world.cluster.writes[-1] == "delete web"


def job(*, opt_out: bool = False) -> Body:
    policy = "Ignore" if opt_out else "Allow"
    return {
        "metadata": {"name": "gpt", "namespace": "ml", "uid": "job"},
        "spec": {"nodeRemediation": {"policy": policy}, "interruption": {"checkpointDeadlineSeconds": 25}},
    }


def worker(world: World) -> None:
    owner = {"kind": "FaultTolerantJob", "apiVersion": "holdfast.dev/v1alpha1", "name": "gpt", "uid": "job"}
    world.cluster.add_pod("gpt-w0", "n0")
    world.cluster.pods["gpt-w0"]["metadata"]["ownerReferences"] = [{**owner, "controller": True}]


def test_a_worker_gets_time_for_its_checkpoint_before_eviction(world: World) -> None:
    world.jobs.append(job())
    worker(world)
    world.alert("n0")
    world.run()
    world.run(1)
    assert "gpt-w0" in world.cluster.pods
    world.run(0.5)
    assert world.cluster.writes[-1] == "evict gpt-w0", "a job that nobody gets away is no reason to keep a sick node"


def test_a_job_that_opted_out_keeps_its_worker_and_its_node(world: World) -> None:
    world.jobs.append(job(opt_out=True))
    worker(world)
    world.alert("n0", "Dead")
    world.run()
    for _ in range(4):
        world.run(10)
    assert "gpt-w0" in world.cluster.pods
    assert world.cluster.writes == ["history 1", "n0 Replace unschedulable=True"]
    assert world.reasons() == ["NodeCordoned", "DrainWaits"]
    world.cluster.pods["gpt-w0"]["status"]["phase"] = "Succeeded"
    world.run()
    assert "n0" not in world.cluster.nodes, "it has ended by itself"


@pytest.mark.parametrize("repeated", [False, True])
def test_a_node_whose_mode_is_raised_to_replace_is_drained_first(world: World, repeated: bool) -> None:
    alerts = (*world.rules.alerts, AlertRule(alert="Warm", action=Mode.CORDON))
    world.rules = replace(world.rules, alerts=alerts, mode=Mode.CORDON if repeated else Mode.REPLACE)
    world.restart()
    world.jobs.append(job(opt_out=True))
    worker(world)
    world.cluster.add_pod("web", "n0")
    world.alert("n0", "Dead" if repeated else "Warm")
    world.run()
    world.run(1)
    assert world.cluster.writes == ["history 1", "n0 Cordon unschedulable=True"]
    world.rules = replace(world.rules, mode=Mode.REPLACE)
    world.restart()
    world.alert("n0", "Dead")
    for _ in range(4):
        world.run(1)
    assert world.cluster.writes[2:] == ["n0 Replace unschedulable=as it was", "evict web"]
    assert "gpt-w0" in world.cluster.pods


def test_a_node_that_came_back_into_use_is_not_terminated(world: World) -> None:
    world.cloud.refuses = "instance i-1 is in no Auto Scaling group"
    world.alert("n0", "Dead")
    world.run()
    world.run(1)
    assert world.reasons()[-1] == "ReplaceFailed"
    world.cluster.nodes["n0"]["spec"]["unschedulable"] = False
    world.cluster.touch("n0")
    world.cluster.add_pod("web", "n0")
    world.cloud.refuses = ""
    for _ in range(4):
        world.run(1)
    assert set(world.cluster.nodes) == {"n0", "n1", "n2"}
    assert list(world.cluster.pods) == ["web"]
    assert world.reasons()[-1] == "UncordonedExternally"


def test_one_refused_eviction_stops_no_other_and_is_told(world: World, monkeypatch: Any) -> None:
    world.cluster.add_pod("a", "n0")
    world.cluster.add_pod("b", "n0")
    world.alert("n0")
    world.run()
    evict = world.cluster.evict

    def refuse(namespace: str, name: str, uid: str) -> None:
        if name == "a":
            raise RejectedError("the eviction of a", "Rejected", "a webhook says no")
        evict(namespace, name, uid)

    monkeypatch.setattr(world.cluster, "evict", refuse)
    for _ in range(3):
        assert world.run(1) == 2.0
    assert list(world.cluster.pods) == ["a"]
    assert world.reasons() == ["NodeCordoned", "NodeDraining"]
    assert "a webhook says no" in world.cluster.events[-1]["note"]
    assert world.metric('holdfast_remediation_actions_total{action="Evict",result="failed"} 3.0')


def test_a_restart_loses_nothing_that_was_begun(world: World) -> None:
    world.cluster.add_pod("web", "n0")
    world.alert("n0", "Dead")
    world.run()
    world.restart()
    world.run()
    world.restart()
    world.run()
    assert "n0" not in world.cluster.nodes
    assert world.cluster.writes.count("terminate n0") == 1


def test_a_restart_releases_nothing_until_the_alert_ends(world: World) -> None:
    world.alert("n0")
    world.run()
    world.restart()
    world.run(60)
    assert world.cluster.nodes["n0"]["spec"]["unschedulable"]
    world.alert("n0", status="resolved")
    world.run()
    world.restart()
    world.run(10)
    assert not world.cluster.nodes["n0"]["spec"]["unschedulable"]


@pytest.mark.parametrize("writes", range(6))
def test_a_crash_between_any_two_writes_comes_to_the_same_end(writes: int) -> None:
    world = World("n0", "n1", "n2")
    world.cluster.add_pod("web", "n0")
    world.alert("n0", "Dead")
    world.cluster.crash_after = writes
    with contextlib.suppress(Crash):
        for _ in range(5):
            world.run(0.1)
    assert world.cluster.crash_after == -1, "it died"
    world.cluster.crash_after = None
    world.restart()
    for _ in range(4):
        world.run(0.1)
    assert "n0" not in world.cluster.nodes
    assert {what for what in world.cluster.writes if "terminate" in what} == {"terminate n0"}
    assert set(world.cluster.nodes) == {"n1", "n2"}
    assert not any(node["spec"].get("unschedulable") for node in world.cluster.nodes.values())


@pytest.mark.parametrize("writes", range(4))
def test_a_crash_around_the_end_of_an_alert_leaves_no_cordon(writes: int) -> None:
    """Alertmanager tells an end once: no answer before it is written."""
    world = World("n0", "n1")
    world.alert("n0")
    world.run()
    world.cluster.crash_after = writes
    world.alert("n0", status="resolved")
    with contextlib.suppress(Crash):
        for _ in range(3):
            world.run(10)
    died = world.cluster.crash_after == -1
    world.cluster.crash_after = None
    world.restart()
    for _ in range(3):
        world.run(10)
    assert died == (writes < 3), "the end, the history and the release were written"
    assert not world.cluster.nodes["n0"]["spec"]["unschedulable"]
    assert MARK not in world.cluster.nodes["n0"]["metadata"]["annotations"]


def test_a_pass_that_fails_answers_nobody(world: World) -> None:
    world.cluster.down = True
    world.alert("n0")
    with pytest.raises(ClusterError):
        world.run()
    (answer,) = world.sent.values()
    assert not answer.done()
    world.cluster.down = False
    world.run()
    assert answer.done()


def test_who_changed_the_node_meanwhile_is_not_written_over(world: World) -> None:
    world.alert("n0")
    world._watch()
    world.cluster.nodes["n0"]["spec"]["unschedulable"] = True
    world.cluster.touch("n0")
    world.keeper.run()
    assert world.cluster.writes == []
    assert world.reasons() == ["CordonedByOthers"]


def test_a_conflict_is_raised_for_a_retry_and_reports_no_action(world: World, monkeypatch: Any) -> None:
    world.alert("n0")

    def changed(name: str, _body: Body) -> None:
        raise ConflictError(f"{name} has changed")

    with monkeypatch.context() as patched:
        patched.setattr(world.cluster, "patch_node", changed)
        with pytest.raises(ConflictError):
            world.run()
    assert world.cluster.events == []
    world.run()
    assert world.reasons() == ["NodeCordoned"]


def test_an_api_server_outage_changes_nothing_and_is_retried(world: World) -> None:
    world.alert("n0")
    world.cluster.down = True
    with pytest.raises(ClusterError):
        world.run()
    world.cluster.down = False
    world.run()
    assert world.cluster.writes == ["history 1", "n0 Drain unschedulable=True"]


def test_a_cloud_that_refuses_is_told_once_and_asked_again(world: World) -> None:
    world.cloud.refuses = "instance i-1 is in no Auto Scaling group"
    world.alert("n0", "Dead")
    for _ in range(4):
        world.run(1)
    assert world.reasons() == ["NodeCordoned", "ReplaceFailed"]
    world.cloud.refuses = ""
    world.run(1)
    assert "n0" not in world.cluster.nodes


def test_the_rate_outlives_machines_and_operator() -> None:
    world = World("n0", "n1", "n2", max_per_hour=1)
    world.alert("n0", "Dead")
    world.run()
    world.run()
    assert "n0" not in world.cluster.nodes
    world.restart()
    world.alert("n1", "Dead")
    world.run(10)
    assert world.reasons()[-1] == "RateLimited"
    world.run(51)
    assert world.cluster.nodes["n1"]["spec"]["unschedulable"]


@pytest.mark.parametrize("change", [{"mode": Mode.OBSERVE}, {"dry_run": True}])
def test_where_nothing_may_be_done_nothing_is_written_but_events(change: dict[str, Any]) -> None:
    world = World("n0", "n1", **change)
    world.cluster.add_pod("web", "n0")
    world.alert("n0", "Dead")
    for _ in range(3):
        world.run(5)
    assert world.cluster.writes == []
    assert len(world.cluster.events) == 1
    assert "Dead" in world.cluster.events[0]["note"]


def test_an_event_is_about_the_node_and_fits_its_limits() -> None:
    decision = Decision(node="n" * 253, uid="u", reason="NodeCordoned", message="ä" * 5000, warning=True)
    event = node_event(decision, START, "op")
    assert event["regarding"]["kind"] == "Node"
    assert len(event["metadata"]["name"]) <= 253
    assert len(event["note"].encode()) <= 1024


def test_the_thread_handles_what_comes_and_ends_on_request(world: World) -> None:
    world.keeper.start()
    assert world.keeper.alive()
    world.keeper.stop()
    assert not world.keeper.alive()


def pod_body(owner: list[Body], **meta: Any) -> Body:
    return {
        "metadata": {"name": "p", "namespace": "ml", "uid": "u", "ownerReferences": owner, **meta},
        "spec": {"nodeName": "n0", "volumes": [{"name": "scratch", "emptyDir": {}}]},
        "status": {"phase": "Running"},
    }


def owned_by(kind: str, api: str = "apps/v1", **change: Any) -> list[Body]:
    return [{"kind": kind, "apiVersion": api, "name": "x", "uid": "o", "controller": True, **change}]


@pytest.mark.parametrize(
    ("pod", "ends"),
    [
        (pod_body(owned_by("ReplicaSet")), "NodeDrained"),
        (pod_body(owned_by("Job", "batch/v1")), "NodeDrained"),
        (pod_body(owned_by("DaemonSet")), "stays"),
        (pod_body(owned_by("DaemonSet", "apps.kruise.io/v1alpha1")), "stays"),
        (pod_body(owned_by("Node", "v1"), annotations={"kubernetes.io/config.mirror": "x"}), "stays"),
        (pod_body([]), "DrainWaits"),
        (pod_body(owned_by("ReplicaSet", controller=False)), "DrainWaits"),
    ],
    ids=["ReplicaSet", "Job", "DaemonSet", "another DaemonSet", "mirror", "bare", "no controller"],
)
def test_a_drain_treats_pods_as_kubectl_does(world: World, pod: Body, ends: str) -> None:
    """As `kubectl drain --ignore-daemonsets --delete-emptydir-data`; each pod that is waited for is named."""
    world.cluster.pods["p"] = pod
    world.alert("n0")
    for _ in range(3):
        world.run(1)
    assert ("p" in world.cluster.pods) is (ends != "NodeDrained")
    assert world.reasons()[-1] == ("DrainWaits" if ends == "DrainWaits" else "NodeDrained")
    assert ends != "DrainWaits" or "ml/p" in world.cluster.events[-1]["note"]


def test_an_overruled_mark_is_counted_apart(world: World) -> None:
    world.alert("n0")
    world.run()
    world.run()
    assert world.metric('holdfast_remediation_nodes{mode="Drain"} 1.0')
    world.cluster.nodes["n0"]["spec"]["unschedulable"] = False
    world.cluster.touch("n0")
    world.run()
    world.run()
    assert world.metric('holdfast_remediation_nodes{mode="Drain"} 0.0')
    assert world.metric('holdfast_remediation_nodes{mode="UncordonedExternally"} 1.0')


def test_a_repeated_alert_is_heard(world: World) -> None:
    """Alertmanager repeats what still fires; only a silenced alert is heard of no more."""
    world.alert("n0")
    world.run()
    for _ in range(14):
        world.run(60)
        world.alert("n0")
    assert "AlertUnheard" not in world.reasons()
    world.run(13 * 60)
    assert world.reasons()[-1] == "AlertUnheard"


def test_a_recreated_machine_is_not_taken_for_the_old_one(world: World) -> None:
    """Cloud pools give the new machine the old one's name, and Prometheus keeps a series for some minutes."""
    world.alert("n0")
    del world.cluster.nodes["n0"]
    node = FakeCluster("n0").nodes["n0"]
    node["metadata"] |= {"uid": "another", "creationTimestamp": (START + timedelta(minutes=20)).isoformat()}
    world.cluster.nodes["n0"] = node
    world.run(21)
    assert world.reasons() == ["StaleAlert"]
    assert not node["spec"].get("unschedulable")
