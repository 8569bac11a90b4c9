"""What the loss of a pod and of a node costs a job of three real pods (bars operator-2 and operator-3).

From the delete call, or from the node's link going down (then SIGKILL), to the first step that the next world
committed, by the script's own notes; all nodes share this machine's clock. Elastic: the two that are left go on.
Replaced: they wait for another pod. Beside a lost node stands a plain indexed Job of three pods in the same cluster,
with Kubernetes' own timings: from the power cut until a pod runs in the place of the lost one, once (`--full`, and
without a flag; some six minutes).
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import _bench as bench
import yaml
from kubernetes import client

from holdfast_testbed.cluster import Cluster
from holdfast_testbed.drill.faults import Stage, cut_power, restore_power
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job, example_job, install_chart
from holdfast_testbed.drill.matrix import Case
from holdfast_testbed.drill.trial import run, settle
from holdfast_testbed.drill.watch import Watcher

NODES = 3
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "elastic": {"minReplicas": 2, "onFailure": "Shrink"},
    "replaced": {"onFailure": "Replace"},
}
PLAIN = "plain"
PLAIN_PATIENCE = 600.0
LAST, COORDINATOR = -1, 0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What is lost, and within how many seconds training goes on, by condition."""

    bar: str
    case: Case
    within: Mapping[str, int]


def delete(place: int) -> Callable[[Stage], None]:
    """The pod of a worker, by the API call that `kubectl delete pod` makes."""

    def inflict(stage: Stage) -> None:
        pod, core = stage.workers()[place], client.CoreV1Api(stage.cluster.api_client())
        stage.strike()
        core.delete_namespaced_pod(pod.name, stage.watcher.namespace)

    return inflict


LOSSES = (
    Loss(
        bar="operator-2",
        case=Case(name="pod", fault="pod deleted", inflict=delete(LAST), cause="Interruption"),
        within={"elastic": 1, "replaced": 10},
    ),
    Loss(
        bar="operator-2",
        case=Case(
            name="coordinator", fault="coordinator's pod deleted", inflict=delete(COORDINATOR), cause="Interruption"
        ),
        within={"elastic": 1, "replaced": 10},
    ),
    Loss(
        bar="operator-3",
        case=Case(
            name="power", fault="node's power cut", inflict=cut_power, cause="Infrastructure", repair=restore_power
        ),
        within={"elastic": 2, "replaced": 30},
    ),
)


@contextmanager
def job(cluster: Cluster, condition: str) -> Iterator[Stage]:
    """One that trains, in a namespace of its own."""
    cluster.prepare_namespace(condition)
    apply_drill_job(cluster, condition, CONDITIONS[condition])
    with Watcher(cluster, condition, DRILL_JOB) as watcher:
        yield Stage(cluster=cluster, watcher=watcher, say=lambda text: None)
    cluster.kubectl("-n", condition, "delete", "ftj", DRILL_JOB, "--wait=true", "--timeout=120s")


def seconds(loss: Loss, stage: Stage) -> float:
    """One trial; what lost a step, or was counted otherwise, is no figure."""
    trial = run(loss.case, stage)
    if not trial.held(loss.case) or trial.resumed is None:
        raise SystemExit(f"{loss.case.fault}: {trial}")
    print(f"{stage.watcher.namespace}: {loss.case.fault}: {trial.resumed:.2f} s", file=sys.stderr, flush=True)
    return trial.resumed


def plain_job_resumes(cluster: Cluster) -> float:
    """From a node's power cut until a pod of an indexed Job runs in the place of the one that was there."""
    cluster.prepare_namespace(PLAIN)
    template = yaml.safe_load(example_job())["spec"]["workers"]["template"]
    template["spec"]["restartPolicy"] = "Never"
    template["spec"]["containers"][0]["command"] = ["python", "-c", "import time; time.sleep(36000)"]
    spec = {"completions": NODES, "parallelism": NODES, "completionMode": "Indexed", "template": template}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": PLAIN}, "spec": spec}
    cluster.kubectl("-n", PLAIN, "apply", "-f", "-", input=json.dumps(body))
    core = client.CoreV1Api(cluster.api_client())
    before = _running(core, set(), NODES, 120.0)
    number = int(next(iter(before.values())).rsplit("-", 1)[1])
    cut = time.monotonic()
    cluster.node(number).kill()
    try:
        _running(core, set(before), 1, PLAIN_PATIENCE)
        return time.monotonic() - cut
    finally:
        cluster.node(number).start()
        cluster.kubectl("-n", PLAIN, "delete", "job", PLAIN, "--wait=false")


def _running(core: client.CoreV1Api, known: set[str], wanted: int, patience: float) -> dict[str, str]:
    """So many running pods that were not known, by name, with their nodes."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        pods = core.list_namespaced_pod(PLAIN, field_selector="status.phase=Running").items
        fresh = {pod.metadata.name: pod.spec.node_name for pod in pods if pod.metadata.name not in known}
        if len(fresh) >= wanted:
            return fresh
        time.sleep(0.5)
    raise TimeoutError(f"not {wanted} pods within {patience:.0f} s")


def rows(values: Mapping[tuple[str, str], list[float]], plain: float | None) -> list[bench.Row]:
    """All; a plain Job stands beside what is lost with a node."""
    made = []
    for loss in LOSSES:
        peer = plain if loss.bar == "operator-3" else None
        for condition, within in loss.within.items():
            what, own = f"{loss.case.fault}, {condition}: next step after", values[condition, loss.case.name]
            target = f"<= {within}"
            beside = "" if peer is None else "plain indexed Job"
            made.append(bench.row(loss.bar, what, own, "s", target=target, peer=peer, peer_name=beside))
    return made


def main() -> int:
    """All rows."""
    effort = bench.arguments(__doc__ or "")
    rounds = effort.pick(quick=1, default=5, full=25)
    trials = bench.Trials("operator_recovery", effort)
    cluster = Cluster.up(name="bench", nodes=NODES, replace=True)
    try:
        install_chart(cluster)
        for condition in CONDITIONS:
            with job(cluster, condition) as stage:
                for number in range(1, rounds + 1):
                    for loss in random.sample(LOSSES, len(LOSSES)):
                        trials.collect(f"{condition} {loss.case.name}", number, lambda one=loss: seconds(one, stage))
                settle(stage)
        plain = None if effort.quick else plain_job_resumes(cluster)
    finally:
        cluster.down()
    values = {(c, loss.case.name): trials.values(f"{c} {loss.case.name}") for c in CONDITIONS for loss in LOSSES}
    return bench.finish("operator_recovery", rows(values, plain), effort)


if __name__ == "__main__":
    sys.exit(main())
