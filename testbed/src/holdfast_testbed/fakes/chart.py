"""The chart of this tree, as the real Helm CLI renders it, and the rights that it grants, without its release."""

from __future__ import annotations

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


def render(
    *values: str, namespace: str = OPERATOR_NAMESPACE, release: str = "holdfast", hooks: bool = False
) -> list[Manifest]:
    """Return the installed objects; with `hooks` also those of `helm test`."""
    flags = [flag for value in values for flag in ("--set", value)] + ([] if hooks else ["--no-hooks"])
    words = ["-n", namespace, "--kube-version", KUBERNETES, *flags]
    text = run([program("helm"), "template", release, CHART, *words])
    return [document for document in yaml.safe_load_all(text) if document]


def account(namespace: str = OPERATOR_NAMESPACE) -> str:
    """The operator as the API server knows it."""
    return f"system:serviceaccount:{namespace}:holdfast"


def rights(*values: str, namespace: str = OPERATOR_NAMESPACE) -> list[Manifest]:
    """Exactly what a release with these values lets its service account do."""
    made = render(*values, "rbac.aggregate=false", namespace=namespace)
    return [document for document in made if document["kind"] in _OF_RIGHTS]


def grant(cluster: Cluster, granted: Sequence[Manifest], namespace: str = OPERATOR_NAMESPACE) -> Path:
    """Make the namespace with these rights; returns a kubeconfig of the service account."""
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(granted))
    return cluster.kubeconfig_for(service_account="holdfast", namespace=namespace)


def withdraw(cluster: Cluster, granted: Sequence[Manifest], namespace: str) -> None:
    """As before; the namespace goes by and by."""
    cluster.kubectl("delete", "-f", "-", input=yaml.safe_dump_all(granted))
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
