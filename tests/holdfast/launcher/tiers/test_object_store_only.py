"""Jobs whose checkpoints are only in an object store, with real launchers, ranks and an S3 server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.stores.open import open_store
from holdfast_testbed.fakes.s3 import S3Server

Wait = Callable[..., Any]


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{s3.make_bucket(f'bucket-{uuid4().hex[:12]}')}/runs/gpt"


@pytest.fixture
def environ(s3: S3Server, url: str) -> dict[str, str]:
    return {**s3.environment, "HOLDFAST_CHECKPOINT_DIR": url}


@pytest.fixture
def store(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    opened = open_store(url)
    assert isinstance(opened, ObjectStore)
    return opened


def test_a_lost_job_resumes_after_an_outage_of_the_store(
    cluster: Any, wait_for: Wait, environ: dict[str, str], store: ObjectStore, s3: S3Server
) -> None:
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "20"}
    cluster.settings["processesPerWorker"] = 2
    (a,) = cluster.start("a", script="trains.py", **environ)
    cluster.publish(1, "a")
    first = cluster.await_world(1, "a")
    wait_for(lambda: a.status.get("checkpoints", {}).get("shared", {}).get("step", 0) >= 40, cluster.tail)
    a.stop()
    reported = a.status["checkpoints"]["shared"]["step"]  # the server may carry out one more request
    with s3.away():
        a.restart()
        cluster.await_world(1, "a", above=first)
        wait_for(lambda: "The restore waits" in a.log.read_text(), cluster.tail)
    wait_for(lambda: (a.status.get("restored") or {}).get("from") == "shared", cluster.tail)
    restored = a.status["restored"]["step"]
    assert restored >= reported
    wait_for(lambda: a.step > restored, cluster.tail)
    a.process.terminate()
    assert a.wait() == 75, cluster.tail()
    last = a.status["checkpoints"]["shared"]
    assert last["step"] > restored, "the interrupted worker saved before it left"
    assert last["step"] in {name.step for name in store.commits()}


def test_a_recovery_from_memory_does_not_need_the_store(
    cluster: Any, wait_for: Wait, environ: dict[str, str], store: ObjectStore, s3: S3Server
) -> None:
    cluster.settings["budgets"] = []
    cluster.settings["checkpoint"] = {**cluster.settings["checkpoint"], "interval": "1000000"}
    a, b = cluster.start("a", "b", script="trains.py", **environ)
    cluster.publish(1, "a", "b")
    first = cluster.await_world(1, "a", "b")
    wait_for(lambda: min(a.step, b.step) > 20, cluster.tail)
    with s3.away():
        (rank,) = b.ranks
        os.kill(rank["pid"], signal.SIGKILL)
        cluster.await_world(1, "a", "b", above=first)
        wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], cluster.tail)
    (incident,) = a.status["incidents"]
    assert (incident["lostSteps"], incident["restoredFrom"]) == (0, "survivor"), cluster.tail()
    assert store.commits() == (), "no checkpoint was needed"


def test_copies_of_a_job_in_an_object_store_are_refused(cluster: Any, environ: dict[str, str]) -> None:
    (a,) = cluster.launch("a", script="trains.py", HOLDFAST_OBJECT_URL="s3://other/place", **environ)
    assert a.wait() == 2, cluster.tail()
    assert "s3://other/place is for copies of a checkpoint folder" in a.log.read_text()
