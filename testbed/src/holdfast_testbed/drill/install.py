"""Installs Holdfast on the testbed as a user would: the chart with the Helm CLI, and the example job with kubectl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill.faults import DRILL_INTERVAL_STEPS, leader
from holdfast_testbed.fakes.chart import CHART

REPOSITORY = Path(__file__).resolve().parents[4]
EXAMPLE = REPOSITORY / "trainer_lib" / "examples" / "gpt" / "job.yaml"
SMALL_MODEL = ("--context", "16", "--d-model", "16", "--layers", "1", "--evaluation-windows", "32")
DRILL_SCRIPT = REPOSITORY / "drills" / "_train.py"
DRILL_JOB = "drill"
OPERATOR_HOST = 200
"""The testbed has no cluster DNS, so agents receive the operator's cluster IP, which is this number of the range."""


def install_chart(cluster: Cluster, *values: str) -> None:
    """Run `helm upgrade --install` into a namespace with the restricted standard. Return when a replica leads."""
    cluster.prepare_namespace(OPERATOR_NAMESPACE)
    settings = [f"service.clusterIP={cluster.service_address(OPERATOR_HOST)}", *values]
    flags = [flag for value in settings for flag in ("--set", value)]
    where = ("--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "120s")
    cluster.helm("upgrade", "--install", "holdfast", str(CHART), *where, *flags)
    # Helm returns while replicas of the earlier release still run, one of which may lead.
    cluster.kubectl("-n", OPERATOR_NAMESPACE, "rollout", "status", "deployment/holdfast", "--timeout=120s")
    leader(cluster)


def uninstall_chart(cluster: Cluster) -> None:
    cluster.helm("uninstall", "holdfast", "--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "60s")


def apply_drill_job(
    cluster: Cluster,
    namespace: str,
    elasticity: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
) -> None:
    """Return a job of three workers that trains a tiny model and records its actions, with budgets that no drill uses
    up. Without `elasticity`, it has that of the example: two continue when one is lost. `checkpoint` is added to its
    own."""
    body = job_with_script(cluster, namespace, DRILL_JOB, DRILL_SCRIPT)
    causes = ("Application", "Infrastructure", "Interruption", "OOM")
    body["spec"]["recovery"] = {
        "budgets": [{"cause": cause, "maxRestarts": 10_000} for cause in causes],
        "backoff": {"initialSeconds": 0, "maxSeconds": 1},
    }
    body["spec"]["checkpoint"] |= {"intervalSteps": DRILL_INTERVAL_STEPS, **(checkpoint or {})}
    body["spec"]["elasticity"] = dict(elasticity or body["spec"]["elasticity"])
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(body))


def put_script(cluster: Cluster, namespace: str, job: str, script: Path) -> None:
    """Put the script onto the job's own part of the shared volume, where its command expects it."""
    folder = cluster.checkpoint_dir(namespace) / namespace / job
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.chmod(0o777)
    (folder / script.name).write_text(script.read_text())


def put_drill_script(cluster: Cluster, namespace: str) -> None:
    """Put only the script of the drills, for a job whose folder was lost."""
    put_script(cluster, namespace, DRILL_JOB, DRILL_SCRIPT)


def job_with_script(cluster: Cluster, namespace: str, name: str, script: Path, *arguments: str) -> dict[str, Any]:
    """Return the example job with another script, which is in the folder of the job's checkpoints, and with tight
    deadlines for hangs."""
    put_script(cluster, namespace, name, script)
    body: dict[str, Any] = yaml.safe_load(example_job())
    body["metadata"]["name"] = name
    body["spec"]["hangDetection"] = {"minStepTimeoutSeconds": 1}
    trainer = body["spec"]["workers"]["template"]["spec"]["containers"][0]
    command = ["python", f"/var/lib/holdfast/checkpoints/{script.name}", *arguments]
    trainer["command"] = ["holdfast", "run", "--", *command]
    return body


def remove_namespace(cluster: Cluster, name: str) -> None:
    """Delete the job and its pods at once, because a graceful end would delay the next trial."""
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    now = ("--all", "--force", "--grace-period=0", "--wait=false")
    cluster.kubectl("-n", name, "delete", "pods", *now, check=False)


def example_job() -> str:
    """Return the example's YAML."""
    return EXAMPLE.read_text()


def small_example(max_steps: int) -> dict[str, Any]:
    """Return the example with a model so small that its training leaves the processors to what is tested."""
    body: dict[str, Any] = yaml.safe_load(example_job())
    command: list[str] = body["spec"]["workers"]["template"]["spec"]["containers"][0]["command"]
    command[command.index("--max-steps") + 1] = str(max_steps)
    command += SMALL_MODEL
    return body


if __name__ == "__main__":
    _cluster = Cluster.load()
    install_chart(_cluster)
    _cluster.prepare_namespace("demo")
