"""Workers that are lost, leave or fail, on a real API server."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from kubernetes import client, watch
from stage import Stage
from urllib3.exceptions import HTTPError

SELECTOR = "holdfast.dev/job-name=gpt"


def test_a_job_is_gated_placed_published_and_ready(stage: Stage) -> None:
    stage.nodes(3)
    born: list[Any] = []
    listed = stage.core.list_namespaced_pod
    # From before there was any: whoever begins to look late sees them as they were born all the same.
    since = listed(stage.namespace, label_selector=SELECTOR).metadata.resource_version

    def look() -> None:
        events = watch.Watch().stream(
            listed, stage.namespace, label_selector=SELECTOR, resource_version=since, timeout_seconds=600
        )
        # A watch that outlives a failed test ends with its server.
        with contextlib.suppress(HTTPError):
            for event in events:
                if event["type"] == "ADDED":
                    born.append(event["object"])
                if len(born) == 3:
                    break

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    player = stage.run(replicas=3)
    status = stage.status()
    assert stage.members() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert (status["readyWorkers"], status["workers"]) == (3, 3)
    assert status["membership"]["generation"] == 1
    assert status.get("incidentCount", 0) == 0
    assert player.worlds == [(1, 1, tuple(stage.uid(name) for name in stage.members()))]
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step"), "progress is shown")
    active = stage.wait(lambda: stage.status()["membership"].get("active"), "the world is recorded as started")
    assert active == {"generation": 1, "attempt": 1}
    stage.wait(lambda: len(born) == 3, "the births of three pods were seen")
    for pod in born:
        assert [gate.name for gate in pod.spec.scheduling_gates] == ["holdfast.dev/gang"]
    for pod in stage.pods():
        assert not pod.spec.scheduling_gates
        assert [c.name for c in pod.spec.init_containers] == ["holdfast-sidecar"]
        assert pod.spec.init_containers[0].restart_policy == "Always"
        assert pod.spec.restart_policy == "Never"
        assert pod.metadata.owner_references[0].uid == stage.read()["metadata"]["uid"]
    indexes = {pod.metadata.name: pod.metadata.labels.get("holdfast.dev/worker-index") for pod in stage.pods()}
    assert indexes == {"gpt-w0": "0", "gpt-w1": "1", "gpt-w2": "2"}


def test_lost_worker_is_replaced_under_a_new_name_counted_once(stage: Stage) -> None:
    stage.nodes(3)
    before = stage.operator.metric("holdfast_incidents_total", cause="Infrastructure")
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    lost = stage.uid("gpt-w1")
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains in the lost place")
    stage.await_count()
    status = stage.status()
    assert stage.incidents() == [("Infrastructure", "gpt-w1")]
    assert status["incidentCount"] == 1
    assert [(r["cause"], r["count"]) for r in status["incidentsByCause"]] == [("Infrastructure", 1)]
    stage.wait(
        lambda: stage.operator.metric("holdfast_incidents_total", cause="Infrastructure") > before, "it is exported"
    )
    assert stage.operator.metric("holdfast_incidents_total", cause="Infrastructure") == before + 1
    assert status["membership"]["generation"] == 2
    assert stage.incarnations() == 4
    shrunk = [members for generation, _attempt, members in player.worlds if generation == 1]
    assert lost in shrunk[0]
    assert lost not in shrunk[1], "those left went on without it at once"
    stage.wait(
        lambda: stage.status()["membership"]["acknowledged"] == [{"generation": 1, "attempt": 1}], "it is told"
    )
    assert stage.pod("gpt-w1").status.phase == "Failed", "a lost worker's pod stays for its logs"


def test_node_failing_preflight_is_left_and_named_before_start(stage: Stage) -> None:
    nodes = stage.nodes(4)
    stage.apply(stage.job(replicas=3, cpu="3", preflight={"checks": ["GPU"]}))
    stage.wait(lambda: len([pod for pod in stage.pods() if pod.spec.node_name]) == 3, "three are placed")
    bad = stage.pod("gpt-w1").spec.node_name
    results = {node: "Failed" if node == bad else "Passed" for node in nodes}
    message = "1 of 8 GPUs are there"
    stage.play(
        preflights={
            node: {"checks": [{"name": "GPU", "result": result, "message": message}]}
            for node, result in results.items()
        }
    )
    stage.wait(lambda: stage.condition("Ready")["status"] == "True", "three train")
    assert set(stage.members()) == {"gpt-w0", "gpt-w2", "gpt-w3"}
    assert bad not in {stage.pod(name).spec.node_name for name in stage.members()}
    (avoided,) = stage.status()["avoidedNodes"]
    assert (avoided["node"], avoided["reason"], avoided["failedChecks"]) == (bad, "PreflightFailed", ["GPU"])
    assert avoided["message"].startswith(
        f"gpt-w1 failed its preflight on {bad}: GPU: {message}; moving to another node"
    )
    assert stage.status().get("incidentCount", 0) == 0

    def told() -> set[str]:
        events = stage.core.list_namespaced_event(stage.namespace, field_selector="reason=PreflightFailed").items
        return {event.message for event in events}

    assert stage.wait(told, "the event is written") == {avoided["message"]}


def test_operator_killed_during_a_recovery_gives_the_same_result(stage: Stage) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.operator.kill()
    stage.lose("gpt-w1", player)
    stage.wait(lambda: player.world["attempt"] == 2, "the launchers go on without the operator")
    stage.operator.start()
    stage.wait(lambda: stage.incarnations() == 4, "a replacement is asked for")
    stage.operator.restart()
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    stage.await_count()
    assert stage.incidents() == [("Infrastructure", "gpt-w1")]
    assert stage.status()["incidentCount"] == 1
    assert [pod.metadata.name for pod in stage.pods()] == ["gpt-w0", "gpt-w1", "gpt-w2", "gpt-w3"]


def test_a_restarted_operator_disturbs_nobody(stage: Stage) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3)
    uids = {pod.metadata.uid for pod in stage.pods()}
    revision = stage.status()["membership"]["revision"]
    stage.operator.restart()
    step = player.step
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step", 0) > step, "progress is shown again")
    assert {pod.metadata.uid for pod in stage.pods()} == uids
    assert len(player.worlds) == 1
    assert stage.status()["membership"]["revision"] == revision
    assert stage.status().get("incidents", []) == []


def test_deleted_pod_leaves_after_a_checkpoint_as_interruption(stage: Stage) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.core.delete_namespaced_pod("gpt-w0", stage.namespace)
    stage.wait(lambda: stage.recovered(["gpt-w3", "gpt-w1", "gpt-w2"]), "the replacement trains")
    # Launchers tell no incident where the operator told one to leave: it counts the pod itself, when nobody else has.
    stage.await_count()
    assert stage.incidents() == [("Interruption", "gpt-w0")]
    assert [r["cause"] for r in stage.status()["incidentsByCause"]] == ["Interruption"]
    assert len(player.worlds) == 3


def test_second_eviction_waits_for_the_first_replacement(stage: Stage) -> None:
    stage.nodes(4)
    stage.run(replicas=3)
    policies = client.PolicyV1Api(stage.api)

    def ready() -> int:
        """All containers run, as kubelets say it: budgets count such pods alone."""
        condition = {"type": "Ready", "status": "True"}
        for pod in stage.pods():
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None:
                body = {"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [condition]}}
                stage.core.patch_namespaced_pod_status(pod.metadata.name, stage.namespace, body)
        return int(policies.read_namespaced_pod_disruption_budget("gpt", stage.namespace).status.current_healthy)

    stage.wait(lambda: ready() == 3, "the budget knows the workers")
    assert evicted(stage, "gpt-w0")
    assert not evicted(stage, "gpt-w1")
    stage.wait(lambda: ready() == 3, "the replacement is ready", 240)
    assert evicted(stage, "gpt-w1")


def evicted(stage: Stage, pod: str) -> bool:
    """Whether the API server takes it; not while the job's budget is spent."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": stage.namespace}}
    try:
        stage.core.create_namespaced_pod_eviction(pod, stage.namespace, body)
    except client.ApiException as error:
        if error.status != 429 or "disruption budget" not in str(error.body):
            raise
        return False
    return True


def test_a_job_of_two_waits_for_the_operators_word_and_goes_on(stage: Stage) -> None:
    """Two never shrink by themselves; without Shrink they wait for the replacement."""
    stage.nodes(2)
    player = stage.run(replicas=2)
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w2"]), "the replacement trains")
    assert [world[:2] for world in player.worlds] == [(1, 1), (2, 1)]
    # The new world is what reports the loss, and a moment without a world is not shown as a failure: Ready held on.
    stage.await_count()
    assert [cause for cause, _pod in stage.incidents()] == ["Infrastructure"]
    assert stage.status()["incidentCount"] == 1


def test_failing_script_ends_the_job_with_its_traceback(stage: Stage) -> None:
    stage.nodes(1)
    left = {
        "version": 1,
        "code": 1,
        "cause": "Application",
        "reason": "Exception",
        "message": "ImportError: no module named flash",
        "traceback": ['  File "train.py", line 3, in <module>', "ImportError: no module named flash"],
        "final": False,
    }
    budgets = [{"cause": "Application", "maxRestarts": 1}]
    backoff = {"initialSeconds": 0, "maxSeconds": 1}
    stage.apply(stage.job(replicas=1, recovery={"budgets": budgets, "backoff": backoff}))
    for name in ("gpt-w0", "gpt-w1"):
        stage.wait(lambda name=name: any(running(p, name) for p in stage.pods()), f"{name} runs")
        stage.kubelets.end(stage.namespace, name, 1, message=json.dumps(left))
    stage.wait(lambda: stage.is_true("Failed"), "the job has failed")
    failed = stage.condition("Failed")
    assert "no module named flash" in failed["message"]
    assert [cause for cause, _pod in stage.incidents()] == ["Application", "Application"]
    assert stage.status()["incidentCount"] == 2
    assert len(stage.pods()) == 2, "nothing is made after the end"


def test_rule_ends_the_job_at_once_with_one_message_everywhere(stage: Stage, cluster: Any) -> None:
    stage.nodes(1)
    labels = {"action": "FailJob", "cause": "Application", "reason": "FailJobByRule"}
    rules = [{"name": "bad-arguments", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]
    stage.apply(stage.job(replicas=1, recovery={"rules": rules}))
    stage.wait(lambda: any(running(pod, "gpt-w0") for pod in stage.pods()), "gpt-w0 runs")
    stage.kubelets.end(stage.namespace, "gpt-w0", 2)
    stage.wait(lambda: stage.is_true("Failed"), "the job has failed")
    failed = stage.condition("Failed")
    said = "FailJob: rule bad-arguments matches exit code 2"
    assert failed["reason"] == stage.status()["summary"] == "FailJobByRule"
    assert failed["message"].startswith(said)
    (incident,) = stage.status()["incidents"]
    assert (incident["action"], incident["decision"], incident["why"]) == ("FailJob", "FailJobByRule", said)
    stage.wait(
        lambda: said in cluster.kubectl("describe", "ftj", "gpt", "-n", stage.namespace).split("Events:")[1],
        "the event tells it",
    )
    assert said in stage.operator.log()
    assert stage.operator.metric("holdfast_recovery_decisions_total", **labels) == 1
    assert len(stage.pods()) == 1, "no other try was made"


def test_pod_condition_named_by_a_rule_replaces_the_pod(stage: Stage) -> None:
    stage.nodes(3)
    conditions = [{"type": "example.com/Sick"}]
    rules = [{"name": "sick", "action": "RecreatePod", "cause": "Infrastructure", "onPodConditions": conditions}]
    stage.run(replicas=3, elasticity={"minReplicas": 2}, recovery={"rules": rules})
    sick = {"type": "example.com/Sick", "status": "True", "reason": "Fever"}
    stage.core.patch_namespaced_pod_status("gpt-w1", stage.namespace, {"status": {"conditions": [sick]}})
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    stage.await_count()
    assert stage.incidents() == [("Infrastructure", "gpt-w1")]
    assert stage.status()["incidents"][0]["decision"] == "RecreatePodByRule"
    assert stage.status()["incidentCount"] == 1


def running(pod: Any, name: str) -> bool:
    return bool(pod.metadata.name == name and pod.status.phase == "Running")
