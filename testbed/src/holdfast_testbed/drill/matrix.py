"""The drill matrix: each fault that a job is to survive, with what it may cost and under which cause it is counted.

The faults of the demo are in `faults`, the rest is here. Those that the script does to itself go by a file that
`drills/_train.py` reads.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill.faults import (
    DrillJob,
    await_save,
    commits,
    crowding_elsewhere,
    crowding_worker,
    cut_power,
    cut_power_of_leader,
    delete_pod,
    kill_at_once,
    kill_launcher_and_operator,
    lone_worker,
    restore_power,
    restore_power_under_another_leader,
)
from holdfast_testbed.drill.watcher import PodSight

API_AWAY_SECONDS = 60.0
PARTITION_SECONDS = 15.0
DISK_FULL_SECONDS = 4.0
BALLAST = "ballast"
LEASE = "holdfast-operator"
SCALE_DOWN = "ToBeDeletedByClusterAutoscaler"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. Without a cause, training goes on in the same world and nothing is counted."""

    name: str
    fault: str
    inflict: Callable[[DrillJob], None]
    cause: str = ""
    max_lost_steps: int = 0
    repair: Callable[[DrillJob], None] | None = None
    skip: Callable[[DrillJob], str] | None = None
    """Why it cannot be drilled here; empty if it can."""
    misplaced: Callable[[DrillJob], PodSight | None] = crowding_worker
    """A worker to be moved first. Two on one node leave it one after the other, or are the majority: that is another
    promise."""
    spoils_pod: bool = False
    """The last worker's pod is replaced afterwards: containerd calls whatever ends that container later OOMKilled."""


def signal_rank(number: int) -> Callable[[DrillJob], None]:
    """To the process that trains."""

    def inflict(stage: DrillJob) -> None:
        process = stage.rank_process(stage.workers()[1])
        stage.strike()
        stage.cluster.signal(process, number)

    return inflict


def told(do: str, **more: int) -> Callable[[DrillJob], None]:
    """The script of the last worker fails in its own way, ten steps from now."""

    def inflict(stage: DrillJob) -> None:
        newest = stage.watcher.newest()
        command = {"do": do, "pod": stage.workers()[-1].name, "at": (newest.step if newest else 0) + 10, **more}
        unfinished = stage.checkpoints / "command.tmp"
        unfinished.write_text(json.dumps(command))
        unfinished.rename(stage.checkpoints / "command.json")

    return inflict


def exhaust_container(stage: DrillJob) -> None:
    """Memory that no process's end gives back: the kernel ends one after the other, the launcher among them.

    What fills it is the smallest process there, so the last to go.
    """
    pod = stage.workers()[-1].name
    words = ("exec", pod, "-c", "trainer", "--", "sh", "-c", "cat /dev/zero > /dev/shm/ballast")
    stage.strike()
    _meanwhile(stage, "-n", stage.watcher.namespace, *words)


def evict_pod(stage: DrillJob) -> None:
    namespace, pod = stage.watcher.namespace, stage.workers()[-1]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}/eviction"
    stage.strike()
    stage.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))


def drain_node(stage: DrillJob) -> None:
    pod = lone_worker(stage)
    words = ("drain", pod.node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    stage.strike()
    _meanwhile(stage, *words)


def uncordon(stage: DrillJob) -> None:
    for number in range(1, stage.cluster.nodes + 1):
        stage.cluster.kubectl("uncordon", stage.cluster.node(number).name)


def scale_down(stage: DrillJob) -> None:
    """The first thing that the cluster's autoscaler does to a node that it takes away."""
    pod = lone_worker(stage)
    stage.strike()
    stage.cluster.kubectl("taint", "nodes", pod.node, f"{SCALE_DOWN}={int(time.time())}:NoSchedule")


def keep_nodes(stage: DrillJob) -> None:
    for number in range(1, stage.cluster.nodes + 1):
        node = stage.cluster.node(number).name
        stage.cluster.kubectl("taint", "nodes", node, f"{SCALE_DOWN}:NoSchedule-", check=False)


def cut_cable(stage: DrillJob) -> None:
    node = stage.cluster.node(stage.node_number(lone_worker(stage)))
    stage.strike()
    node.cut()


def plug_cable(stage: DrillJob) -> None:
    _wait_until(stage, PARTITION_SECONDS)
    for number in range(1, stage.cluster.nodes + 1):
        node = stage.cluster.node(number)
        if not node.connected():
            node.heal()


def reboot(stage: DrillJob) -> None:
    node = stage.cluster.node(stage.node_number(lone_worker(stage)))
    stage.strike()
    node.kill()
    node.start()


def kill_coordinator(stage: DrillJob) -> None:
    kill_launcher(stage, stage.workers()[0])


def kill_launcher(stage: DrillJob, pod: PodSight) -> None:
    """The pod's first process, so that the pod ends."""
    launcher = stage.launcher(pod)
    stage.strike()
    stage.cluster.signal(launcher, signal.SIGKILL)


def kill_all(stage: DrillJob, *, interval_steps: int) -> None:
    launchers = [stage.launcher(pod) for pod in stage.workers()]
    await_save(stage, interval_steps)
    stage.strike()
    kill_at_once(stage, launchers)


def kill_sidecar(stage: DrillJob) -> None:
    sidecar = stage.sidecar(stage.workers()[-1])
    stage.strike()
    stage.cluster.signal(sidecar, signal.SIGKILL)


def lose_api_and_worker(stage: DrillJob) -> None:
    launcher = stage.launcher(stage.workers()[-1])
    stage.cluster.pause("apiserver")
    stage.strike()
    stage.cluster.signal(launcher, signal.SIGKILL)


def return_api(stage: DrillJob) -> None:
    _wait_until(stage, API_AWAY_SECONDS)
    stage.cluster.resume("apiserver")


def no_lease(stage: DrillJob) -> str:
    found = stage.cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "leases", "-o", "name")
    return "" if f"/{LEASE}" in found else "this operator holds no Lease"


def take_lease(stage: DrillJob) -> None:
    """Somebody else's name in it, as after a leader that was asleep for longer than the Lease lasts."""
    patch = json.dumps({"spec": {"holderIdentity": "somebody-else"}})
    stage.strike()
    stage.cluster.kubectl("-n", OPERATOR_NAMESPACE, "patch", "lease", LEASE, "--type=merge", "-p", patch)


def fill_disk(stage: DrillJob) -> None:
    """The folder is on a small disk of its own: see `drills/matrix.py`."""
    stage.strike()
    try:
        with (stage.checkpoints / BALLAST).open("wb", buffering=0) as file:
            while file.write(b"\0" * (1 << 20)):
                pass
    except OSError:
        return


def free_disk(stage: DrillJob) -> None:
    _wait_until(stage, DISK_FULL_SECONDS)
    (stage.checkpoints / BALLAST).unlink(missing_ok=True)
    known = commits(stage.checkpoints)
    stage.watcher.wait(
        "a commit after the disk has room again",
        lambda: any(path not in known for path in commits(stage.checkpoints)),
        timeout=60,
    )


def _meanwhile(stage: DrillJob, *words: str) -> None:
    """A kubectl that goes on while the job is watched."""
    threading.Thread(target=lambda: stage.cluster.kubectl(*words, check=False), daemon=True).start()


def _wait_until(stage: DrillJob, seconds: float) -> None:
    """So long after the harm was done."""
    time.sleep(max(0.0, stage.struck[-1] + seconds - time.time()))


LEADERS_NODE = Case(
    name="leader-power",
    fault="node's power cut, the leading operator on it",
    inflict=cut_power_of_leader,
    cause="Infrastructure",
    repair=restore_power_under_another_leader,
    misplaced=crowding_elsewhere,
)


def cases(interval_steps: int) -> list[Case]:
    """All rows, the gentle ones first."""
    infrastructure, interruption, application, oom = "Infrastructure", "Interruption", "Application", "OOM"
    every = interval_steps
    return [
        Case(name="sidecar-killed", fault="sidecar SIGKILLed", inflict=kill_sidecar),
        Case(
            name="rank-killed",
            fault="rank process SIGKILLed",
            inflict=signal_rank(signal.SIGKILL),
            cause=infrastructure,
        ),
        Case(
            name="rank-stopped",
            fault="rank process SIGSTOPped",
            inflict=signal_rank(signal.SIGSTOP),
            cause=infrastructure,
        ),
        Case(name="exception", fault="exception in the script", inflict=told("raise"), cause=application),
        Case(name="exit-2", fault="script ends with 2", inflict=told("exit"), cause=application),
        Case(
            name="oom-process",
            fault="out of memory, one process",
            inflict=told("fill memory"),
            cause=oom,
            spoils_pod=True,
        ),
        Case(name="oom-container", fault="out of memory, the container", inflict=exhaust_container, cause=oom),
        Case(name="disk-full", fault="checkpoint volume full for 4 s", inflict=fill_disk, repair=free_disk),
        Case(name="pod-deleted", fault="pod deleted", inflict=delete_pod, cause=interruption),
        Case(name="pod-evicted", fault="pod evicted", inflict=evict_pod, cause=interruption),
        Case(name="coordinator-killed", fault="coordinator's pod", inflict=kill_coordinator, cause=infrastructure),
        Case(
            name="operator-killed",
            fault="a pod, and the operator in mid-recovery",
            inflict=kill_launcher_and_operator,
            cause=infrastructure,
        ),
        Case(
            name="all-killed",
            fault="all pods at once",
            inflict=partial(kill_all, interval_steps=every),
            cause=infrastructure,
            max_lost_steps=every,
        ),
        Case(name="lease-lost", fault="the leader's Lease lost", inflict=take_lease, skip=no_lease),
        Case(name="node-drained", fault="kubectl drain", inflict=drain_node, cause=interruption, repair=uncordon),
        Case(
            name="node-scaled-down",
            fault="autoscaler takes the node away",
            inflict=scale_down,
            cause=interruption,
            repair=keep_nodes,
        ),
        LEADERS_NODE,
        Case(name="node-rebooted", fault="node rebooted", inflict=reboot, cause=infrastructure),
        Case(
            name="node-partitioned",
            fault="node cut off for 15 s",
            inflict=cut_cable,
            cause=infrastructure,
            repair=plug_cable,
        ),
        Case(
            name="node-power", fault="node's power cut", inflict=cut_power, cause=infrastructure, repair=restore_power
        ),
        Case(
            name="api-away",
            fault="API server away for 60 s, a pod lost meanwhile",
            inflict=lose_api_and_worker,
            cause=infrastructure,
            repair=return_api,
        ),
    ]
