"""The operator as a real process under the chart's rights, against a real control plane."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from typing import Any

from kubernetes import client, watch
from urllib3.exceptions import HTTPError

SELECTOR = "holdfast.dev/job-name=gpt"


def test_a_job_is_gated_placed_published_and_ready(stage: Any) -> None:
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


def incidents(stage: Any, name: str = "gpt") -> list[tuple[str, str]]:
    listed = stage.status(name).get("incidents") or []
    return [(incident["cause"], incident.get("pod") or "") for incident in listed]


def await_count(stage: Any) -> None:
    """Who goes on first may be shown before what it goes on from is counted."""
    stage.wait(lambda: incidents(stage), "it is counted")


def test_a_lost_worker_is_replaced_under_a_new_name_and_counted_once(stage: Any) -> None:
    stage.nodes(3)
    before = stage.operator.metric("holdfast_incidents_total", cause="Infrastructure")
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    lost = stage.uid("gpt-w1")
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains in the lost place")
    await_count(stage)
    status = stage.status()
    assert incidents(stage) == [("Infrastructure", "gpt-w1")]
    assert status["incidentCount"] == 1
    assert [(r["cause"], r["count"]) for r in status["incidentsByCause"]] == [("Infrastructure", 1)]
    stage.wait(
        lambda: stage.operator.metric("holdfast_incidents_total", cause="Infrastructure") > before, "it is exported"
    )
    assert stage.operator.metric("holdfast_incidents_total", cause="Infrastructure") == before + 1
    assert status["membership"]["generation"] == 2
    assert incarnations(status) == 4
    shrunk = [members for generation, _attempt, members in player.worlds if generation == 1]
    assert lost in shrunk[0]
    assert lost not in shrunk[1], "those left went on without it at once"
    stage.wait(
        lambda: stage.status()["membership"]["acknowledged"] == [{"generation": 1, "attempt": 1}], "it is told"
    )
    assert stage.pod("gpt-w1").status.phase == "Failed", "a lost worker's pod stays for its logs"


def test_a_node_that_fails_its_preflight_is_left_and_named_before_anything_starts(stage: Any) -> None:
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
    events = stage.core.list_namespaced_event(stage.namespace, field_selector="reason=PreflightFailed").items
    assert {event.message for event in events} == {avoided["message"]}


def test_an_operator_killed_in_the_middle_of_a_recovery_comes_to_the_same_end(stage: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.operator.kill()
    stage.lose("gpt-w1", player)
    stage.wait(lambda: player.world["attempt"] == 2, "the launchers go on without the operator")
    stage.operator.start()
    stage.wait(lambda: incarnations(stage.status()) == 4, "a replacement is asked for")
    stage.operator.restart()
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    await_count(stage)
    assert incidents(stage) == [("Infrastructure", "gpt-w1")]
    assert stage.status()["incidentCount"] == 1
    assert [pod.metadata.name for pod in stage.pods()] == ["gpt-w0", "gpt-w1", "gpt-w2", "gpt-w3"]


def test_a_restarted_operator_disturbs_nobody(stage: Any) -> None:
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


def test_a_deleted_pod_leaves_after_a_commit_and_is_an_interruption(stage: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.core.delete_namespaced_pod("gpt-w0", stage.namespace)
    stage.wait(lambda: stage.recovered(["gpt-w3", "gpt-w1", "gpt-w2"]), "the replacement trains")
    # Launchers tell no incident where the operator told one to leave: it counts the pod itself, when nobody else has.
    await_count(stage)
    assert incidents(stage) == [("Interruption", "gpt-w0")]
    assert [r["cause"] for r in stage.status()["incidentsByCause"]] == ["Interruption"]
    assert len(player.worlds) == 3


def test_a_second_eviction_waits_for_the_replacement_of_the_first(stage: Any) -> None:
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


def evicted(stage: Any, pod: str) -> bool:
    """Whether the API server takes it; not while the job's budget is spent."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": stage.namespace}}
    try:
        stage.core.create_namespaced_pod_eviction(pod, stage.namespace, body)
    except client.ApiException as error:
        if error.status != 429 or "disruption budget" not in str(error.body):
            raise
        return False
    return True


def test_a_job_of_two_waits_for_the_operators_word_and_goes_on(stage: Any) -> None:
    """Two never shrink by themselves; without Shrink they wait for the replacement."""
    stage.nodes(2)
    player = stage.run(replicas=2)
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w2"]), "the replacement trains")
    assert [world[:2] for world in player.worlds] == [(1, 1), (2, 1)]
    # The new world is what reports the loss, and a moment without a world is not shown as a failure: Ready held on.
    await_count(stage)
    assert [cause for cause, _pod in incidents(stage)] == ["Infrastructure"]
    assert stage.status()["incidentCount"] == 1


def test_a_script_that_fails_ends_the_job_with_the_tracebacks_last_lines(stage: Any) -> None:
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
    failed = stage.wait(lambda: truly(stage.condition("Failed")), "the job has failed")
    assert "no module named flash" in failed["message"]
    assert [cause for cause, _pod in incidents(stage)] == ["Application", "Application"]
    assert stage.status()["incidentCount"] == 2
    assert len(stage.pods()) == 2, "nothing is made after the end"


def test_a_rule_ends_the_job_at_once_and_says_why_everywhere_in_the_same_words(stage: Any, cluster: Any) -> None:
    stage.nodes(1)
    labels = {"action": "FailJob", "cause": "Application", "reason": "FailJobByRule"}
    rules = [{"name": "bad-arguments", "action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]
    stage.apply(stage.job(replicas=1, recovery={"rules": rules}))
    stage.wait(lambda: any(running(pod, "gpt-w0") for pod in stage.pods()), "gpt-w0 runs")
    stage.kubelets.end(stage.namespace, "gpt-w0", 2)
    failed = stage.wait(lambda: truly(stage.condition("Failed")), "the job has failed")
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


def test_a_condition_of_a_pod_that_a_rule_names_gives_its_worker_another_pod(stage: Any) -> None:
    stage.nodes(3)
    conditions = [{"type": "example.com/Sick"}]
    rules = [{"name": "sick", "action": "RecreatePod", "cause": "Infrastructure", "onPodConditions": conditions}]
    stage.run(replicas=3, elasticity={"minReplicas": 2}, recovery={"rules": rules})
    sick = {"type": "example.com/Sick", "status": "True", "reason": "Fever"}
    stage.core.patch_namespaced_pod_status("gpt-w1", stage.namespace, {"status": {"conditions": [sick]}})
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    await_count(stage)
    assert incidents(stage) == [("Infrastructure", "gpt-w1")]
    assert stage.status()["incidents"][0]["decision"] == "RecreatePodByRule"
    assert stage.status()["incidentCount"] == 1


def running(pod: Any, name: str) -> bool:
    return bool(pod.metadata.name == name and pod.status.phase == "Running")


def truly(condition: dict[str, Any]) -> dict[str, Any] | None:
    return condition if condition["status"] == "True" else None


def test_a_launcher_that_ends_with_0_completes_the_job_for_good(stage: Any) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    player.stop()
    for name in ("gpt-w0", "gpt-w1"):
        stage.kubelets.end(stage.namespace, name, 0)
    stage.wait(lambda: truly(stage.condition("Complete")), "the job is complete")
    assert stage.status()["summary"] == stage.condition("Complete")["reason"]
    assert stage.status()["completionTime"]
    assert stage.condition("Failed")["status"] != "True"
    stage.core.delete_namespaced_pod("gpt-w1", stage.namespace)
    stage.wait(lambda: len(stage.pods()) == 1, "a finished pod is deleted")
    stage.operator.restart()
    assert truly(stage.condition("Complete"))
    assert len(stage.pods()) == 1, "nothing is replaced after completion"
    assert stage.status().get("incidents", []) == []


def test_a_deleted_job_leaves_nothing(stage: Any) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    agent = next(iter(player.agents.values()))
    stage.custom.delete_namespaced_custom_object(
        "holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", "gpt"
    )

    def left() -> list[str]:
        core, selector = stage.core, SELECTOR
        found = [
            *core.list_namespaced_pod(stage.namespace, label_selector=selector).items,
            *core.list_namespaced_service(stage.namespace, label_selector=selector).items,
            *core.list_namespaced_config_map(stage.namespace, label_selector=selector).items,
            *client.NetworkingV1Api(stage.api)
            .list_namespaced_network_policy(stage.namespace, label_selector=selector)
            .items,
            *client.PolicyV1Api(stage.api)
            .list_namespaced_pod_disruption_budget(stage.namespace, label_selector=selector)
            .items,
        ]
        return [item.metadata.name for item in found]

    stage.wait(lambda: not left(), "all children are gone")
    stage.wait(lambda: agent.call("GET", "/v1/membership?after=0")[0] in (401, 404), "its pods are nobody's")
    stage.wait(lambda: 'job="gpt"' not in stage.operator.get("/metrics")[1], "nothing is exported of it any more")


def test_a_job_applied_again_under_its_old_name_is_a_new_one(stage: Any) -> None:
    stage.nodes(2)
    stage.run(replicas=2)
    stage.launchers[0].stop()
    stage.custom.delete_namespaced_custom_object(
        "holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", "gpt"
    )
    stage.wait(lambda: not stage.pods(), "the old pods are gone")
    stage.run(replicas=2)
    assert stage.members() == ["gpt-w0", "gpt-w1"]
    assert stage.status()["membership"]["generation"] == 1


def told(stage: Any, word: str) -> dict[str, Any] | None:
    """A true condition, or the shown status, that has this word."""
    for condition in stage.status().get("conditions") or []:
        if condition["status"] == "True" and word in condition["reason"]:
            return dict(condition)
    return None


def test_a_quota_that_is_too_small_is_said_and_mended(stage: Any) -> None:
    stage.nodes(2)
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}}
    stage.core.create_namespaced_resource_quota(stage.namespace, quota)
    stage.wait(
        lambda: stage.core.read_namespaced_resource_quota("small", stage.namespace).status.hard,
        "the quota is in force",
    )
    stage.apply(stage.job(replicas=2))
    condition = stage.wait(lambda: told(stage, "QuotaExceeded"), "the quota is named")
    assert "exceeded quota: small" in condition["message"]
    stage.play()
    stage.core.delete_namespaced_resource_quota("small", stage.namespace)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w1"]), "the job goes on once there is room")
    assert told(stage, "QuotaExceeded") is None


def test_a_worker_that_no_node_could_hold_is_said(stage: Any) -> None:
    stage.nodes(2, cpu="2")
    stage.apply(stage.job(replicas=2, cpu="64"))
    condition = stage.wait(lambda: told(stage, "Unschedulable"), "it is said")
    assert "cpu" in condition["message"]
    assert all(pod.spec.scheduling_gates for pod in stage.pods()), "it holds no place"


def test_an_image_that_cannot_be_pulled_is_said_and_mended(stage: Any) -> None:
    stage.nodes(1)
    stage.kubelets.broken[stage.namespace] = ("ImagePullBackOff", 'Back-off pulling image "train:1"')
    stage.apply(stage.job(replicas=1))
    condition = stage.wait(lambda: told(stage, "ImagePull"), "it is said")
    assert "train:1" in condition["message"]
    del stage.kubelets.broken[stage.namespace]
    stage.play()
    stage.wait(lambda: stage.recovered(["gpt-w0"]), "the job goes on once the image is there")


def test_a_pod_that_the_api_server_refuses_is_said(stage: Any) -> None:
    stage.nodes(1)
    body = stage.job(replicas=1)
    body["spec"]["workers"]["template"]["spec"]["dnsPolicy"] = "Nonsense"
    stage.apply(body)
    condition = stage.wait(lambda: told(stage, "Invalid"), "it is said")
    assert "dnsPolicy" in condition["message"]


def test_a_foreign_pod_of_the_same_name_is_not_touched(stage: Any) -> None:
    stage.nodes(1)
    pod = {
        "metadata": {"name": "gpt-w0"},
        "spec": {"containers": [{"name": "c", "image": "x"}], "nodeSelector": {"test": "nowhere"}},
    }
    uid = stage.core.create_namespaced_pod(stage.namespace, pod).metadata.uid
    stage.apply(stage.job(replicas=1))
    condition = stage.wait(lambda: told(stage, "NameTaken"), "it is said")
    assert "gpt-w0" in condition["message"]
    assert stage.uid("gpt-w0") == uid
    stage.core.delete_namespaced_pod("gpt-w0", stage.namespace, grace_period_seconds=0)


def test_relabelled_pods_train_on_and_get_their_labels_back(stage: Any, cluster: Any) -> None:
    """A watch by labels reports their end, and they train: nobody may be asked for in their place."""
    stage.nodes(3)
    player = stage.run(replicas=2)
    uids = [stage.uid(name) for name in ("gpt-w0", "gpt-w1")]
    taken = {"app.kubernetes.io/managed-by": None, "holdfast.dev/job-name": None}
    changes = {"gpt-w0": {"labels": taken}, "gpt-w1": {"ownerReferences": None}}
    for name, change in changes.items():
        stage.core.patch_namespaced_pod(name, stage.namespace, {"metadata": change})
    stage.wait(lambda: all(is_ours(stage, name) for name in changes), "labels and owner are put back")
    assert [stage.uid(name) for name in changes] == uids
    assert {pod.metadata.name for pod in stage.pods()} == set(changes)
    describe = ("describe", "ftj", "gpt", "-n", stage.namespace)
    stage.wait(lambda: "PodRelabelled" in cluster.kubectl(*describe), "the event is written")
    assert [world[:2] for world in player.worlds] == [(1, 1)]
    assert incidents(stage) == []


def is_ours(stage: Any, name: str) -> bool:
    meta = stage.core.read_namespaced_pod(name, stage.namespace).metadata
    labels = {"app.kubernetes.io/managed-by": "holdfast", "holdfast.dev/job-name": "gpt"}
    return bool(meta.owner_references) and labels.items() <= meta.labels.items()


def test_two_gangs_that_need_two_thirds_each_start_one_after_the_other(stage: Any) -> None:
    stage.nodes(3, cpu="2500m")  # two workers with their sidecars on each
    for name in ("one", "two"):
        stage.apply(stage.job(name, replicas=4))
    players = {name: stage.play(name) for name in ("one", "two")}

    def ready() -> list[str]:
        return [name for name in players if stage.condition("Ready", name)["status"] == "True"]

    (first,) = stage.wait(ready, "one of them trains")
    second = "two" if first == "one" else "one"
    stage.wait(lambda: len(stage.pods(second)) == 4, "the other waits")
    assert all(not pod.spec.node_name for pod in stage.pods(second)), "it holds no place"
    players[first].stop()
    for pod in stage.pods(first):
        stage.kubelets.end(stage.namespace, pod.metadata.name, 0)
    stage.wait(lambda: stage.condition("Ready", second)["status"] == "True", "the other trains")
    assert truly(stage.condition("Complete", first))


def test_a_job_grows_and_shrinks_when_told_to(stage: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=2)
    scale(stage, 3)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w1", "gpt-w2"]), "the third trains")
    scale(stage, 2)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w1"]), "two train")
    assert stage.ready_workers() == (2, 2)
    assert len(player.worlds[-1][2]) == 2
    assert stage.status()["membership"]["directives"]["drain"] == []


def scale(stage: Any, replicas: int) -> None:
    patch = {"spec": {"workers": {"replicas": replicas}}}
    stage.custom.patch_namespaced_custom_object(
        "holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", "gpt", patch
    )


def test_a_node_without_power_loses_its_worker_to_another_node(stage: Any) -> None:
    nodes = stage.nodes(4)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    victim = stage.pod("gpt-w1")
    player.lose(victim.metadata.uid)
    stage.kubelets.silent.add(victim.spec.node_name)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains", 240)
    assert stage.pod("gpt-w3").spec.node_name in set(nodes) - {victim.spec.node_name}
    await_count(stage)
    assert incidents(stage) == [("Infrastructure", "gpt-w1")]
    stage.kubelets.silent.discard(victim.spec.node_name)


def test_a_token_of_another_pod_or_for_another_audience_is_refused(stage: Any, token_for: Any) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    one, other = sorted(player.agents.values(), key=lambda agent: agent.pod.metadata.name)
    report = json.dumps(
        {
            "version": 1,
            "sidecar": {"startId": "evil", "number": 10**9},
            "pod": {"namespace": stage.namespace, "name": "gpt-w0", "uid": one.uid, "node": ""},
            "launcher": None,
            "notices": [],
        }
    )
    assert other.call("POST", "/v1/report", report)[0] == 403
    wrong = token_for(stage.api, one.pod, "https://kubernetes.default.svc")
    assert one.call("POST", "/v1/report", report, token=wrong)[0] == 401
    assert one.call("GET", "/v1/membership", token="nonsense")[0] == 401
    stage.core.create_namespaced_pod(
        stage.namespace, {"metadata": {"name": "stranger"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    )
    token = token_for(stage.api, stage.pod("stranger"))
    assert one.call("GET", "/v1/membership", token=token)[0] == 404
    stage.core.delete_namespaced_pod("stranger", stage.namespace, grace_period_seconds=0)


def incarnations(status: dict[str, Any]) -> int:
    """Return how many pods the operator created for the job so far."""
    found: int = json.loads(status.get("operatorState", "{}")).get("incarnations", 0)
    return found


JUNK: list[Any] = [None, 0, -1, 2**70, 1.5, "x", "", [], ["x"], {}, {"x": "y"}, True]


PLACES = ("world", "ports", "accepted", "checkpoints", "incidents", "notices", "exit", "ranks")


def test_a_launcher_that_reports_rubbish_harms_nobody(stage: Any) -> None:
    stage.nodes(1)
    player = stage.run(replicas=1)
    (agent,) = player.agents.values()
    good = player._status(agent)
    for place, second, third in zip(PLACES, PLACES[1:] + PLACES[:1], PLACES[2:] + PLACES[:2], strict=True):
        for junk in JUNK:
            fields = {"generation": junk, "attempt": junk, "store": junk}
            # Three places at once: a pod may report so often only.
            assert agent.report({**good, place: junk, second: [junk], third: fields}) == 200
        complaints = [line for line in stage.operator.lines() if "unexpectedly" in line["message"]]
        assert complaints == [], place
        # A worker that says that it is in no world is not ready, until it says again that it is in one.
        stage.wait(lambda: stage.condition("Ready")["status"] == "True", f"ready again after rubbish in {place}")
    told = player.step
    stage.wait(lambda: stage.status()["progress"]["step"] > told, "the job goes on")


def test_a_status_of_the_future_is_read_as_far_as_it_goes(stage: Any) -> None:
    stage.nodes(2)
    stage.run(replicas=2)
    state = {"version": 1, "workers": None, "countedBatch": "many", "new": {"a": [1]}}
    future = {"operatorState": json.dumps(state)}
    stage.custom.patch_namespaced_custom_object_status(
        "holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", "gpt", {"status": future}
    )
    before = stage.launchers[0].step
    stage.wait(lambda: stage.status()["progress"]["step"] > before + 3, "the job goes on")
    assert len(stage.members()) == 2
    complaints = [line for line in stage.operator.lines() if "unexpectedly" in line["message"]]
    assert complaints == []


def test_a_resource_that_this_version_cannot_read_says_so_and_harms_nobody(stage: Any, admin: Any) -> None:
    """As after a downgrade: the stored object has a shape that this operator does not know."""
    stage.nodes(1)
    extensions = client.ApiextensionsV1Api(admin)
    name = "faulttolerantjobs.holdfast.dev"
    strict = json.loads(extensions.read_custom_resource_definition(name, _preload_content=False).data)
    loose = json.loads(json.dumps(strict))
    schema = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema["x-kubernetes-validations"] = schema["x-kubernetes-validations"][:1]  # the others name fields of the spec
    extensions.patch_custom_resource_definition(name, [{"op": "replace", "path": "/spec", "value": loose["spec"]}])
    body = stage.job("odd", replicas=1)
    body["spec"] = {"workers": {"count": "three"}, "ofTheFuture": True}
    try:
        stage.wait(lambda: created(stage, body), "the odd job is taken")
        stage.wait(lambda: stage.condition("Degraded", "odd")["reason"] == "InvalidSpec", "it says so")
    finally:
        extensions.patch_custom_resource_definition(
            name, [{"op": "replace", "path": "/spec", "value": strict["spec"]}]
        )
        stage.wait(lambda: not taken(stage, body), "the strict schema is in force again")
    assert "spec.workers" in stage.condition("Degraded", "odd")["message"]
    stage.run("good", replicas=1)
    assert stage.operator.get("/healthz")[0] == 200


def created(stage: Any, body: dict[str, Any]) -> bool:
    try:
        stage.apply(body)
    except client.ApiException as error:
        if error.status not in (400, 422):
            raise
        return False
    return True


def taken(stage: Any, body: dict[str, Any]) -> bool:
    """Whether the schema that is served now would take another one like it."""
    another = {**body, "metadata": {**body["metadata"], "name": "another"}}
    where = ("holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs")
    try:
        stage.custom.create_namespaced_custom_object(*where, another, dry_run="All")
    except client.ApiException as error:
        if error.status not in (400, 422):
            raise
        return False
    return True


def test_every_line_of_the_log_is_json_and_lines_of_a_pass_name_the_job(stage: Any) -> None:
    stage.nodes(1)
    stage.run(replicas=1)
    lines = stage.operator.lines()
    key = f"{stage.namespace}/gpt"
    about = [line for line in lines if line["job"] == key]
    assert any("created pod gpt-w0" in line["message"] for line in about)
    assert any(line["generation"] == 1 for line in about)
    assert "eyJ" not in stage.operator.log(), "a token was logged"


def test_no_key_and_no_token_stands_in_a_log_a_status_an_event_or_a_metric(stage: Any, cluster: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    await_count(stage)
    agent = next(iter(player.agents.values()))
    assert agent.call("GET", "/v1/membership", token="x" * 40)[0] == 401
    kinds = "ftj,events,pods,services,configmaps,networkpolicies"
    made = cluster.kubectl("get", kinds, "-n", stage.namespace, "-o", "json", "--show-managed-fields")
    told = made + stage.operator.log() + stage.operator.get("/metrics")[1]
    assert all(word in told for word in (agent.uid, "GenerationPublished", "holdfast_incidents_total")), (
        "all was read"
    )
    hidden = hidden_words(stage, player)
    assert all(len(word) > 30 for words in hidden.values() for word in words)
    assert [name for name, words in hidden.items() if any(word in told for word in words)] == []


def hidden_words(stage: Any, player: Any) -> dict[str, list[str]]:
    """What would give a secret away, in each form in which it is written somewhere."""
    authority = stage.core.read_namespaced_secret("holdfast-ca", "holdfast-system").data["ca.key"]
    pem = base64.b64decode(authority).decode()
    key = stage.core.read_namespaced_secret("holdfast-key", "holdfast-system").data["key"]
    agents = list(player.agents.values())
    return {
        "the CA's key": [authority[-60:], *(line for line in pem.splitlines() if len(line) == 64)],
        "the operator's key": [key, base64.b64decode(key).hex()],
        "the job's key": [agent.membership["jobKey"] for agent in agents if agent.membership],
        "an agent's token": [agent._token for agent in agents],
        "a token that was refused": ["x" * 40],
    }


def test_events_tell_the_story_to_kubectl_describe(stage: Any, cluster: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")

    def told_to_people() -> bool:
        text = cluster.kubectl("describe", "ftj", "gpt", "-n", stage.namespace)
        return "GenerationPublished" in text and "Infrastructure:" in text

    stage.wait(told_to_people, "both events are told")
