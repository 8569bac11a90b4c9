"""What keeps workers from starting is reported by its reason, on a real API server."""

from __future__ import annotations

from typing import Any

from stage import Stage

SELECTOR = "holdfast.dev/job-name=gpt"


def told(stage: Stage, word: str) -> dict[str, Any] | None:
    """A true condition, or the shown status, that has this word."""
    for condition in stage.status().get("conditions") or []:
        if condition["status"] == "True" and word in condition["reason"]:
            return dict(condition)
    return None


def test_a_quota_that_is_too_small_is_said_and_mended(stage: Stage) -> None:
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


def test_a_worker_that_no_node_could_hold_is_said(stage: Stage) -> None:
    stage.nodes(2, cpu="2")
    stage.apply(stage.job(replicas=2, cpu="64"))
    condition = stage.wait(lambda: told(stage, "Unschedulable"), "it is said")
    assert "cpu" in condition["message"]
    assert all(pod.spec.scheduling_gates for pod in stage.pods()), "it holds no place"


def test_an_image_that_cannot_be_pulled_is_said_and_mended(stage: Stage) -> None:
    stage.nodes(1)
    stage.kubelets.broken[stage.namespace] = ("ImagePullBackOff", 'Back-off pulling image "train:1"')
    stage.apply(stage.job(replicas=1))
    condition = stage.wait(lambda: told(stage, "ImagePull"), "it is said")
    assert "train:1" in condition["message"]
    del stage.kubelets.broken[stage.namespace]
    stage.play()
    stage.wait(lambda: stage.recovered(["gpt-w0"]), "the job goes on once the image is there")


def test_a_pod_that_the_api_server_refuses_is_said(stage: Stage) -> None:
    stage.nodes(1)
    body = stage.job(replicas=1)
    body["spec"]["workers"]["template"]["spec"]["dnsPolicy"] = "Nonsense"
    stage.apply(body)
    condition = stage.wait(lambda: told(stage, "Invalid"), "it is said")
    assert "dnsPolicy" in condition["message"]


def test_a_foreign_pod_of_the_same_name_is_not_touched(stage: Stage) -> None:
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
