"""The objects of a namespace for jobs: the restricted Pod Security Standard, and a claim for shared checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast_testbed.constants import CHECKPOINT_CLAIM, STORAGE_CLASS

_PSS = "pod-security.kubernetes.io"


def restricted_namespace(name: str) -> dict[str, Any]:
    """Return a namespace that admits only restricted pods."""
    labels = {f"{_PSS}/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def checkpoint_volume(namespace: str, folder: Path) -> list[dict[str, Any]]:
    """Return a volume for checkpoints and its claim: a volume binds to one claim, so each namespace has its own."""
    name = f"{namespace}-{CHECKPOINT_CLAIM}"
    size = {"storage": "10Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": STORAGE_CLASS}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": common
        | {
            "capacity": size,
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": CHECKPOINT_CLAIM},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CHECKPOINT_CLAIM, "namespace": namespace},
        "spec": common | {"volumeName": name, "resources": {"requests": size}},
    }
    return [volume, claim]


def manifest_list(items: list[dict[str, Any]]) -> str:
    """Return the objects as input of `kubectl apply -f -`."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
