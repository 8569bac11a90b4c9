"""What is kept of an object in memory: what some decision reads, which is a fifth of what the API server sends.

Of that, what many objects have in common is kept once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.shared import Parts, compact

Json = Mapping[str, Any]

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
)
_SPEC = ("overhead", "schedulingGates", "terminationGracePeriodSeconds")
# Admission writes these into every pod; what is read where they are absent is not kept.
_ORDINARY = {"priority": 0, "preemptionPolicy": "PreemptLowerPriority"}
_CONTAINER = ("name", "resources", "restartPolicy")
_STATUS = ("phase", "reason", "message", "podIP", "nominatedNodeName")
_CONDITION = ("type", "status", "reason", "message")
_CONTAINER_STATUS = ("name", "state")
# Of all pods of this process.
_parts = Parts()


def slim_pod(body: Json) -> dict[str, Any]:
    """A pod, as far as anything here reads it. What it has in common with others is theirs as well."""
    meta, spec, status = body.get("metadata") or {}, body.get("spec") or {}, body.get("status") or {}
    return {
        "metadata": {**compact(_only(meta, _META)), **_common(meta, ("ownerReferences",))},
        "spec": {**compact(_only(spec, ("nodeName",))), **_common(_slim_spec(spec))},
        "status": {**compact(_only(status, _STATUS)), **_common(_slim_lists(status))},
    }


def _slim_spec(spec: Json) -> dict[str, Any]:
    containers = _lists(spec, ("containers", "initContainers"), _CONTAINER)
    return {**_only(spec, _SPEC), **_unlike(spec, _ORDINARY), **_apart(spec), **containers}


def _slim_lists(status: Json) -> dict[str, Any]:
    return {
        **_lists(status, ("conditions",), _CONDITION),
        **_lists(status, ("containerStatuses", "initContainerStatuses"), _CONTAINER_STATUS),
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
    slimmed: dict[str, Any] = compact(kept)
    return slimmed


def _common(value: Json, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {key: _parts(value[key]) for key in (value if keys is None else keys) if key in value}


def _only(value: Json, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value[key] for key in keys if key in value}


def _unlike(value: Json, ordinary: Json) -> dict[str, Any]:
    return {key: value[key] for key, usual in ordinary.items() if value.get(key, usual) != usual}


def _lists(value: Json, names: tuple[str, ...], keys: tuple[str, ...]) -> dict[str, Any]:
    return {name: [_only(item, keys) for item in value[name]] for name in names if value.get(name)}


def _without(value: Json, key: str) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != key}
