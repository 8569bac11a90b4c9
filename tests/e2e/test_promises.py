"""Each promise of the README's table, on real nodes with real training: what was lost, and why it was counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from holdfast_testbed.drill.faults import DRILLS, Drill, DrillJob, commits
from holdfast_testbed.drill.promises import Outcome, losses_and_causes
from holdfast_testbed.drill.watcher import Watcher

pytestmark = pytest.mark.e2e

FEW_STEPS = 60


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name.replace(" ", "-"))
def test_a_fault_costs_no_more_than_promised(drill: Drill, running_job: Callable[..., Any]) -> None:
    job = running_job(spread=drill.takes_node)
    stage: DrillJob = job.stage
    stage.watcher.wait("a first checkpoint", lambda: _has_commit(stage), timeout=240)

    outcome = drill.run(stage)

    assert losses_and_causes(drill.promise, outcome) == (), _told(stage, outcome)
    stage.watcher.wait_for_world(3, steps=2, timeout=300)
    assert sum(job.counted.values()) == 1, f"one fault was counted otherwise: {job.counted}"


def test_undisturbed_job_completes_with_each_sample_seen_once(own_job: Callable[..., DrillJob]) -> None:
    stage = own_job(max_steps=FEW_STEPS)

    stage.watcher.wait("completion", lambda: stage.watcher.view.is_true("Complete"), timeout=300)

    logs = "".join(_logs(stage, pod.name) for pod in stage.watcher.pods)
    assert re.search(r"audit: exactly once", logs)
    assert stage.watcher.view.incidents_by_cause == {}


def _has_commit(stage: DrillJob) -> bool:
    return bool(commits(stage.checkpoints))


def _told(stage: DrillJob, outcome: Outcome) -> str:
    """What a reader needs first: the incidents, and the end of each worker's log."""
    said = [line for pod in stage.watcher.pods for line in _logs(stage, pod.name).splitlines()[-40:]]
    return "\n".join([*map(str, outcome.incidents), *said])


def _logs(stage: DrillJob, pod: str) -> str:
    watcher: Watcher = stage.watcher
    return stage.cluster.kubectl("-n", watcher.namespace, "logs", pod, "-c", "trainer", "--tail=200", check=False)
