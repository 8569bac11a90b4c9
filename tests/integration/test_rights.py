"""The chart's rights both ways, by the API server's own audit log: no call was refused, and every right was used.

What the operator does in the course of its work is in the log already; calls for rare occasions are made here, by the
same code under the same rights. The table has to name every call that the code can make.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from stage import Stage

from holdfast_operator.api import names as c
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.cluster.secrets import ClusterSecrets
from holdfast_operator.errors import ConflictError, NotFoundError, RejectedError
from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.fakes.chart import account

USER = account()
EVERYWHERE = EVERY_NAME = "*"

Right = tuple[str, str, str, str, str]
"""Group, resource, verb, namespace, name."""

OF_REMEDIATION = {"evict", "patch_node"}
"""Calls for which a right comes with nodeRemediation.mode only; test_remediation.py makes them under it."""

OF_THE_CLIENT = {("authorization.k8s.io", "selfsubjectaccessreviews", "create")}
"""Everybody may."""

NOT_A_MISSING_RIGHT = ("exceeded quota", "because it is being terminated")
"""What the API server also answers with 403: a quota, and a namespace of another test that goes."""


ON_PURPOSE = "a-test-that-wants-to-be-refused"
"""User agent of calls that are made to be refused."""


@pytest.fixture
def api(rights: Path) -> Iterator[Any]:
    """The operator's own account."""
    configuration = client.Configuration()
    config.load_kube_config(config_file=str(rights), client_configuration=configuration)
    with client.ApiClient(configuration) as made:
        yield made


@pytest.fixture
def refused_api(api: Any) -> Any:
    """The same, known in the log."""
    api.user_agent = ON_PURPOSE
    return api


def calls(cluster: Cluster, namespace: str) -> dict[str, Callable[[], Any]]:
    """Every call of ``Cluster``, about what is not there."""
    nobody = {"namespace": namespace, "name": "nobody", "uid": "0", "resourceVersion": "1"}
    meta = {"name": "nobody", "namespace": namespace}
    lease = {"metadata": {"name": "holdfast-operator", "namespace": OPERATOR_NAMESPACE}}
    pod = {"metadata": meta, "spec": {"containers": [{"name": "c", "image": "x"}]}}

    def apply() -> None:
        """Twice: what is not there is created, what is there and the job's is patched."""
        job = cluster.jobs(namespace).items[0]
        owner = {"apiVersion": f"{c.GROUP}/{c.API_VERSION}", "kind": c.KIND}
        owner |= {key: job["metadata"][key] for key in ("name", "uid")}
        owned = {**meta, "ownerReferences": [owner]}
        for version, kind, more in (
            ("v1", "Service", {"spec": {"ports": [{"port": 1}]}}),
            ("v1", "ConfigMap", {}),
            ("networking.k8s.io/v1", "NetworkPolicy", {"spec": {"podSelector": {}}}),
            ("policy/v1", "PodDisruptionBudget", {"spec": {"selector": {}}}),
        ):
            for _ in range(2):
                cluster.apply({"apiVersion": version, "kind": kind, "metadata": owned, **more})

    def write_own_lease() -> None:
        for version in ({}, {"resourceVersion": "1"}):
            with pytest.raises(ConflictError):
                cluster.write_own_lease({**lease, "metadata": {**lease["metadata"], **version}, "spec": {}})

    def create_pod() -> None:
        """Twice: what is in the way is looked at."""
        cluster.create_pod({"apiVersion": "v1", "kind": "Pod", **pod})
        with pytest.raises(RejectedError, match="belongs to another owner"):
            cluster.create_pod({"apiVersion": "v1", "kind": "Pod", **pod})

    return {
        "job": lambda: cluster.job(namespace, "nobody"),
        "jobs": cluster.jobs,
        "pods": cluster.pods,
        "pod": lambda: cluster.pod(namespace, "nobody"),
        "nodes": cluster.nodes,
        "node": lambda: cluster.node("nobody"),
        "lease": lambda: cluster.lease("nobody"),
        "own_lease": lambda: cluster.own_lease(OPERATOR_NAMESPACE),
        "write_own_lease": write_own_lease,
        "pod_events": lambda: cluster.pod_events(namespace, "0"),
        "pods_on": lambda: cluster.pods_on("nobody"),
        "config_map": lambda: cluster.config_map(namespace, "nobody"),
        "patch_status": lambda: cluster.patch_status(nobody, {}),
        "apply": apply,
        "apply_config_map": lambda: cluster.apply_config_map(namespace, "nobody", {}),
        "create_pod": create_pod,
        "lift_gate": lambda: cluster.lift_gate(namespace, "absent", "0", {}),
        "label_pod": lambda: cluster.label_pod(namespace, "absent", "0", {}),
        "restore_pod": lambda: cluster.restore_pod(namespace, "absent", "0", {}),
        "delete_pod": lambda: cluster.delete_pod(namespace, "absent", "0"),
        "delete_job": lambda: cluster.delete_job(namespace, "absent", "0"),
        "tell": lambda: cluster.tell(event_about(meta)),
        "evict": lambda: cluster.evict(namespace, "nobody", "0"),
        "patch_node": lambda: cluster.patch_node("nobody", {}),
    }


def event_about(meta: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": meta,
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "holdfast.dev/operator",
        "reportingInstance": "test",
        "action": "Test",
        "type": "Normal",
        "reason": "Test",
        "regarding": {"apiVersion": "v1", "kind": "Pod", **meta},
    }


def test_every_call_is_granted_and_every_right_is_used(
    stage: Stage, api: Any, cluster: Any, namespace: str, audited: Any
) -> None:
    stage.nodes(1)
    stage.run(replicas=1)
    made = calls(Cluster(api), namespace)
    public = {name for name, _ in inspect.getmembers(Cluster, inspect.isfunction) if not name.startswith("_")}
    assert made.keys() == public
    for name in sorted(public - OF_REMEDIATION):
        try:
            made[name]()
        except NotFoundError:
            continue
    of_secrets(ClusterSecrets(client.CoreV1Api(api), OPERATOR_NAMESPACE))
    client.CoreV1Api(stage.api).delete_namespaced_pod("nobody", namespace, grace_period_seconds=0)

    granted = rights_of(cluster)

    def unused() -> set[Right]:
        used, _ = asked(audited())
        return {right for right in granted if not any(covers(right, one) for one in used)}

    # A call may be answered a moment before it is written down.
    stage.wait(lambda: not unused(), "every right was used")
    used, refused = asked(audited())
    assert refused == set()
    assert {right for right in used if right[:3] not in OF_THE_CLIENT and not granted_by(granted, right)} == set()


def of_secrets(store: ClusterSecrets) -> None:
    """What is done once, or once in years."""
    found = store.read("holdfast-ca")
    assert found is not None
    assert store.read("holdfast-key") is not None
    assert not store.create("holdfast-key", {})
    assert not store.replace("holdfast-ca", found.data, "1")


@pytest.mark.parametrize("name", sorted(OF_REMEDIATION))
def test_node_observing_operator_lacks_rights_it_never_uses(refused_api: Any, namespace: str, name: str) -> None:
    with pytest.raises(RejectedError, match="forbidden"):
        calls(Cluster(refused_api), namespace)[name]()


def test_other_secrets_are_closed_even_beside_its_own(refused_api: Any) -> None:
    with pytest.raises(client.ApiException) as refusal:
        ClusterSecrets(client.CoreV1Api(refused_api), OPERATOR_NAMESPACE).read("another")
    assert refusal.value.status == 403


def granted_by(granted: set[Right], asked_for: Right) -> bool:
    return any(covers(right, asked_for) for right in granted)


def covers(right: Right, asked_for: Right) -> bool:
    """Whether it is for such a call."""
    scope = right[3] in (EVERYWHERE, asked_for[3]) and right[4] in (EVERY_NAME, asked_for[4])
    return right[:3] == asked_for[:3] and scope


def asked(entries: list[dict[str, Any]]) -> tuple[set[Right], set[Right]]:
    """What the operator asked for, and what of it was forbidden."""
    used, refused = set(), set()
    for entry in entries:
        target = entry.get("objectRef")
        if entry["user"]["username"] != USER or entry["userAgent"] == ON_PURPOSE or not target:
            continue
        resource = "/".join(filter(None, (target.get("resource"), target.get("subresource"))))
        place = (target.get("namespace", ""), target.get("name", ""))
        right = (target.get("apiGroup", ""), resource, entry["verb"], *place)
        used.add(right)
        if entry["responseStatus"].get("code") == 403:
            message = entry["responseStatus"].get("message", "")
            if not any(words in message for words in NOT_A_MISSING_RIGHT):
                refused.add(right)
    return used, refused


def rights_of(cluster: Any) -> set[Right]:
    """All rights of the operator's roles; those that the cluster's own roles take over are its users'."""
    roles = json.loads(cluster.kubectl("get", "clusterroles,roles", "-A", "-o", "json"))["items"]
    labelled = [(role, role["metadata"].get("labels") or {}) for role in roles]
    ours = [
        role
        for role, labels in labelled
        if labels.get("app.kubernetes.io/name") == "holdfast" and not any("aggregate-to" in label for label in labels)
    ]
    assert len(ours) == 3
    return {
        (group, resource, verb, role["metadata"].get("namespace", EVERYWHERE), name)
        for role in ours
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or [EVERY_NAME]
    }
