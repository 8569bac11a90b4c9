"""An installation for one namespace: it runs the jobs there under Roles of that namespace, and sees no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from players import Operator
from stage import Stage

from holdfast_testbed.fakes import chart

SYSTEM = "holdfast-namespaced"
USER = chart.account(SYSTEM)


@pytest.fixture
def granted(cluster: Any, namespace: str) -> Iterator[Path]:
    """A kubeconfig with exactly the rights of a release that watches the test's namespace."""
    chosen = chart.rights(f"watchNamespaces={{{namespace}}}", namespace=SYSTEM)
    for document in chosen:
        document["metadata"]["labels"]["app.kubernetes.io/name"] = "holdfast-namespaced"
    yield chart.grant(cluster, chosen, SYSTEM)
    chart.withdraw(cluster, chosen, SYSTEM)


@pytest.fixture
def operator(granted: Path, namespace: str, tmp_path: Path) -> Iterator[Any]:
    """It ends without complaint."""
    made = Operator(granted, tmp_path, HOLDFAST_NAMESPACE=SYSTEM, HOLDFAST_WATCH_NAMESPACES=namespace)
    made.start()
    yield made
    assert made.stop() == 0, made.log()[-3000:]


@pytest.fixture
def elsewhere(admin: Any) -> Iterator[str]:
    """A namespace that is not watched."""
    api = client.CoreV1Api(admin)
    name = str(api.create_namespace({"metadata": {"generateName": "t-"}}).metadata.name)
    yield name
    api.delete_namespace(name)


def test_jobs_of_its_namespace_run_and_others_are_not_touched(stage: Stage, audited: Any, elsewhere: str) -> None:
    stage.nodes(2)
    foreign = stage.job(replicas=1)
    foreign["metadata"]["namespace"] = elsewhere
    where = ("holdfast.dev", "v1alpha1", elsewhere, "faulttolerantjobs")
    stage.custom.create_namespaced_custom_object(*where, foreign)
    player = stage.run(replicas=2, elasticity={"minReplicas": 1})
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.members() == ["gpt-w0", "gpt-w2"], "the lost worker is replaced")
    assert "status" not in stage.custom.get_namespaced_custom_object(*where, "gpt")
    assert stage.core.list_namespaced_pod(elsewhere).items == []
    ours = [entry for entry in audited() if entry["user"]["username"] == USER]
    assert ours
    assert [entry["requestURI"] for entry in ours if entry["responseStatus"].get("code") == 403] == []
