"""Edits of a job that trains, in flight."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast_testbed.drill.job_view import parse_metrics
from holdfast_testbed.drill.watcher import METRICS_PORT, PodView

if TYPE_CHECKING:
    from holdfast_testbed.drill.faults import DrillJob


def edit(stage: DrillJob, spec: Mapping[str, Any]) -> None:
    """A merge into its spec, until the launchers of all that train know of it."""
    watcher = stage.watcher
    patch = json.dumps({"spec": spec})
    stage.cluster.kubectl("-n", watcher.namespace, "patch", "ftj", watcher.job, "--type=merge", "-p", patch)
    watcher.wait("the edit to be known", lambda: _is_known(stage), timeout=60)


def _is_known(stage: DrillJob) -> bool:
    watcher = stage.watcher
    job = json.loads(stage.cluster.kubectl("-n", watcher.namespace, "get", "ftj", watcher.job, "-o", "json"))
    status = job["status"]
    if status.get("observedGeneration") != job["metadata"]["generation"]:
        return False
    return all(_revision(pod) >= status["membership"]["revision"] for pod in stage.workers())


def _revision(pod: PodView) -> int:
    """Of the membership that the pod has; 0 while it does not say."""
    try:
        with urllib.request.urlopen(f"http://{pod.ip}:{METRICS_PORT}/metrics", timeout=5) as answer:
            return int(parse_metrics(answer.read().decode()).get("holdfast_membership_revision", 0))
    except OSError:
        return 0
