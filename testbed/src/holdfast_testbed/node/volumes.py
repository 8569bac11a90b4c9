"""A namespace ready for jobs: the restricted Pod Security Standard, the host's runtime, and shared checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast_testbed.constants import CHECKPOINT_CLAIM, RUNTIME_CLAIM, STORAGE_CLASS

_PSS = "pod-security.kubernetes.io"


def restricted_namespace(name: str) -> dict[str, Any]:
    """A namespace in which only restricted pods are let in."""
    labels = {f"{_PSS}/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def job_volumes(namespace: str, *, runtime: Path, checkpoints: Path) -> list[dict[str, Any]]:
    """Both volumes with their claims: a volume binds to one claim, so each namespace has its own."""
    return [
        _volume(namespace, RUNTIME_CLAIM, runtime, "ReadOnlyMany"),
        _claim(namespace, RUNTIME_CLAIM, "ReadOnlyMany"),
        _volume(namespace, CHECKPOINT_CLAIM, checkpoints, "ReadWriteMany"),
        _claim(namespace, CHECKPOINT_CLAIM, "ReadWriteMany"),
    ]


def manifest_list(items: list[dict[str, Any]]) -> str:
    """For `kubectl apply -f -`."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _volume(namespace: str, claim: str, path: Path, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": [mode],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def _claim(namespace: str, claim: str, mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": {
            "accessModes": [mode],
            "storageClassName": STORAGE_CLASS,
            "volumeName": f"{namespace}-{claim}",
            "resources": {"requests": {"storage": "10Gi"}},
        },
    }
