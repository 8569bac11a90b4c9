"""The part of an object that is kept in memory: the fields that a decision reads, a fifth of what the API server
sends.

Parts that are equal in many objects are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from sys import getsizeof
from typing import Any

from holdfast_operator.api.json import Json
from holdfast_operator.api.names import GROUP
from holdfast_operator.cluster.interning import Interner, compact

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
)
_JOB_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
# The limit of a job's spec as objects in memory: ten times the largest example. A thousand jobs of this size take a
# quarter of the chart's memory limit.
SPEC_BYTES = 128 * 1024
SPEC_DEPTH = 64
_SPEC = ("overhead", "schedulingGates", "terminationGracePeriodSeconds")
# Admission writes these into every pod. A field is dropped if the operator reads its absence in the same way.
_ORDINARY = {"priority": 0, "preemptionPolicy": "PreemptLowerPriority"}
_CONTAINER = ("name", "resources", "restartPolicy")
_STATUS = ("phase", "reason", "message", "podIP", "nominatedNodeName")
_CONDITION = ("type", "status", "reason", "message")
_CONTAINER_STATUS = ("name", "state")
_OWN = f"{GROUP}/"
# Shared by all pods of this process.
_parts = Interner()


def slim_pod(body: Json) -> dict[str, Any]:
    """Return a pod with the fields that the operator reads. Parts that are equal in other pods are shared."""
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
    """Return the pod's required anti-affinity."""
    found = (spec.get("affinity") or {}).get("podAntiAffinity")
    return {"affinity": {"podAntiAffinity": found}} if found else {}


def slim_job(body: Json) -> dict[str, Any]:
    """Return a job with the fields that the operator reads.

    A spec that is too large is replaced by ``unread``, the reason. Tenants must not control the memory and the depth
    of the stack that this process needs.
    """
    unread = body.get("unread") or _unread(body.get("spec"))
    read = {"unread": unread} if unread else _only(body, ("spec",))
    kept: dict[str, Any] = compact({**_only(body, ("status",)), **read})
    return {"metadata": compact(_only(body["metadata"], _JOB_META)), **kept}


def _unread(spec: Any) -> str:
    """Return why a spec is not read; empty if it is.

    Iterates by level, because values may be nested deeper than calls.
    """
    size, depth, level = 0, 0, [spec]
    while level:
        size, depth = size + sum(map(getsizeof, level)), depth + 1
        if depth > SPEC_DEPTH:
            return f"its spec is nested deeper than {SPEC_DEPTH} levels"
        if size > SPEC_BYTES:
            most = f"its spec takes more than {SPEC_BYTES // 1024} KiB of the operator's memory"
            return f"{most}: move large values of the template into a ConfigMap, a Secret or the image"
        level = [inner for value in level for inner in _inner(value)]
    return ""


def _inner(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return chain(value.keys(), value.values())
    return value if type(value) is list else ()


def slim(body: Json) -> dict[str, Any]:
    """Return another object without foreign annotations, managed fields and a node's list of images."""
    meta = _without(body.get("metadata") or {}, "managedFields")
    if meta.get("annotations"):
        meta["annotations"] = {key: value for key, value in meta["annotations"].items() if key.startswith(_OWN)}
    kept = {**body, "metadata": meta}
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
