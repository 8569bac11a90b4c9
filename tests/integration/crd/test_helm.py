"""The CRD as a template of the chart: Helm installs, upgrades, keeps and deletes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from waiting import wait_until

from holdfast_testbed.cluster.cluster import Cluster

CHART = Path(__file__).resolve().parents[3] / "charts" / "holdfast"


def other_chart(folder: Path) -> Path:
    """The chart with nothing but its CRD, under another name: the tests' own one must stay."""
    for name in ("Chart.yaml", "values.yaml", "values.schema.json", "templates/_helpers.tpl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHART / name, folder / name)
    for path in (CHART / "templates" / "crd.yaml", *(CHART / "files").glob("*.yaml")):
        target = folder / _renamed(str(path.relative_to(CHART)))
        target.parent.mkdir(exist_ok=True)
        target.write_text(_renamed(path.read_text()))
    return folder


def _renamed(text: str) -> str:
    for old, new in (
        ("holdfast.dev", "upgrade.holdfast.dev"),
        ("faulttolerantjob", "jobcopy"),
        ("FaultTolerantJob", "JobCopy"),
        ("shortNames: [ftj]", "shortNames: [jc]"),
        # `kubectl get holdfast` of other tests must not find a kind that is being deleted.
        ("categories: [holdfast]", "categories: [jobcopies]"),
    ):
        text = text.replace(old, new)
    return text


def test_helm_upgrades_keeps_and_adopts_the_crd_again(cluster: Cluster, tmp_path: Path) -> None:
    name = "jobcopys.upgrade.holdfast.dev"
    chart = other_chart(tmp_path / "chart")
    (definition,) = (chart / "files").glob("*.yaml")
    upgrade = ("upgrade", "--install", "definition", str(chart), "--namespace", "default")
    uninstall = ("uninstall", "definition", "--namespace", "default")
    try:
        cluster.helm(*upgrade)
        assert "Number of workers" in cluster.kubectl("get", "crd", name, "-o", "yaml")
        definition.write_text(definition.read_text().replace("Number of workers", "The number of workers"))
        cluster.helm(*upgrade)
        assert "The number of workers" in cluster.kubectl("get", "crd", name, "-o", "yaml")
        cluster.helm(*uninstall)
        assert name in cluster.kubectl("get", "crd", name, "-o", "name"), "an uninstallation keeps the jobs"
        cluster.helm(*upgrade, "--set", "crds.keep=false")
        cluster.helm(*uninstall)
        wait_until(lambda: not cluster.kubectl("get", "crd", name, "-o", "name", "--ignore-not-found"), "it is gone")
    finally:
        cluster.kubectl("delete", "crd", name, "--wait=false", "--ignore-not-found")
