"""The cost of a lost pod, a lost node and a faulty node for a job of three real pods (bars operator-2 to operator-4).

The time starts with the delete call, with the failure of the node's link (followed by SIGKILL), or with the change of
the metric. It ends with the first completed step of the next world, by the script's own records; all nodes share this
machine's clock. Elastic: the remaining two continue. Replaced: they wait for another pod. A faulty node is drained:
its GPU's XID reaches the operator through Prometheus and Alertmanager, scraped and evaluated each second.

For comparison, a plain indexed Job of three pods runs in the same cluster with Kubernetes' own timings: from the
power cut until a replacement pod runs, once (`--full` and `--plain`; about six minutes).
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _bench as bench
import yaml
from kubernetes import client

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.faults import DrillJob, cut_power, lone_worker, restore_power
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job, example_job, install_chart
from holdfast_testbed.drill.matrix import LEADERS_NODE, Case
from holdfast_testbed.drill.sick_node import OFF_THE_BUS, Exporter, monitored, remediating, unschedulable
from holdfast_testbed.drill.trial import run, settle
from holdfast_testbed.drill.watcher import Watcher
from holdfast_testbed.errors import UnplaceableError

NODES = 3
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "elastic": {"minReplicas": 2, "onFailure": "Shrink"},
    "replaced": {"onFailure": "Replace"},
}
PLAIN = "plain"
PLAIN_PATIENCE = 600.0
LAST, COORDINATOR = -1, 0
SICK, SICK_WITHIN = "faulty GPU's node drained, replaced", 15
FLAGS = {
    "--losses": "only lost pods and nodes",
    "--sick": "only a sick GPU",
    "--plain": "only the plain indexed Job",
}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The lost object, and the limit in seconds until training resumes, by condition if there is a bar."""

    bar: str
    case: Case
    within: Mapping[str, int]


def delete(place: int) -> Callable[[DrillJob], None]:
    """Return a fault that deletes a worker's pod with the API call of `kubectl delete pod`."""

    def inflict(stage: DrillJob) -> None:
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
    Loss(bar="operator-3", case=LEADERS_NODE, within={}),
)


def sick_gpu(source: Exporter) -> Case:
    """Return a case of a GPU that fell off the bus, until all workers train without its node."""
    sick: list[str] = []

    def inflict(stage: DrillJob) -> None:
        sick[:] = [lone_worker(stage).node]
        stage.strike()
        source.xids[sick[0]] = OFF_THE_BUS

    def repair(stage: DrillJob) -> None:
        def elsewhere() -> bool:
            return sick[0] not in {pod.node for pod in stage.workers()}

        stage.watcher.wait("the workers are on other nodes", elsewhere, timeout=10)
        source.xids[sick[0]] = 0
        stage.watcher.wait("the node is given back", lambda: not unschedulable(stage.cluster, sick[0]), timeout=240)

    return Case(name="sick", fault="sick GPU", inflict=inflict, cause="Interruption", repair=repair)


@contextmanager
def job(cluster: Cluster, namespace: str, condition: str) -> Iterator[DrillJob]:
    """Start a job that trains, in a separate namespace."""
    cluster.prepare_namespace(namespace)
    apply_drill_job(cluster, namespace, CONDITIONS[condition])
    with Watcher(cluster, namespace, DRILL_JOB) as watcher:
        yield DrillJob(cluster=cluster, watcher=watcher, say=lambda text: None)
    cluster.kubectl("-n", namespace, "delete", "ftj", DRILL_JOB, "--wait=true", "--timeout=120s")


def seconds(case: Case, stage: DrillJob) -> float:
    """Run one trial and return its seconds. A trial that lost a step or was counted otherwise raises."""
    trial = run(case, stage)
    if not trial.held(case) or trial.resumed is None:
        raise SystemExit(f"{case.fault}: {trial}")
    print(f"{stage.watcher.namespace}: {case.fault}: {trial.resumed:.2f} s", file=sys.stderr, flush=True)
    return trial.resumed


def lose(cluster: Cluster, trials: bench.Trials, rounds: int) -> None:
    """Lose pods and nodes, in random order per round."""
    for condition in CONDITIONS:
        with job(cluster, condition, condition) as stage:
            for number in range(1, rounds + 1):
                for loss in random.sample(LOSSES, len(LOSSES)):
                    key = f"{condition} {loss.case.name}"
                    with suppress(UnplaceableError):  # a row of fewer trials; measured ones are kept
                        trials.collect(key, number, lambda case=loss.case: seconds(case, stage))
            settle(stage)


def sicken(cluster: Cluster, trials: bench.Trials, rounds: int) -> None:
    """Use a new job for each trial, so that its three workers are on three nodes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        remediating(cluster),
        monitored(cluster, Path(folder)) as source,
    ):
        for number in range(len(trials.values(SICK)), rounds):
            with job(cluster, f"sick-{number}", "replaced") as stage:
                trials.keep(SICK, seconds(sick_gpu(source), stage))


def plain_job_resumes(cluster: Cluster) -> float:
    """Return the seconds from a node's power cut until a replacement pod of an indexed Job runs."""
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
    """Return this many running pods that were not known, by name, with their nodes."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        pods = core.list_namespaced_pod(PLAIN, field_selector="status.phase=Running").items
        fresh = {pod.metadata.name: pod.spec.node_name for pod in pods if pod.metadata.name not in known}
        if len(fresh) >= wanted:
            return fresh
        time.sleep(0.5)
    raise TimeoutError(f"not {wanted} pods within {patience:.0f} s")


def rows(trials: bench.Trials, plain: float | None) -> list[bench.Measurement]:
    """Return the rows of the measurements."""
    made = []
    for loss in LOSSES:
        for condition in CONDITIONS:
            if own := trials.values(f"{condition} {loss.case.name}"):
                what = f"{loss.case.fault}, {condition}: next step after"
                target = f"<= {loss.within[condition]}" if condition in loss.within else ""
                made.append(bench.measured(loss.bar, what, own, "s", target=target))
    if own := trials.values(SICK):
        made.append(bench.measured("operator-4", f"{SICK}: next step after", own, "s", target=f"<= {SICK_WITHIN}"))
    if plain is not None:
        what = "node's power cut, plain indexed Job: pod runs elsewhere after"
        made.append(bench.measured("operator-3", what, [plain], "s"))
    return made


def main() -> int:
    effort = bench.arguments(__doc__ or "", FLAGS)
    rounds = effort.pick(quick=1, default=3, full=25)
    trials = bench.Trials("operator_recovery", effort)
    only = effort.flags & FLAGS.keys()
    plain = None
    cluster = Cluster.up(name="bench", nodes=NODES, replace=True)
    try:
        install_chart(cluster)
        if not only or "--losses" in only:
            lose(cluster, trials, rounds)
        if not only or "--sick" in only:
            sicken(cluster, trials, rounds)
        if "--plain" in only or (effort.full and not only):
            plain = plain_job_resumes(cluster)
    finally:
        cluster.down()
    return bench.finish("operator_recovery", rows(trials, plain), effort)


if __name__ == "__main__":
    sys.exit(main())
