"""Spares, shrinking, growth and `kubectl scale` of one job on real nodes, as docs/how-to/elasticity.md says it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.faults import DrillJob, commits
from holdfast_testbed.drill.install import DRILL_JOB
from holdfast_testbed.drill.matrix import kill_launcher
from holdfast_testbed.drill.spec_edits import edit
from holdfast_testbed.drill.trial import WORKERS, Cost, cost_so_far, newly_counted
from holdfast_testbed.drill.watcher import PodView, Watcher

pytestmark = pytest.mark.e2e

NAMESPACE = "elastic"
FULL = "example.org/full"
COOL_DOWN = timedelta(seconds=5)
REPORTED_AFTER = 5.0
"""Seconds within which a save is known to the operator, on a busy machine too."""
CLOCK_TICK = timedelta(seconds=1)
"""Of the times that a pod carries."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The job, in the hands of one test."""

    stage: DrillJob
    known: dict[str, int] = field(default_factory=dict)
    """What had been counted before, by cause."""

    @property
    def watcher(self) -> Watcher:
        return self.stage.watcher

    @property
    def hold(self) -> Path:
        """While it is there, no save ends."""
        return self.stage.checkpoints / "hold-saves"

    @property
    def counted(self) -> dict[str, int]:
        return newly_counted(self.known, self.watcher.view.incidents_by_cause)

    def kubectl(self, *words: str) -> str:
        return self.stage.cluster.kubectl("-n", NAMESPACE, *words)

    def ask(self, *, replicas: int = WORKERS, spares: int = 0, **elasticity: int) -> None:
        """Edit the job in flight, until all who train know of it. What is not said is as at first."""
        bounds = {"minReplicas": 2, "maxReplicas": None, "growCooldownSeconds": None, **elasticity}
        edit(self.stage, {"workers": {"replicas": replicas, "spares": spares}, "elasticity": bounds})

    def says(self, condition: str) -> str:
        """Its message while it is true."""
        status, _, message = self.watcher.view.conditions.get(condition, ("", "", ""))
        return message if status == "True" else ""

    def pods(self) -> list[PodView]:
        """All that are there or on their way."""
        return [pod for pod in self.watcher.pods if pod.phase in ("Pending", "Running") and not pod.deleting]

    def idle(self) -> list[PodView]:
        return [pod for pod in self.pods() if pod.name not in self.watcher.view.members]

    def trains(self, size: int) -> None:
        self.watcher.wait_for_world(size, steps=5, timeout=240)

    @contextmanager
    def no_room(self) -> Iterator[None]:
        """No node takes a new pod. A cordon would send away those that are there."""
        self.stage.cluster.kubectl("taint", "nodes", "--all", f"{FULL}=:NoSchedule")
        try:
            yield
        finally:
            self.stage.cluster.kubectl("taint", "nodes", "--all", f"{FULL}-")


@pytest.fixture(scope="module")
def stage(stage: DrillJob) -> DrillJob:
    """It trains: what is edited in flight is known to those who do."""
    stage.watcher.wait_for_world(WORKERS, steps=5, timeout=300)
    return stage


@pytest.fixture
def job(stage: DrillJob) -> Elastic:
    """Three train, who may be two, and nothing else is there."""
    job = Elastic(stage=stage)
    job.hold.unlink(missing_ok=True)
    job.ask()
    job.trains(WORKERS)
    job.watcher.wait("no pod beside them", lambda: not job.idle(), timeout=120)
    script_log.clear(stage.checkpoints)
    job.known.update(job.watcher.view.incidents_by_cause)
    return job


def test_spare_replaces_a_lost_worker_without_waiting_for_a_pod(job: Elastic) -> None:
    job.ask(spares=1)
    job.watcher.wait("a spare", lambda: "1 of 1 spares are on standby" in job.says("Ready"), timeout=120)
    (spare,) = job.idle()
    script = f"notes-{spare.name}.*"
    job.watcher.wait("its script", lambda: any(job.stage.checkpoints.glob(script)), timeout=120)
    before, lost = job.watcher.view.members, job.stage.workers()[1]

    with job.no_room():
        kill_launcher(job.stage, lost)
        after = tuple(spare.name if name == lost.name else name for name in before)
        job.watcher.wait("the spare in the lost one's place", lambda: job.watcher.view.members == after, timeout=60)
        job.trains(WORKERS)
        job.watcher.wait("no spare", lambda: "0 of 1 spares are on standby" in job.says("Ready"), timeout=60)

    job.watcher.wait("another spare", lambda: "1 of 1 spares are on standby" in job.says("Ready"), timeout=120)
    assert {pod.name for pod in job.idle()}.isdisjoint({*before, spare.name})
    assert job.watcher.view.members == after
    assert job.counted == {"Infrastructure": 1}
    assert cost_so_far(job.stage) == Cost()


@pytest.mark.thorough
def test_lower_minimum_continues_and_growth_waits_for_the_save(job: Elastic) -> None:
    """The replacement is admitted when the save has ended."""
    job.ask(minReplicas=WORKERS)
    before = job.watcher.view.generation
    with job.no_room():
        kill_launcher(job.stage, job.stage.workers()[-1])
        job.watcher.wait("its word", lambda: "1 worker missing" in job.says("Restarting"), timeout=60)
        job.watcher.wait("its need", lambda: "unschedulable" in job.says("Degraded"), timeout=60)

        job.ask(minReplicas=2)
        job.trains(2)
        job.hold.touch()
        job.watcher.wait("a save that the operator has heard of", lambda: told_of_a_save(job), timeout=60)
    waits = "is ready; waiting for the end of a checkpoint"
    job.watcher.wait("the replacement, ready", lambda: waits in job.says("Degraded"), timeout=240)
    assert job.watcher.view.generation == before
    job.hold.unlink()

    job.trains(WORKERS)
    job.watcher.wait("that nothing is missing", lambda: not job.says("Degraded"), timeout=30)
    (save,) = {(note.step, note.attempt_id) for note in held(job)}
    kept = [commit.name for commit in commits(job.stage.checkpoints)]
    assert f"step-{save[0]}.g{save[1].generation}.a{save[1].attempt}" in kept
    assert job.counted == {"Infrastructure": 1}
    assert cost_so_far(job.stage) == Cost()


@pytest.mark.thorough
def test_a_job_grows_into_room_once_all_is_well_for_a_while(job: Elastic) -> None:
    job.ask(maxReplicas=4, growCooldownSeconds=int(COOL_DOWN.total_seconds()))
    job.trains(4)
    job.watcher.wait("its word", lambda: job.watcher.view.ready == "4/3", timeout=30)
    there = {pod.name for pod in job.pods()}

    kill_launcher(job.stage, job.stage.workers()[-1])
    job.trains(WORKERS)
    job.trains(4)
    incident = job.watcher.view.incidents[-1]
    (another,) = {pod.name for pod in job.pods()} - there
    assert incident.resumed is not None
    assert made(job, another) >= incident.resumed + COOL_DOWN - CLOCK_TICK

    job.ask()
    job.trains(WORKERS)
    assert job.counted == {"Infrastructure": 1}
    assert cost_so_far(job.stage) == Cost()


def test_kubectl_scales_a_job_down_and_up_and_nothing_is_lost(job: Elastic) -> None:
    first, second, third = job.watcher.view.members

    job.kubectl("scale", f"ftj/{DRILL_JOB}", "--replicas=2")
    job.trains(2)
    job.watcher.wait("its word", lambda: job.watcher.view.ready == "2/2", timeout=30)
    job.watcher.wait("the end of the third", lambda: third not in {pod.name for pod in job.pods()}, timeout=60)

    job.kubectl("scale", f"ftj/{DRILL_JOB}", "--replicas=3")
    job.trains(WORKERS)
    assert job.watcher.view.members[:2] == (first, second)
    assert job.counted == {}
    assert cost_so_far(job.stage) == Cost()


def held(job: Elastic) -> list[script_log.Note]:
    """Saves that were held up."""
    return [note for note in script_log.read(job.stage.checkpoints) if note.do == script_log.SAVE]


def told_of_a_save(job: Elastic) -> bool:
    """Workers report each second; a pod that finds room may train as soon as that."""
    return any(note.at < time.time() - REPORTED_AFTER for note in held(job))


def made(job: Elastic, pod: str) -> datetime:
    shown: dict[str, Any] = json.loads(job.kubectl("get", "pod", pod, "-o", "json"))
    return datetime.fromisoformat(shown["metadata"]["creationTimestamp"])
