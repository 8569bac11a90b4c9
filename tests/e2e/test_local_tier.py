"""A job whose ranks commit to their nodes' disks, as docs/how-to/local-tier.md says it, loses all of them at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.faults import DRILL_INTERVAL_STEPS, DrillJob, await_save, newest_commit, step_of
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job
from holdfast_testbed.drill.watcher import Watcher

pytestmark = pytest.mark.e2e

EVERY = 5


@pytest.fixture
def stage(cluster: Cluster, namespace: str) -> Iterator[DrillJob]:
    """Three workers train, and commit ten times as often on their disks as on the volume."""
    assert DRILL_INTERVAL_STEPS == 10 * EVERY
    apply_drill_job(cluster, namespace, checkpoint={"local": {"sizeLimit": "64Mi", "intervalSteps": EVERY}})
    with Watcher(cluster, namespace, DRILL_JOB) as watcher:
        watcher.wait_for_world(3, steps=5, timeout=300)
        yield DrillJob(cluster=cluster, watcher=watcher, say=print)


@pytest.mark.thorough
def test_when_all_ranks_die_training_resumes_from_node_disks(stage: DrillJob) -> None:
    ranks = [stage.rank_process(pod) for pod in stage.workers()]
    await_save(stage)
    volume = newest_on_the_volume(stage)
    stage.watcher.wait("steps after the volume's commit", lambda: reached(stage) >= volume + 4 * EVERY, timeout=60)
    for rank in ranks:
        stage.cluster.signal(rank, signal.SIGKILL)
    before = reached(stage)
    stage.watcher.wait("the incident", lambda: bool(stage.watcher.view.incidents), timeout=60)
    stage.watcher.wait("its end", lambda: all(i.resumed for i in stage.watcher.view.incidents), timeout=120)

    (incident,) = stage.watcher.view.incidents
    assert incident.cause == "Infrastructure"
    assert incident.restored_from == "local"
    noted = script_log.read(stage.checkpoints)
    begun = max((note for note in noted if note.do == script_log.BEGIN), key=lambda note: note.attempt_id)
    # The newest one that all disks have: one more may have been on its way.
    assert volume < begun.step
    assert before - begun.step <= 3 * EVERY
    assert script_log.weights_equal(noted)


def reached(stage: DrillJob) -> int:
    """The newest step that was committed in memory, by the ranks' own notes."""
    return max((note.step for note in script_log.read(stage.checkpoints) if note.do == script_log.COMMIT), default=0)


def newest_on_the_volume(stage: DrillJob) -> int:
    """By the newest commit there."""
    return step_of(newest_commit(stage.checkpoints))
