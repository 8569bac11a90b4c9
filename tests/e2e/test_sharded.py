"""A model sharded over pods on real nodes: what one replica loses comes from another's memory, and no bit tells."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.faults import DrillJob, delete_pod
from holdfast_testbed.drill.install import job_with_script
from holdfast_testbed.drill.script_log import Note
from holdfast_testbed.drill.watcher import Watcher

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

JOB = "sharded"
SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
WORKERS = 4
BATCH, EPOCH_STEPS = 8, 60  # of the script
FULL = "e2e.holdfast.dev/full"
LATE_COUNT_SECONDS = 2.0


@pytest.fixture
def stage(cluster: Cluster, namespace: str) -> Iterator[DrillJob]:
    """Two replicas of two workers train, one rank each."""
    body = job_with_script(cluster, namespace, JOB, SCRIPT, "--pace", "0.05")
    trainer = body["spec"]["workers"]["template"]["spec"]["containers"][0]
    trainer["command"].insert(2, "--warm-processes=none")
    body["spec"]["workers"]["replicas"] = WORKERS
    body["spec"]["elasticity"] = {"minReplicas": 2, "replicaStep": 2, "onFailure": "Shrink"}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(body))
    with Watcher(cluster, namespace, JOB) as watcher:
        watcher.wait_for_world(WORKERS, steps=5, timeout=300)
        yield DrillJob(cluster=cluster, watcher=watcher, say=print)


def test_lost_pod_and_killed_rank_cost_a_sharded_model_nothing(stage: DrillJob, tmp_path: Path) -> None:
    """Neither a step is lost nor does a bit differ."""
    with no_room(stage.cluster):
        delete_pod(stage)
        stage.watcher.wait_for_world(2, steps=5, timeout=120)  # the lost worker's mate stands by
    settle(stage, {"Interruption": 1})
    kill_a_rank(stage)
    settle(stage, {"Interruption": 1, "Infrastructure": 1})

    told = [(i.cause, i.lost_steps, i.restored_from) for i in stage.watcher.view.incidents]
    assert sorted(told) == [("Infrastructure", 0, "survivor"), ("Interruption", 0, "survivor")]
    seen = notes_until_now(stage)
    assert made_twice(seen) == []
    assert script_log.wrong_samples(seen, batch=BATCH, epoch=EPOCH_STEPS) == 0
    audits = {note.weights.split(" (")[0] for note in seen if note.do == "audit"}
    assert audits == {"exactly once"}
    made = weights(seen)
    assert made == weights(undisturbed(tmp_path, steps=len(made)))


@contextmanager
def no_room(cluster: Cluster) -> Iterator[None]:
    """No node takes another pod."""
    cluster.kubectl("taint", "nodes", "--all", f"{FULL}=true:NoSchedule")
    try:
        yield
    finally:
        cluster.kubectl("taint", "nodes", "--all", f"{FULL}-")


def kill_a_rank(stage: DrillJob) -> None:
    pod = stage.workers()[1]
    stage.cluster.signal(stage.rank_process(pod), signal.SIGKILL)


def settle(stage: DrillJob, counted: dict[str, int]) -> None:
    """So much is counted and no more, each incident is told to its end, and all train."""
    watcher = stage.watcher

    def told() -> bool:
        incidents = watcher.view.incidents
        return len(incidents) == sum(counted.values()) and all(one.resumed for one in incidents)

    watcher.wait(f"incidents {counted}", told, timeout=120)
    watcher.wait_for_world(WORKERS, steps=5, timeout=240)
    time.sleep(LATE_COUNT_SECONDS)  # for an incident too many
    assert dict(watcher.view.incidents_by_cause) == counted


def notes_until_now(stage: DrillJob) -> list[Note]:
    """Up to the last step of which some rank may not have spoken yet."""
    now = time.time()
    seen = [note for note in script_log.read(stage.checkpoints) if note.at <= now]
    last = max(note.step for note in seen if note.do == script_log.COMMIT)
    return [note for note in seen if note.step < last]


def made_twice(seen: list[Note]) -> list[int]:
    """Steps that one world committed and a later one again."""
    made = Counter(
        step for step, _ in {(note.step, note.attempt_id) for note in seen if note.do == script_log.COMMIT}
    )
    return sorted(step for step, times in made.items() if times > 1)


def weights(seen: list[Note]) -> dict[int, set[str]]:
    """By step, what ranks had after it: one digest of each shard, if all is well."""
    after: dict[int, set[str]] = {}
    for note in seen:
        if note.do == script_log.COMMIT:
            after.setdefault(note.step, set()).add(note.weights)
    return after


def undisturbed(folder: Path, *, steps: int) -> list[Note]:
    """What the script notes in a world of one, where nothing is sharded and nothing fails."""
    script = shutil.copy(SCRIPT, folder)
    words = [sys.executable, script, "--whole", "--max-steps", str(steps)]
    subprocess.run(words, env={**os.environ, "HOLDFAST_POD_NAME": "alone"}, check=True, timeout=240)
    return script_log.read(folder)
