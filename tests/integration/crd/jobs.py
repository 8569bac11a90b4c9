"""Jobs to create with one change each, and the client that creates them."""

from __future__ import annotations

import copy
import json
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

GROUP = ("holdfast.dev", "v1alpha1")
PLURAL = "faulttolerantjobs"
REMOVE = object()

SMALLEST: dict[str, Any] = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "FaultTolerantJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "workers": {
            "replicas": 3,
            "template": {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}},
        }
    },
}
POD = "spec.workers.template.spec"
TRAINER = f"{POD}.containers.0"


def job(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The smallest job with values put at dotted paths."""
    made = copy.deepcopy(SMALLEST)
    for path, value in changes:
        put(made, path.split("."), value)
    return made


def put(node: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    if value is REMOVE:
        del node[path[-1]]
    elif isinstance(node, list):
        node.append(value)
    else:
        node[path[-1]] = value


RULES = "spec.recovery.rules"
VOLUME, OBJECT = "spec.checkpoint.volume.claimName", "spec.checkpoint.object"
MEMORY = "spec.checkpoint.memory"
LOCAL = "spec.checkpoint.local"


def rule(**asked: Any) -> dict[str, Any]:
    """A rule, as it stands in a job."""
    return {"name": "a", "action": "Ignore", **asked}


LADDER = ("InPlace", "RecreatePod", "ReplaceNode", "RestartGang", "FailJob")
ALL_RULES = [
    rule(name="codes", onExitCodes={"operator": "NotIn", "values": [1, 255]}),
    rule(name="signals", onSignals=["SIGSEGV", "SIGKILL"]),
    rule(name="memory", onOOM="Process", cause="OOM"),
    rule(name="conditions", onPodConditions=[{"type": "DisruptionTarget"}, {"type": "Ready", "status": "False"}]),
    rule(name="gpus", onGpuErrors={"xids": [79, 48], "kinds": ["DoubleBitEcc"]}),
    rule(name="hang-of-memory", onHang=True, onOOM="Any"),
]


class Jobs:
    """Jobs of one namespace."""

    def __init__(self, api: client.CustomObjectsApi, namespace: str) -> None:
        self._api = api
        self._where = (*GROUP, namespace, PLURAL)

    def create(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        made: dict[str, Any] = self._api.create_namespaced_custom_object(
            *self._where, body, field_validation="Strict", **options
        )
        return made

    def refusal(self, body: dict[str, Any]) -> str:
        """The message with which the API server refuses this job."""
        try:
            self.create(body, dry_run="All")
        except ApiException as error:
            if error.status in (400, 422):
                return message(error)
            raise
        raise AssertionError("the job is accepted")

    def patch(self, name: str, *changes: tuple[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for path, value in changes:
            put(body, path.split("."), value)
        changed: dict[str, Any] = self._api.patch_namespaced_custom_object(*self._where, name, body)
        return changed

    def replace_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        body = self._api.get_namespaced_custom_object(*self._where, name)
        changed: dict[str, Any] = self._api.replace_namespaced_custom_object_status(
            *self._where, name, {**body, "status": status}
        )
        return changed

    def patch_status(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        changed: dict[str, Any] = self._api.patch_namespaced_custom_object_status(
            *self._where, name, {"status": status}
        )
        return changed


def message(error: ApiException) -> str:
    return str(json.loads(error.body)["message"])
