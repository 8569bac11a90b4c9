"""A job from its start to its end, and what the operator logs, on a real API server."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from kubernetes import client
from stage import Stage

SELECTOR = "holdfast.dev/job-name=gpt"


def test_a_launcher_that_ends_with_0_completes_the_job_for_good(stage: Stage) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    player.stop()
    for name in ("gpt-w0", "gpt-w1"):
        stage.kubelets.end(stage.namespace, name, 0)
    stage.wait(lambda: stage.is_true("Complete"), "the job is complete")
    assert stage.status()["summary"] == stage.condition("Complete")["reason"]
    assert stage.status()["completionTime"]
    assert stage.condition("Failed")["status"] != "True"
    stage.core.delete_namespaced_pod("gpt-w1", stage.namespace)
    stage.wait(lambda: len(stage.pods()) == 1, "a finished pod is deleted")
    stage.operator.restart()
    assert stage.is_true("Complete")
    assert len(stage.pods()) == 1, "nothing is replaced after completion"
    assert stage.status().get("incidents", []) == []


def test_a_deleted_job_leaves_nothing(stage: Stage) -> None:
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


def test_a_job_applied_again_under_its_old_name_is_a_new_one(stage: Stage) -> None:
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


def test_relabelled_pods_train_on_and_get_their_labels_back(stage: Stage, cluster: Any) -> None:
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
    assert stage.incidents() == []


def is_ours(stage: Stage, name: str) -> bool:
    meta = stage.core.read_namespaced_pod(name, stage.namespace).metadata
    labels = {"app.kubernetes.io/managed-by": "holdfast", "holdfast.dev/job-name": "gpt"}
    return bool(meta.owner_references) and labels.items() <= meta.labels.items()


def test_two_gangs_needing_two_thirds_each_start_in_turn(stage: Stage) -> None:
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
    assert stage.is_true("Complete", first)


def test_a_job_grows_and_shrinks_when_told_to(stage: Stage) -> None:
    stage.nodes(3)
    player = stage.run(replicas=2)
    scale(stage, 3)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w1", "gpt-w2"]), "the third trains")
    scale(stage, 2)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w1"]), "two train")
    assert stage.ready_workers() == (2, 2)
    assert len(player.worlds[-1][2]) == 2
    assert stage.status()["membership"]["directives"]["drain"] == []


def scale(stage: Stage, replicas: int) -> None:
    patch = {"spec": {"workers": {"replicas": replicas}}}
    stage.custom.patch_namespaced_custom_object(
        "holdfast.dev", "v1alpha1", stage.namespace, "faulttolerantjobs", "gpt", patch
    )


@pytest.mark.thorough
def test_a_node_without_power_loses_its_worker_to_another_node(stage: Stage) -> None:
    nodes = stage.nodes(4)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    victim = stage.pod("gpt-w1")
    player.lose(victim.metadata.uid)
    stage.kubelets.silent.add(victim.spec.node_name)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains", 240)
    assert stage.pod("gpt-w3").spec.node_name in set(nodes) - {victim.spec.node_name}
    stage.await_count()
    assert stage.incidents() == [("Infrastructure", "gpt-w1")]
    stage.kubelets.silent.discard(victim.spec.node_name)


def test_every_log_line_is_json_and_reconcile_lines_name_the_job(stage: Stage) -> None:
    stage.nodes(1)
    stage.run(replicas=1)
    lines = stage.operator.lines()
    key = f"{stage.namespace}/gpt"
    about = [line for line in lines if line["job"] == key]
    assert any("created pod gpt-w0" in line["message"] for line in about)
    assert any(line["generation"] == 1 for line in about)
    assert "eyJ" not in stage.operator.log(), "a token was logged"


def test_no_secret_appears_in_a_log_status_event_or_metric(stage: Stage, cluster: Any) -> None:
    """The secrets are keys and tokens."""
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")
    stage.await_count()
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


def hidden_words(stage: Stage, player: Any) -> dict[str, list[str]]:
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


def test_events_tell_the_story_to_kubectl_describe(stage: Stage, cluster: Any) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")

    def told_to_people() -> bool:
        text = cluster.kubectl("describe", "ftj", "gpt", "-n", stage.namespace)
        return "GenerationPublished" in text and "Infrastructure:" in text

    stage.wait(told_to_people, "both events are told")
