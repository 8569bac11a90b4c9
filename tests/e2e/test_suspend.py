"""A job that gives its nodes back and takes them again, with real launchers: nothing is lost, nothing is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast_testbed.drill.faults import DrillJob, newest_commit, step_of

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_suspended_job_resumes_from_the_step_all_ranks_agreed_on(running_job: Callable[..., Any]) -> None:
    job = running_job()
    stage: DrillJob = job.stage
    known = incidents(stage)

    suspend(stage, True)
    stage.watcher.wait("the suspension", lambda: stage.watcher.view.is_true("Suspended"), timeout=240)
    stage.watcher.wait("the end of the pods", lambda: not running(stage), timeout=240)
    last = step_of(newest_commit(stage.checkpoints))
    assert f"step {last}" in condition(stage)["message"]

    suspend(stage, False)
    stage.watcher.wait_for_world(3, steps=5, timeout=300)

    # The operator tells of the first claim with its next pass, which may come after the steps themselves.
    stage.watcher.wait("where training went on", lambda: origin(stage).get("generation") is not None, timeout=60)
    assert origin(stage)["step"] == last
    assert incidents(stage) == known
    assert job.counted == {}


def running(stage: DrillJob) -> list[str]:
    return [pod.name for pod in stage.watcher.pods if pod.phase in ("Pending", "Running")]


def suspend(stage: DrillJob, wanted: bool) -> None:
    patch = json.dumps({"spec": {"suspend": wanted}})
    stage.cluster.kubectl("-n", stage.watcher.namespace, "patch", "ftj", "gpt", "--type", "merge", "-p", patch)


def status(stage: DrillJob) -> dict[str, Any]:
    text = stage.cluster.kubectl("-n", stage.watcher.namespace, "get", "ftj", "gpt", "-o", "json")
    found: dict[str, Any] = json.loads(text)["status"]
    return found


def origin(stage: DrillJob) -> dict[str, Any]:
    return dict(status(stage)["startedFrom"])


def incidents(stage: DrillJob) -> set[tuple[int, int]]:
    """All that the resource tells of, by the attempt that each one ended."""
    return {(told["generation"], told["attempt"]) for told in status(stage).get("incidents", [])}


def condition(stage: DrillJob) -> dict[str, Any]:
    return next(found for found in status(stage)["conditions"] if found["type"] == "Suspended")
