"""Common parts of a job's children."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.job import Job

Manifest = dict[str, Any]


def owner_reference(job: Job) -> Manifest:
    """Return the owner reference with which Kubernetes deletes a child with its job."""
    return {
        "apiVersion": f"{c.GROUP}/{c.API_VERSION}",
        "kind": c.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def labels(job: Job) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        c.LABEL_JOB: job.name,
        c.LABEL_APP_NAME: "holdfast-job",
        c.LABEL_APP_INSTANCE: job.name,
        c.LABEL_APP_MANAGED_BY: c.MANAGED_BY,
    }


def worker_marks(job: Job, incarnation: int) -> Manifest:
    """Return the metadata by which a worker's pod is listed."""
    return {
        "labels": {
            **labels(job),
            c.LABEL_APP_COMPONENT: c.COMPONENT_WORKER,
            c.LABEL_INCARNATION: str(incarnation),
        },
        "ownerReferences": [owner_reference(job)],
    }


def child_metadata(job: Job, name: str, *, component: str) -> Manifest:
    """Return the metadata of a child that is not a pod."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**labels(job), c.LABEL_APP_COMPONENT: component},
        "ownerReferences": [owner_reference(job)],
    }


def digest(*values: Any) -> str:
    """Return a short digest of a content."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
