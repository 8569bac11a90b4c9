"""Changes of a running and of a suspended job: what the schema refuses, and its messages."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from .jobs import ALL_RULES, OBJECT, POD, RULES, VOLUME, Jobs, job, message

CHANGES_REFUSED = [
    ("another image", [(f"{POD}.containers", [{"name": "trainer", "image": "train:2"}])], "template is immutable"),
    (
        "a pod field that the schema does not list",
        [(f"{POD}.priorityClassName", "high")],
        "template is immutable",
    ),
    (
        "an unlisted field for another",
        [(f"{POD}.nodeSelector", None), (f"{POD}.priorityClassName", "high")],
        "template is immutable",
    ),
    (
        "another variable by another way",
        [(f"{POD}.containers", [{"name": "trainer", "image": "train:1", "env": [{"name": "A", "valueFrom": {}}]}])],
        "template is immutable",
    ),
    ("a group", [(f"{POD}.schedulingGroup", {"podGroupName": "group"})], "template is immutable"),
    (
        "another kind of volume",
        [(f"{POD}.volumes", [{"name": "data", "emptyDir": {}}])],
        "template is immutable",
    ),
    ("another label", [("spec.workers.template.metadata.labels", {"a": "b"})], "delete the job and apply it again"),
    ("more processes", [("spec.workers.processesPerWorker", 2)], "processesPerWorker is immutable"),
    ("processes by the GPUs", [("spec.workers.processesPerWorker", None)], "processesPerWorker is immutable"),
    ("exclusive nodes", [("spec.scheduling.nodeSharing", "Exclusive")], "scheduling is immutable"),
    ("another queue", [("spec.scheduling.queue", "b")], "scheduling is immutable"),
    ("another backend", [("spec.rendezvous.backend", "C10d")], "rendezvous is immutable"),
    ("another volume", [("spec.checkpoint.volume.claimName", "other")], "checkpoint.volume is immutable"),
    ("no volume", [("spec.checkpoint.volume", None)], "checkpoint.volume is immutable"),
    ("no volume by the back door", [("spec.checkpoint", None)], "checkpoint.volume is immutable"),
    ("fewer than the fewest", [("spec.workers.replicas", 1)], "minReplicas is above workers.replicas"),
]


@pytest.mark.parametrize(("changes", "says"), [c[1:] for c in CHANGES_REFUSED], ids=[c[0] for c in CHANGES_REFUSED])
def test_a_change_that_cannot_be_carried_out_is_refused(
    running: Jobs, changes: list[tuple[str, Any]], says: str
) -> None:
    with pytest.raises(ApiException) as caught:
        running.patch("gpt", *changes)
    assert says in message(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        ("spec.workers.replicas", 5),
        ("spec.elasticity.minReplicas", 1),
        ("spec.elasticity.maxReplicas", 8),
        ("spec.elasticity.onFailure", "Replace"),
        ("spec.recovery.budgets", []),
        (RULES, ALL_RULES),
        ("spec.recovery.escalation", {"actions": ["InPlace", "FailJob"]}),
        ("spec.checkpoint.intervalSteps", 10),
        ("spec.checkpoint.retention.keepLast", 9),
        ("spec.checkpoint.retention", {"keepHours": 6, "keepDaily": 7, "keepWeekly": 13, "keepEvery": 10000}),
        ("spec.checkpoint.retention.keepBest", [{"metric": "val_loss", "mode": "Min", "count": 3}]),
        ("spec.startupDeadlineSeconds", 60),
    ],
    ids=lambda change: change[0],
)
def test_what_a_running_job_can_follow_may_change(running: Jobs, change: tuple[str, Any]) -> None:
    assert running.patch("gpt", change)["metadata"]["generation"] == 2


STORED_REFUSED = [
    ("no object store", [(OBJECT, None)], "checkpoint.object and its url are immutable"),
    ("no place at all", [("spec.checkpoint", None)], "checkpoint.object and its url are immutable"),
    ("another bucket", [(f"{OBJECT}.url", "s3://c/p")], "checkpoint.object and its url are immutable"),
    ("a volume in addition", [(VOLUME, "c")], "checkpoint.volume is immutable"),
    ("a volume instead", [(OBJECT, None), (VOLUME, "c")], "checkpoint.volume is immutable"),
]


@pytest.mark.parametrize(("changes", "says"), [c[1:] for c in STORED_REFUSED], ids=[c[0] for c in STORED_REFUSED])
def test_job_without_a_volume_keeps_its_object_store(stored: Jobs, changes: list[tuple[str, Any]], says: str) -> None:
    with pytest.raises(ApiException) as caught:
        stored.patch("gpt", *changes)
    assert says in message(caught.value)


def test_credentials_and_further_tiers_of_a_job_without_a_volume_may_change(stored: Jobs) -> None:
    changes = ((f"{OBJECT}.secretRef.name", "new"), ("spec.checkpoint.memory", {"sizeLimit": "1Gi"}))
    assert stored.patch("gpt", *changes)["metadata"]["generation"] == 2


def test_job_without_any_place_cannot_get_an_object_store(jobs: Jobs) -> None:
    jobs.create(job())
    with pytest.raises(ApiException) as caught:
        jobs.patch("gpt", (OBJECT, {"url": "s3://b/p"}))
    assert "checkpoint.object and its url are immutable" in message(caught.value)


def test_copies_of_a_running_job_may_change(running: Jobs) -> None:
    assert running.patch("gpt", (OBJECT, {"url": "s3://b/p"}))["metadata"]["generation"] == 2
    assert running.patch("gpt", (f"{OBJECT}.url", "s3://c/p"))["metadata"]["generation"] == 3
    assert running.patch("gpt", (OBJECT, None))["metadata"]["generation"] == 4


SUSPENDED = {
    "type": "Suspended",
    "status": "True",
    "observedGeneration": 2,
    "lastTransitionTime": "2026-01-31T12:00:00Z",
    "reason": "Suspended",
    "message": "no worker is left",
}
IN_SUSPENSION: list[tuple[str, Any]] = [
    (f"{POD}.containers", [{"name": "trainer", "image": "train:2"}]),
    (f"{POD}.priorityClassName", "high"),
    ("spec.workers.processesPerWorker", 2),
    ("spec.workers.processesPerWorker", None),
]


@pytest.mark.parametrize("change", IN_SUSPENSION, ids=lambda change: f"{change[0]}={change[1]}"[-60:])
def test_a_suspended_job_may_change_once_no_worker_is_left(running: Jobs, change: tuple[str, Any]) -> None:
    running.patch("gpt", ("spec.suspend", True))
    with pytest.raises(ApiException, match="unless the job's condition Suspended is true"):
        running.patch("gpt", change)
    running.patch_status("gpt", {"conditions": [SUSPENDED]})
    assert running.patch("gpt", change)["metadata"]["generation"] == 3
    running.patch("gpt", change, ("spec.suspend", False))
    with pytest.raises(ApiException, match="immutable"):
        running.patch("gpt", ("spec.workers.processesPerWorker", 3))
