"""A real control plane for the whole session: etcd, API server, controller manager, scheduler. No nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from holdfast_testbed.cluster import Cluster, recorded_clusters, remove_cluster

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "integration-"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the control plane."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The control plane, with the CRD installed."""
    _remove_leftovers()
    made = Cluster.up(name=f"{PREFIX}{os.getpid()}", nodes=0)
    try:
        made.kubectl("apply", "-f", str(REPOSITORY / "crds"))
        wait_until(lambda: "ftj" in made.kubectl("api-resources", "--cached=false"), "the kind is discovered")
        yield made
    finally:
        made.down()


def _remove_leftovers() -> None:
    """Clusters of test runs that were killed: their name tells the process that made them."""
    for name in recorded_clusters():
        pid = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_cluster(name)


@pytest.fixture(scope="session")
def admin(cluster: Cluster) -> Any:
    """An API client with all rights."""
    return cluster.api_client()


@pytest.fixture
def namespace(admin: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own."""
    api = client.CoreV1Api(admin)
    made = api.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(generate_name="t-")))
    name = str(made.metadata.name)
    wait_until(lambda: bool(api.list_namespaced_service_account(name).items), "the service account is there")
    yield name
    api.delete_namespace(name)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The condition's first true value. Raises when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., Any]:
    return wait_until
