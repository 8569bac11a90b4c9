"""The shape of the parts of a pod's spec that the operator reads.

The schema accepts any template, and the API server validates it when the pod is created. Until then, passes of other
jobs may read it as well. A template of another shape therefore makes its own job unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.json import Json
from holdfast_operator.api.spec.fields import items, mapping
from holdfast_operator.errors import UnreadableError

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def check(pod_spec: Json, path: str) -> None:
    """Raise ``UnreadableError`` with the path of a field that no pod spec can have."""
    for container, where in (*_objects(pod_spec, "containers", path), *_objects(pod_spec, "initContainers", path)):
        _container(container, where)
    for key in ("overhead", "nodeSelector"):
        _object(pod_spec, key, path)
    for key in ("volumes", "imagePullSecrets", "schedulingGates", "topologySpreadConstraints"):
        list(_objects(pod_spec, key, path))
    for toleration, where in _objects(pod_spec, "tolerations", path):
        _text(toleration, "key", where)
    grace = pod_spec.get("terminationGracePeriodSeconds")
    if grace is not None and (not isinstance(grace, int) or isinstance(grace, bool)):
        raise UnreadableError(f"{path}.terminationGracePeriodSeconds must be an integer, not {grace!r}")
    _affinity(pod_spec, path)


def parse_template(value: Any) -> Json:
    """Return ``spec.workers.template`` once its shape is checked. Raises ``UnreadableError``."""
    template = mapping(value, "spec.workers.template")
    pod = mapping(template.get("spec"), "spec.workers.template.spec")
    containers = items(pod.get("containers"), "spec.workers.template.spec.containers")
    if not containers:
        raise UnreadableError("spec.workers.template.spec.containers is empty")
    for number, container in enumerate(containers):
        path = f"spec.workers.template.spec.containers[{number}]"
        if not isinstance(mapping(container, path).get("name"), str):
            raise UnreadableError(f"{path}.name is missing")
    check(pod, "spec.workers.template.spec")
    mapping(template.get("metadata") or {}, "spec.workers.template.metadata")
    return template


def trainer_container(pod_spec: Json) -> str:
    """Return the name of the supervised container: ``trainer``, or the first one."""
    names = [str(container.get("name", "")) for container in pod_spec.get("containers") or []]
    return c.TRAINER_CONTAINER if c.TRAINER_CONTAINER in names else names[0]


def _container(container: Json, path: str) -> None:
    resources = _object(container, "resources", path)
    for key in ("limits", "requests"):
        _object(resources, key, f"{path}.resources")
    for mount, where in _objects(container, "volumeMounts", path):
        _text(mount, "name", where)
        _text(mount, "mountPath", where)
    for key in ("env", "envFrom"):
        list(_objects(container, key, path))


def _affinity(pod_spec: Json, path: str) -> None:
    affinity = _object(pod_spec, "affinity", path)
    of_nodes = _object(affinity, "nodeAffinity", f"{path}.affinity")
    required = _object(of_nodes, _REQUIRED, f"{path}.affinity.nodeAffinity")
    for term, where in _objects(required, "nodeSelectorTerms", f"{path}.affinity.nodeAffinity.{_REQUIRED}"):
        for key in ("matchExpressions", "matchFields"):
            _expressions(term, key, where)
    of_pods = _object(affinity, "podAntiAffinity", f"{path}.affinity")
    for term, where in _objects(of_pods, _REQUIRED, f"{path}.affinity.podAntiAffinity"):
        for key in ("labelSelector", "namespaceSelector"):
            selector = _object(term, key, where)
            _object(selector, "matchLabels", f"{where}.{key}")
            _expressions(selector, "matchExpressions", f"{where}.{key}")
        items(term.get("namespaces") or [], f"{where}.namespaces")
    for kind in (of_nodes, of_pods):
        list(_objects(kind, _PREFERRED, f"{path}.affinity"))


def _expressions(value: Json, key: str, path: str) -> None:
    for expression, where in _objects(value, key, path):
        items(expression.get("values") or [], f"{where}.values")


def _object(value: Json, key: str, path: str) -> Json:
    """Return an object; an empty one if it is absent."""
    found = value.get(key)
    return {} if found is None else mapping(found, f"{path}.{key}")


def _objects(value: Json, key: str, path: str) -> Iterator[tuple[Json, str]]:
    """Yield the objects of a list, each with its path."""
    found = value.get(key)
    for number, item in enumerate(items([] if found is None else found, f"{path}.{key}")):
        where = f"{path}.{key}[{number}]"
        yield mapping(item, where), where


def _text(value: Json, key: str, path: str) -> None:
    found: Any = value.get(key)
    if found is not None and not isinstance(found, str):
        raise UnreadableError(f"{path}.{key} is no text")
