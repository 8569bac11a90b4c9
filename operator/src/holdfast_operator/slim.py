"""What is kept of an object in memory: what some decision reads, which is a fifth of what the API server sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "ownerReferences",
)
_SPEC = ("nodeName", "overhead", "schedulingGates", "terminationGracePeriodSeconds")
_CONTAINER = ("name", "resources", "restartPolicy")
_STATUS = ("phase", "reason", "message", "podIP")
_CONDITION = ("type", "status", "reason", "message")
_CONTAINER_STATUS = ("name", "state")


def slim_pod(body: Json) -> dict[str, Any]:
    """A pod, as far as anything here reads it."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    return {
        "metadata": _only(body.get("metadata") or {}, _META),
        "spec": {
            **_only(spec, _SPEC),
            **_apart(spec),
            **_lists(spec, ("containers", "initContainers"), _CONTAINER),
        },
        "status": {
            **_only(status, _STATUS),
            **_lists(status, ("conditions",), _CONDITION),
            **_lists(status, ("containerStatuses", "initContainerStatuses"), _CONTAINER_STATUS),
        },
    }


def _apart(spec: Json) -> dict[str, Any]:
    """From whom the pod keeps away."""
    found = (spec.get("affinity") or {}).get("podAntiAffinity")
    return {"affinity": {"podAntiAffinity": found}} if found else {}


def slim(body: Json) -> dict[str, Any]:
    """Any other object, without the record of who wrote what and a node's list of images."""
    kept = {**body, "metadata": _without(body.get("metadata") or {}, "managedFields")}
    if isinstance(body.get("status"), Mapping) and "images" in body["status"]:
        kept["status"] = _without(body["status"], "images")
    return kept


def _only(value: Json, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value[key] for key in keys if key in value}


def _lists(value: Json, names: tuple[str, ...], keys: tuple[str, ...]) -> dict[str, Any]:
    return {name: [_only(item, keys) for item in value[name]] for name in names if value.get(name)}


def _without(value: Json, key: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != key}
