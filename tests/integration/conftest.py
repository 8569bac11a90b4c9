"""A real control plane, and a real operator process under the chart's rights.

Nothing of Kubernetes is faked but the machines, which ``players`` play.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from players import Kubelets, Operator
from stage import Stage
from urllib3.util import Retry
from waiting import BUSY, wait_until

from holdfast_testbed.cluster.cluster import Cluster, recorded_clusters, remove_cluster
from holdfast_testbed.errors import CommandFailedError
from holdfast_testbed.fakes import chart

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "integration-"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the control plane."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The control plane, with the CRD installed."""
    _remove_leftovers()
    made = Cluster.up(name=f"{PREFIX}{os.getpid()}", nodes=0)
    try:
        made.kubectl("apply", "-f", str(REPOSITORY / "crds"))
        wait_until(lambda: _explains(made, "ftj"), "the kind is discovered, and its schema published")
        yield made
    finally:
        made.down()


def _explains(cluster: Cluster, kind: str) -> bool:
    """Schemas are published some time after the kind itself."""
    try:
        return bool(cluster.kubectl("explain", kind))
    except CommandFailedError:
        return False


def _remove_leftovers() -> None:
    """Clusters of test runs that were killed: their name tells the process that made them."""
    for name in recorded_clusters():
        pid = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_cluster(name)


@pytest.fixture(scope="package")
def audited(cluster: Cluster) -> Callable[[], list[dict[str, Any]]]:
    """What service accounts asked for since the cluster is up, as far as it is written down."""

    def read() -> list[dict[str, Any]]:
        newest = cluster.control_plane.audit_log
        older = sorted(newest.parent.glob(f"{newest.stem}-*{newest.suffix}"))
        lines = [line for path in (*older, newest) for line in path.read_bytes().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    return read


@pytest.fixture(scope="package")
def admin(cluster: Cluster) -> Any:
    """An API client with all rights, that asks again what the API server has no time to answer."""
    configuration = client.Configuration()
    config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=configuration)
    configuration.retries = Retry(
        total=6, backoff_factor=0.5, status_forcelist=BUSY, allowed_methods=("GET",), raise_on_status=False
    )
    return client.ApiClient(configuration)


@pytest.fixture
def namespace(admin: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own."""
    api = client.CoreV1Api(admin)
    made = api.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(generate_name="t-")))
    name = str(made.metadata.name)
    wait_until(lambda: bool(api.list_namespaced_service_account(name).items), "the service account is there")
    yield name
    api.delete_namespace(name)


@pytest.fixture(scope="package")
def rights(cluster: Cluster) -> Path:
    """A kubeconfig of the chart's own service account, with exactly the chart's rights."""
    return chart.grant(cluster, chart.rights())


@pytest.fixture(scope="package")
def operator_class() -> type[Operator]:
    """For modules that run it with settings of their own."""
    return Operator


@pytest.fixture(scope="module")
def operator(rights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """A running operator. It ends without complaint."""
    made = Operator(rights, tmp_path_factory.mktemp("operator"))
    made.start()
    yield made
    assert made.stop() == 0, made.log()[-3000:]


@pytest.fixture(scope="module")
def kubelets(admin: Any) -> Iterator[Kubelets]:
    """Players of all nodes."""
    made = Kubelets(admin)
    made.start()
    yield made
    made.stop()
    assert made.errors == []


@pytest.fixture
def stage(admin: Any, operator: Operator, kubelets: Kubelets, namespace: str) -> Iterator[Stage]:
    """A namespace to play in."""
    made = Stage(admin, operator, kubelets, namespace)
    yield made
    made.close()
