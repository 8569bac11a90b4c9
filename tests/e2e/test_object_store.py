"""A job with an S3 server, as docs/how-to/object-store.md says it: for copies of its volume, or without a volume."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_testbed.build.commands import run
from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.faults import DRILL_INTERVAL_STEPS, DrillJob, await_save, commits, kill_at_once, step_of
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job, put_drill_script, small_example
from holdfast_testbed.drill.watcher import JOB_LABEL, METRICS_PORT, PodView, Watcher
from holdfast_testbed.fakes.s3 import S3Server, s3_server

pytestmark = pytest.mark.e2e

SECRET = "models-writer"
BUCKET = "models"
TIMELINE = "/var/run/holdfast/timeline.jsonl"
WAITS = "Training waits with its state in memory"


@pytest.fixture
def server(cluster: Cluster, tmp_path: Path) -> Iterator[S3Server]:
    """Where pods reach it; in a region that no client takes for granted."""
    with s3_server(tmp_path / "s3", address=cluster.host_address, region="eu-central-1") as server:
        server.make_bucket(BUCKET)
        yield server


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The job, and its checkpoints in the store."""

    stage: DrillJob
    server: S3Server

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/runs/{self.stage.watcher.namespace}/{self.stage.watcher.job}"

    @property
    def steps(self) -> list[int]:
        """Of the copies that are whole, oldest first. To the server a bucket is a folder."""
        folder = self.server.folder / self.url.removeprefix("s3://")
        return [step_of(commit) for commit in commits(folder)]

    @property
    def newest(self) -> int:
        return self.steps[-1] if self.steps else 0

    def kubectl(self, *words: str) -> str:
        return self.stage.cluster.kubectl("-n", self.stage.watcher.namespace, *words)


@pytest.fixture
def store(cluster: Cluster, namespace: str, server: S3Server) -> Mapping[str, Any]:
    """The server as a job names it, with its endpoint, its region and its credentials in a secret."""
    literals = [f"--from-literal={name}={value}" for name, value in server.environment.items()]
    cluster.kubectl("-n", namespace, "create", "secret", "generic", SECRET, *literals)
    return {"url": f"s3://{BUCKET}/runs", "secretRef": {"name": SECRET}}


@pytest.fixture
def copied(cluster: Cluster, namespace: str, server: S3Server, store: Mapping[str, Any]) -> Iterator[Copied]:
    """The job trains, with a volume and copies."""
    copies = {**store, "intervalSeconds": 0, "retention": {"keepLast": 5}}
    apply_drill_job(cluster, namespace, checkpoint={"object": copies})
    with Watcher(cluster, namespace, DRILL_JOB) as watcher:
        watcher.wait_for_world(3, steps=5, timeout=300)
        yield Copied(stage=DrillJob(cluster=cluster, watcher=watcher, say=print), server=server)


@pytest.fixture
def stored(
    cluster: Cluster, namespace: str, server: S3Server, store: Mapping[str, Any]
) -> Iterator[Callable[..., Copied]]:
    """The example trains without a volume. It ends with an audit of its samples."""
    with ExitStack() as stack:

        def start(*, max_steps: int, interval: int) -> Copied:
            body = small_example(max_steps)
            body["spec"]["checkpoint"] = {"object": store, "intervalSteps": interval, "retention": {"keepLast": 2}}
            cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(body))
            watcher = stack.enter_context(Watcher(cluster, namespace, body["metadata"]["name"]))
            watcher.wait_for_world(3, steps=5, timeout=300)
            return Copied(stage=DrillJob(cluster=cluster, watcher=watcher, say=print), server=server)

        yield start


@pytest.mark.thorough
def test_job_without_a_volume_resumes_from_the_object_store(stored: Callable[..., Copied]) -> None:
    interval, steps = 30, 150
    job = stored(max_steps=steps, interval=interval)
    stage, watcher = job.stage, job.stage.watcher
    assert "persistentVolumeClaim" not in job.kubectl("get", "pods", "-o", "json")
    launchers = [stage.launcher(pod) for pod in stage.workers()]
    watcher.wait("a checkpoint while no other is written", lambda: saved_lately(job, interval), timeout=120)
    newest = job.newest
    kill_at_once(stage, launchers)
    watcher.wait("the next step", lambda: watcher.view.incidents != () and ended(job), timeout=180)
    (incident,) = watcher.view.incidents
    assert (incident.cause, incident.restored_from) == ("Infrastructure", "shared")
    assert restored_steps(job) == {newest}
    assert incident.lost_steps is None or incident.lost_steps <= interval
    completes_with_each_sample_seen_once(job)
    assert job.newest == steps
    assert len(job.steps) == 2, "checkpoint.retention applies"
    assert "complete" in checkpoints(job, "verify", job.url)


@pytest.mark.thorough
def test_job_without_a_volume_waits_in_memory_while_the_object_store_is_away(stored: Callable[..., Copied]) -> None:
    job = stored(max_steps=300, interval=1000)
    stage, watcher = job.stage, job.stage.watcher
    first, second, _ = stage.workers()
    with job.server.away():
        kill_at_once(stage, [stage.launcher(second)])
        watcher.wait("a wait for the store", lambda: WAITS in trainer_log(job, first), timeout=120)
    watcher.wait_for_world(3, steps=5, timeout=180)
    watcher.wait("the incident's end", lambda: ended(job), timeout=30)
    (incident,) = watcher.view.incidents
    assert (incident.restored_from, incident.lost_steps) == ("survivor", 0)
    completes_with_each_sample_seen_once(job)


def saved_lately(job: Copied, interval: int) -> bool:
    return 0 < newest_step(job.stage.watcher) - job.newest < interval / 2 and job.newest > 0


def ended(job: Copied) -> bool:
    return all(incident.resumed for incident in job.stage.watcher.view.incidents)


def restored_steps(job: Copied) -> set[int]:
    """The steps from which the workers resumed."""
    shown = [job.kubectl("exec", pod.name, "-c", "trainer", "--", "cat", TIMELINE) for pod in job.stage.workers()]
    entries = [json.loads(line) for text in shown for line in text.splitlines()]
    return {entry["step"] for entry in entries if entry["kind"] == "restore"}


def completes_with_each_sample_seen_once(job: Copied) -> None:
    job.stage.watcher.wait("completion", lambda: job.stage.watcher.view.is_true("Complete"), timeout=300)
    assert re.search(r"audit: exactly once", worker_logs(job))


@pytest.mark.thorough
def test_copies_outlive_the_volume_and_wait_for_an_absent_store(copied: Copied) -> None:
    stage = copied.stage
    commits_arrive(copied)
    told = lose_pods_and_volume(copied)
    the_job_goes_on_from_the_copies(copied, told)
    the_store_is_away_for_a_while(copied)
    assert stage.watcher.view.incidents_by_cause == {"Interruption": 1}
    nothing_secret_is_told(copied)


def commits_arrive(copied: Copied) -> None:
    watcher = copied.stage.watcher
    watcher.wait("two copies", lambda: len(copied.steps) >= 2, timeout=120)
    # Read together: the newest copy may be another one a moment later.
    watcher.wait("the newest copy in the metrics", lambda: told_step(copied) == copied.newest, timeout=30)
    said = checkpoints(copied, "verify", copied.url, "--newest")
    assert "complete" in said
    listed = json.loads(checkpoints(copied, "ls", copied.url, "--json"))
    assert {commit["state"] for commit in listed["commits"]} == {"readable"}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What was there before the pods and the volume were gone."""

    noted: list[script_log.Note]
    newest_copy: int
    reached: int


def lose_pods_and_volume(copied: Copied) -> Loss:
    """All at once. The operator does not see it until it is done: new pods would find what is still there."""
    stage = copied.stage
    operator = stage.operator()
    launchers = [stage.launcher(pod) for pod in stage.workers()]
    await_save(stage)
    stage.watcher.wait("the copy of the newest commit", lambda: is_copied(copied), timeout=30)
    stage.cluster.signal(operator, signal.SIGSTOP)
    try:
        copied.kubectl("delete", "pods", "-l", f"{JOB_LABEL}={DRILL_JOB}", "--wait=false")
        for launcher in launchers:  # before a last commit is copied
            stage.cluster.signal(launcher, signal.SIGKILL)
        copied.kubectl("wait", "pods", "-l", f"{JOB_LABEL}={DRILL_JOB}", "--for=delete", "--timeout=60s")
        noted = script_log.read(stage.checkpoints)
        empty(stage.checkpoints)
        put_drill_script(stage.cluster, stage.watcher.namespace)  # an image of one's own would bring it
    finally:
        stage.cluster.signal(operator, signal.SIGCONT)
    reached = max(note.step for note in noted if note.do == script_log.COMMIT)
    return Loss(noted=noted, newest_copy=copied.newest, reached=reached)


def the_job_goes_on_from_the_copies(copied: Copied, before: Loss) -> None:
    stage, watcher = copied.stage, copied.stage.watcher
    # An operator that sleeps for longer than its Lease starts again, and has not seen how the pods ended.
    watcher.wait("a commit on the empty volume", lambda: bool(commits(stage.checkpoints)), timeout=400)
    watcher.wait("the incident's end", lambda: all(i.resumed for i in watcher.view.incidents), timeout=30)

    (incident,) = watcher.view.incidents
    assert incident.cause == "Interruption"
    assert incident.restored_from == "object"
    assert incident.lost_steps is not None
    # A rank that is killed between a commit and its own note has told its launcher of one step more.
    assert incident.lost_steps <= before.reached + 1 - before.newest_copy <= DRILL_INTERVAL_STEPS + 1

    noted = [*before.noted, *script_log.read(stage.checkpoints)]
    first = next(
        note for note in noted if note.do == script_log.BEGIN and note.attempt_id > before.noted[-1].attempt_id
    )
    assert first.step == before.newest_copy
    assert any(note.do == script_log.COMMIT and note.step == first.step for note in before.noted)
    assert script_log.weights_equal(noted)

    told = copied.kubectl(
        "get", "events", "--field-selector", "reason=TrainingResumed", "-o", "jsonpath={.items[*].message}"
    )
    assert "state from: object" in told
    shown = copied.kubectl("exec", stage.workers()[0].name, "-c", "trainer", "--", "cat", TIMELINE)
    (restore,) = (entry for entry in map(json.loads, shown.splitlines()) if entry["kind"] == "restore")
    assert (restore["step"], restore["stores"]) == (before.newest_copy, [copied.url])


def the_store_is_away_for_a_while(copied: Copied) -> None:
    watcher = copied.stage.watcher
    watcher.wait("the copy of the newest commit", lambda: is_copied(copied), timeout=60)
    assert failures(copied) == {}
    with copied.server.away():
        began, known = newest_step(watcher), copied.newest
        watcher.wait("a failure that is told", lambda: failures(copied) != {}, timeout=120)
        assert failures(copied).keys() == {"Network"}
        assert newest_step(watcher) > began + DRILL_INTERVAL_STEPS  # training does not wait
    ended = newest_step(watcher)
    watcher.wait("a copy of what came later", lambda: copied.newest > max(known, ended), timeout=60)
    watcher.wait("the newest copy in the metrics", lambda: told_step(copied) == copied.newest, timeout=30)
    logs = worker_logs(copied)
    assert logs.count("could not be uploaded") == 1  # however often it was tried
    assert f"is in {copied.url} again" in logs


def nothing_secret_is_told(copied: Copied) -> None:
    """Neither to who may read the namespace without its secrets, nor to who may read the volume or the bucket."""
    cluster, folder = copied.stage.cluster, copied.stage.checkpoints
    told = {
        "job, pods and events": copied.kubectl("get", "ftj,pods,events,configmaps", "-o", "yaml"),
        "workers": worker_logs(copied),
        "operators": cluster.kubectl(
            "-n", OPERATOR_NAMESPACE, "logs", "-l", "app.kubernetes.io/name=holdfast", "--tail=-1", "--prefix"
        ),
        "metrics": "".join(scraped(pod) for pod in copied.stage.workers()),
    }
    assert all(told.values())
    kept = {str(path): path.read_text(errors="replace") for path in (*files(folder), *files(copied.server.folder))}
    hidden = copied.server.credentials.values()
    assert [where for where, text in {**told, **kept}.items() if any(secret in text for secret in hidden)] == []


# What is looked at


def checkpoints(copied: Copied, *words: str) -> str:
    """`holdfast checkpoints …`, from outside of the cluster."""
    command = [sys.executable, "-m", "holdfast", "checkpoints", *words]
    return run(command, environment=copied.server.environment)


def is_copied(copied: Copied) -> bool:
    there = commits(copied.stage.checkpoints)
    return bool(there) and step_of(there[-1]) == copied.newest


def newest_step(watcher: Watcher) -> int:
    newest = watcher.newest()
    assert newest is not None
    return newest.step


def told_step(copied: Copied) -> int | None:
    """Of the newest copy, in the words of who made it."""
    found = samples(copied, "holdfast_checkpoint_step")
    return max((int(value) for labels, value in found if labels["tier"] == "object"), default=None)


def failures(copied: Copied) -> dict[str, int]:
    return {labels["cause"]: int(value) for labels, value in samples(copied, "holdfast_upload_failures_total")}


def samples(copied: Copied, name: str) -> list[tuple[dict[str, str], float]]:
    families = (f for pod in copied.stage.workers() for f in text_string_to_metric_families(scraped(pod)))
    return [(s.labels, s.value) for family in families for s in family.samples if s.name == name]


def scraped(pod: PodView) -> str:
    with urllib.request.urlopen(f"http://{pod.ip}:{METRICS_PORT}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def worker_logs(copied: Copied) -> str:
    """Of launcher, ranks and sidecar."""
    which = ("-l", f"{JOB_LABEL}={copied.stage.watcher.job}", "--all-containers", "--tail=-1", "--prefix")
    return copied.kubectl("logs", *which)


def trainer_log(copied: Copied, pod: PodView) -> str:
    return copied.kubectl("logs", pod.name, "-c", "trainer", "--tail=-1")


def empty(folder: Path) -> None:
    """As a volume that was made anew."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def files(folder: Path) -> list[Path]:
    """Those that are not about to vanish."""
    return [path for path in folder.rglob("*") if path.is_file() and "step-" not in str(path)]
