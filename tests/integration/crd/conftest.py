"""Clients for jobs in the default namespace and in one of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from .jobs import OBJECT, POD, TRAINER, Jobs, job


@pytest.fixture
def jobs(admin: Any, namespace: str) -> Jobs:
    return Jobs(client.CustomObjectsApi(admin), namespace)


@pytest.fixture(scope="module")
def trial(admin: Any) -> Jobs:
    """Creates in the default namespace, dry runs only."""
    return Jobs(client.CustomObjectsApi(admin), "default")


@pytest.fixture
def stored(jobs: Jobs) -> Jobs:
    """A job with all its checkpoints in an object store."""
    jobs.create(job((OBJECT, {"url": "s3://b/p", "secretRef": {"name": "keys"}})))
    return jobs


@pytest.fixture
def running(jobs: Jobs) -> Jobs:
    jobs.create(
        job(
            ("spec.elasticity.minReplicas", 2),
            ("spec.workers.processesPerWorker", 1),
            ("spec.checkpoint.volume.claimName", "checkpoints"),
            (f"{POD}.nodeSelector", {"pool": "a"}),
            (f"{POD}.volumes", [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]),
            (f"{TRAINER}.env", [{"name": "A", "value": "1"}]),
        )
    )
    return jobs
