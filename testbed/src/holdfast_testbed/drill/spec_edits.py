"""Changes the spec of a job during training."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast_testbed.drill.job_view import parse_metrics
from holdfast_testbed.drill.watcher import METRICS_PORT, PodView

if TYPE_CHECKING:
    from holdfast_testbed.drill.faults import DrillJob


def edit(job: DrillJob, spec: Mapping[str, Any]) -> None:
    """Merge into the job's spec, and wait until the launchers of all training workers have received it."""
    watcher = job.watcher
    patch = json.dumps({"spec": spec})
    job.cluster.kubectl("-n", watcher.namespace, "patch", "ftj", watcher.job, "--type=merge", "-p", patch)
    watcher.wait("the edit to be known", lambda: _is_known(job), timeout=60)


def _is_known(job: DrillJob) -> bool:
    watcher = job.watcher
    resource = json.loads(job.cluster.kubectl("-n", watcher.namespace, "get", "ftj", watcher.job, "-o", "json"))
    status = resource["status"]
    if status.get("observedGeneration") != resource["metadata"]["generation"]:
        return False
    return all(_revision(pod) >= status["membership"]["revision"] for pod in job.workers())


def _revision(pod: PodView) -> int:
    """Return the revision of the pod's membership; 0 if it is unknown."""
    try:
        with urllib.request.urlopen(f"http://{pod.ip}:{METRICS_PORT}/metrics", timeout=5) as answer:
            return int(parse_metrics(answer.read().decode()).get("holdfast_membership_revision", 0))
    except OSError:
        return 0
