"""The chart as the real Helm CLI renders it, and its permissions, without a release."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from holdfast_testbed.build.commands import run
from holdfast_testbed.build.programs import program
from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.constants import KUBERNETES, OPERATOR_NAMESPACE

CHART: Final = Path(__file__).resolve().parents[4] / "charts" / "holdfast"
_OF_RIGHTS: Final = frozenset({"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"})

Manifest = dict[str, Any]


@functools.cache
def render(
    *values: str,
    namespace: str = OPERATOR_NAMESPACE,
    release: str = "holdfast",
    hooks: bool = False,
    file: Path | None = None,
    chart: Path = CHART,
) -> Sequence[Manifest]:
    """Return the objects that are installed, with `hooks` also those of `helm test`. Do not modify them."""
    flags = [flag for value in values for flag in ("--set", value)] + ([] if hooks else ["--no-hooks"])
    flags += ["--values", str(file)] if file is not None else []
    words = ["-n", namespace, "--kube-version", KUBERNETES, *flags]
    text = run([program("helm"), "template", release, chart, *words])
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, for the CRD
    return [document for document in yaml.load_all(text, loader) if document]


def account(namespace: str = OPERATOR_NAMESPACE) -> str:
    """Return the operator's user name in the API server."""
    return f"system:serviceaccount:{namespace}:holdfast"


def rights(*values: str, namespace: str = OPERATOR_NAMESPACE) -> list[Manifest]:
    """Return exactly the permissions that a release with these values gives its service account."""
    made = render(*values, "rbac.aggregate=false", "crds.enabled=false", namespace=namespace)
    return [document for document in made if document["kind"] in _OF_RIGHTS]


def grant(cluster: Cluster, granted: Sequence[Manifest], namespace: str = OPERATOR_NAMESPACE) -> Path:
    """Create the namespace with these permissions. Return a kubeconfig of the service account."""
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(granted))
    return cluster.kubeconfig_for(service_account="holdfast", namespace=namespace)


def withdraw(cluster: Cluster, granted: Sequence[Manifest], namespace: str) -> None:
    """Remove the permissions. The namespace is deleted asynchronously."""
    cluster.kubectl("delete", "-f", "-", input=yaml.safe_dump_all(granted))
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
