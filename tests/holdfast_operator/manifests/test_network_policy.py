"""Who reaches a job's workers, by the NetworkPolicy that the operator makes: a table of flows."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_operator.api import names as c
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.status import Worker
from holdfast_operator.manifests.children import children, network_policy
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.manifests.pod import pod
from holdfast_testbed.fakes.network_policy import End, Flow, allowed

PLATFORM = Installation(sidecar_image="s", agents_url="https://o", ca_bundle="PEM")
EPHEMERAL = 40_123
"""Where gloo and an attempt's store listen: somewhere."""


def job(name: str = "gpt", namespace: str = "ml") -> Any:
    times = {"creationTimestamp": "2026-01-31T12:00:00Z", "resourceVersion": "1", "generation": 1}
    spec = {"workers": {"replicas": 2, "template": {"spec": {"containers": [{"name": "t", "image": "i"}]}}}}
    return parse_job({"metadata": {"name": name, "namespace": namespace, "uid": name, **times}, "spec": spec})


def worker(name: str = "gpt", namespace: str = "ml") -> End:
    """A worker's pod, with the labels that the operator gives it."""
    of = job(name, namespace)
    manifest = pod(of, of.spec, Worker(incarnation=0, batch=0), PLATFORM)
    return End(namespace=namespace, labels=manifest["metadata"]["labels"])


def reaches(source: End, target: End, port: int, protocol: str = "TCP", more: Any = ()) -> bool:
    return allowed([*POLICIES, *more], Flow(source=source, target=target, port=port, protocol=protocol))


POLICIES = [network_policy(job()), network_policy(job("bert")), network_policy(job(namespace="ops"))]
PROMETHEUS = End(namespace="monitoring", labels={"app": "prometheus"})
STRANGER = End(namespace="ml", labels={"app": "notebook"})
HOST = End(address="10.0.0.7")
CLOSED = (c.PORT_STORE, c.PORT_CONTROL, EPHEMERAL)


@pytest.mark.parametrize("port", [*CLOSED, c.PORT_SIDECAR])
def test_workers_of_one_job_reach_each_other_at_any_port(port: int) -> None:
    assert reaches(worker(), worker(), port)


@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_and_by_any_protocol(protocol: str) -> None:
    assert reaches(worker(), worker(), EPHEMERAL, protocol)


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(worker("bert"), id="another job's worker"),
        pytest.param(worker("gpt", "ops"), id="a worker of a job of the same name elsewhere"),
        pytest.param(STRANGER, id="another pod of the namespace"),
        pytest.param(PROMETHEUS, id="a pod of another namespace"),
        pytest.param(HOST, id="a host"),
    ],
)
@pytest.mark.parametrize("port", CLOSED)
def test_nobody_else_reaches_what_asks_for_no_password(stranger: End, port: int) -> None:
    assert not reaches(stranger, worker(), port)


@pytest.mark.parametrize("source", [PROMETHEUS, STRANGER, HOST, worker("bert")])
def test_everybody_may_read_the_metrics_and_over_tcp_only(source: End) -> None:
    assert reaches(source, worker(), c.PORT_SIDECAR)
    assert not reaches(source, worker(), c.PORT_SIDECAR, "UDP")


@pytest.mark.parametrize(("target", "port"), [(HOST, 443), (STRANGER, 5432), (PROMETHEUS, 9090)])
def test_workers_go_where_they_like(target: End, port: int) -> None:
    assert reaches(worker(), target, port)


def test_other_pods_of_the_namespace_are_left_alone() -> None:
    assert reaches(PROMETHEUS, STRANGER, 8888)


def test_a_policy_of_the_users_own_opens_more() -> None:
    board = {
        "metadata": {"namespace": "ml", "name": "tensorboard"},
        "spec": {
            "podSelector": {"matchLabels": {c.LABEL_JOB: "gpt"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "notebook"}}}], "ports": [{"port": 6006}]}],
        },
    }
    assert reaches(STRANGER, worker(), 6006, more=[board])
    assert not reaches(STRANGER, worker(), c.PORT_STORE, more=[board])
    assert not reaches(PROMETHEUS, worker(), 6006, more=[board])


def test_the_policy_stands_before_any_pod_and_goes_with_its_job() -> None:
    first = children(job(), PLATFORM)[0]
    assert first["kind"] == "NetworkPolicy"
    (owner,) = first["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (c.KIND, "gpt", True)


def test_there_is_none_where_the_installation_wants_none() -> None:
    platform = Installation(sidecar_image="s", agents_url="https://o", ca_bundle="PEM", network_policies=False)
    assert "NetworkPolicy" not in [child["kind"] for child in children(job(), platform)]
