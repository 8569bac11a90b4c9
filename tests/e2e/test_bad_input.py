"""What cannot run says so, by name and with the mend; nothing of a user's is deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.install import small_example
from holdfast_testbed.drill.watcher import Watcher

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

Job = dict[str, Any]


def trainer(job: Job) -> dict[str, Any]:
    container: dict[str, Any] = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    return container


def apply(cluster: Cluster, namespace: str, change: Callable[[Job], None]) -> None:
    """With one worker: what is wrong is wrong for each of them."""
    job = small_example(50)
    job["spec"]["workers"]["replicas"] = job["spec"]["elasticity"]["minReplicas"] = 1
    job["spec"]["recovery"]["budgets"] = [{"cause": "Application", "maxRestarts": 1}]
    change(job)
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(job))


def words(watcher: Watcher) -> str:
    return " ".join(f"{name}/{reason}: {text}" for name, (_, reason, text) in watcher.view.conditions.items())


def no_holdfast(job: Job) -> None:
    trainer(job)["command"][0] = "holdfast-is-not-in-this-image"


def no_image(job: Job) -> None:
    trainer(job)["image"] = "localhost:9/nobody/nothing:none"


def no_claim(job: Job) -> None:
    job["spec"]["checkpoint"]["volume"]["claimName"] = "no-such-claim"


def too_big(job: Job) -> None:
    trainer(job)["resources"]["requests"]["cpu"] = "4000"


def no_scheduler(job: Job) -> None:
    job["spec"]["workers"]["template"]["spec"]["schedulerName"] = "nobody"


def init_fails(job: Job) -> None:
    own = trainer(job)
    init = {key: own[key] for key in ("image", "imagePullPolicy", "securityContext") if key in own}
    failing = {**init, "name": "fetch", "command": ["python", "-c", "raise SystemExit('no bucket of this name')"]}
    job["spec"]["workers"]["template"]["spec"]["initContainers"] = [failing]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_holdfast, "HoldfastMissing"),
        (no_image, "Image"),
        (no_claim, "VolumeMissing"),
        (too_big, "Unschedulable"),
        (no_scheduler, "NoSchedulerResponse"),
        (init_fails, "its init container fetch ended with exit code 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_template_that_cannot_run_is_named(
    cluster: Cluster, namespace: str, change: Callable[[Job], None], reason: str
) -> None:
    apply(cluster, namespace, change)
    with Watcher(cluster, namespace, "gpt") as watcher:
        watcher.wait(f"a condition that says {reason}", lambda: reason in words(watcher), timeout=240)
        assert not watcher.view.is_true("Complete")


def test_script_failing_at_import_ends_as_failed_with_traceback(cluster: Cluster, namespace: str) -> None:
    def fail_at_import(job: Job) -> None:
        trainer(job)["command"] = ["holdfast", "run", "--", "python", "-c", "import a_module_that_is_not_there"]

    apply(cluster, namespace, fail_at_import)
    with Watcher(cluster, namespace, "gpt") as watcher:
        watcher.wait("the job's failure", lambda: watcher.view.is_true("Failed"), timeout=300)
        assert "No module named 'a_module_that_is_not_there'" in words(watcher)
        assert set(watcher.view.incidents_by_cause) == {"Application"}


def test_checkpoint_folder_of_newer_format_is_refused_and_kept(cluster: Cluster, namespace: str) -> None:
    """The message names the folder and its format, and nothing in the folder changes."""
    folder = cluster.checkpoint_dir(namespace) / namespace / "gpt"
    commit = folder / "step-10.g1.a1"
    commit.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o777)
    manifest = json.dumps({"version": 99, "schema": 99, "step": 10, "generation": 1, "attempt": 1})
    (commit / "MANIFEST.json").write_text(manifest)

    apply(cluster, namespace, lambda job: None)
    with Watcher(cluster, namespace, "gpt") as watcher:
        watcher.wait("the job's failure", lambda: watcher.view.is_true("Failed"), timeout=240)
        assert commit.name in words(watcher)
    assert (commit / "MANIFEST.json").read_text() == manifest
