"""The drill matrix: each fault that a job must survive, with its maximum cost and the cause of its incident.

The faults of the demo are in `faults`, and the others are here. Faults that the script injects use a file that
`drills/_train.py` reads.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill.faults import (
    DRILL_INTERVAL_STEPS,
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
from holdfast_testbed.drill.watcher import PodView

API_AWAY_SECONDS = 60.0
PARTITION_SECONDS = 15.0
DISK_FULL_SECONDS = 4.0
BALLAST = "ballast"
LEASE = "holdfast-operator"
BATCH, EPOCH_STEPS = 24, 20
"""Of `drills/_train.py`."""
SCALE_DOWN = "ToBeDeletedByClusterAutoscaler"


@dataclass(frozen=True)
class Case:
    """One row. Without a cause, no incident is counted, and training continues in the same attempt."""

    name: str
    fault: str
    inflict: Callable[[DrillJob], None]
    cause: str = ""
    _: KW_ONLY
    max_lost_steps: int = 0
    repeated_steps: int = 0
    """The number of steps that are repeated in another attempt, with an incident that counts in no budget."""
    skipped_steps: int = 0
    """The number of steps that no rank applies and that are not repeated."""
    divergences: int = 0
    """The number of ranks that differ from the other replicas and are repaired."""
    repair: Callable[[DrillJob], None] | None = None
    skip: Callable[[DrillJob], str] | None = None
    """The reason why this drill cannot run here; empty if it can."""
    misplaced: Callable[[DrillJob], PodView | None] = crowding_worker
    """The worker to move first. The loss of two workers with one node is another promise."""
    spoils_pod: bool = False
    """Whether to replace the last worker's pod afterwards. containerd calls any later end of it OOMKilled."""


def signal_rank(number: int) -> Callable[[DrillJob], None]:
    """Return a fault that sends this signal to the process that trains."""

    def inflict(job: DrillJob) -> None:
        process = job.rank_process(job.workers()[1])
        job.strike()
        job.cluster.signal(process, number)

    return inflict


def told(do: str, *, epochs: int = 0, **more: int) -> Callable[[DrillJob], None]:
    """Return a fault of the script of the last worker, ten steps from now; with `epochs`, for the next whole ones."""

    def inflict(job: DrillJob) -> None:
        at = _soon(job)
        if epochs:
            at += -(at - 1) % EPOCH_STEPS
            more["steps"] = epochs * EPOCH_STEPS
        _tell(job, job.workers()[-1], do, at, **more)

    return inflict


def _soon(job: DrillJob) -> int:
    newest = job.watcher.newest()
    return (newest.step if newest else 0) + 10


def _tell(job: DrillJob, pod: PodView, do: str, at: int, **more: int) -> None:
    unfinished = job.checkpoints / "command.tmp"
    unfinished.write_text(json.dumps({"do": do, "pod": pod.name, "at": at, **more}))
    unfinished.rename(job.checkpoints / "command.json")


def flip_weight(job: DrillJob) -> None:
    """Flip a bit on another node each time. Two divergences on one node would make new workers avoid it."""
    workers = sorted(job.workers(), key=lambda pod: pod.node)
    _tell(job, workers[job.watcher.view.divergences % len(workers)], "flip weight", _soon(job))


def all_nodes_diverged(job: DrillJob) -> str:
    if job.watcher.view.divergences < job.cluster.nodes:
        return ""
    return "the weights were changed on each node before, and a node with two divergences is avoided"


def exhaust_container(job: DrillJob) -> None:
    """Use memory that the end of a process does not free, so that the kernel kills one process after another,
    including the launcher. The process that fills it is the smallest one, so it is killed last."""
    pod = job.workers()[-1].name
    words = ("exec", pod, "-c", "trainer", "--", "sh", "-c", "cat /dev/zero > /dev/shm/ballast")
    job.strike()
    _meanwhile(job, "-n", job.watcher.namespace, *words)


def evict_pod(job: DrillJob) -> None:
    namespace, pod = job.watcher.namespace, job.workers()[-1]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod.name}/eviction"
    job.strike()
    job.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))


def drain_node(job: DrillJob) -> None:
    pod = lone_worker(job)
    words = ("drain", pod.node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    job.strike()
    _meanwhile(job, *words)


def uncordon(job: DrillJob) -> None:
    for number in range(1, job.cluster.nodes + 1):
        job.cluster.kubectl("uncordon", job.cluster.node(number).name)


def scale_down(job: DrillJob) -> None:
    """Do the first step with which the cluster's autoscaler removes a node."""
    pod = lone_worker(job)
    job.strike()
    job.cluster.kubectl("taint", "nodes", pod.node, f"{SCALE_DOWN}={int(time.time())}:NoSchedule")


def keep_nodes(job: DrillJob) -> None:
    for number in range(1, job.cluster.nodes + 1):
        node = job.cluster.node(number).name
        job.cluster.kubectl("taint", "nodes", node, f"{SCALE_DOWN}:NoSchedule-", check=False)


def cut_cable(job: DrillJob) -> None:
    node = job.cluster.node(job.node_number(lone_worker(job)))
    job.strike()
    node.cut()


def plug_cable(job: DrillJob) -> None:
    _wait_until(job, PARTITION_SECONDS)
    for number in range(1, job.cluster.nodes + 1):
        node = job.cluster.node(number)
        if not node.connected():
            node.heal()


def reboot(job: DrillJob) -> None:
    node = job.cluster.node(job.node_number(lone_worker(job)))
    job.strike()
    node.kill()
    node.start()


def kill_coordinator(job: DrillJob) -> None:
    kill_launcher(job, job.workers()[0])


def kill_launcher(job: DrillJob, pod: PodView) -> None:
    """Kill the pod's first process, which ends the pod."""
    launcher = job.launcher(pod)
    job.strike()
    job.cluster.signal(launcher, signal.SIGKILL)


def kill_all(job: DrillJob) -> None:
    launchers = [job.launcher(pod) for pod in job.workers()]
    await_save(job)
    job.strike()
    kill_at_once(job, launchers)


def slow_down(job: DrillJob) -> None:
    """Make one rank slow, until the job names its pod and node."""
    pod = job.workers()[-1]
    job.strike()
    (job.checkpoints / f"slow-{pod.name}").touch()
    job.watcher.wait("the slow rank", lambda: f"({pod.name} on {pod.node})" in _slow_ranks(job), 150)


def speed_up(job: DrillJob) -> None:
    for file in job.checkpoints.glob("slow-*"):
        file.unlink()
    job.watcher.wait("no slow rank", lambda: not _slow_ranks(job), 60)


def _slow_ranks(job: DrillJob) -> str:
    """Return the message on slow ranks; empty if no rank is slow."""
    _, reason, message = job.watcher.view.conditions.get("Degraded", ("", "", ""))
    return message if reason == "SlowRanks" else ""


def kill_sidecar(job: DrillJob) -> None:
    sidecar = job.sidecar(job.workers()[-1])
    job.strike()
    job.cluster.signal(sidecar, signal.SIGKILL)


def lose_api_and_worker(job: DrillJob) -> None:
    launcher = job.launcher(job.workers()[-1])
    job.cluster.pause("apiserver")
    job.strike()
    job.cluster.signal(launcher, signal.SIGKILL)


def return_api(job: DrillJob) -> None:
    _wait_until(job, API_AWAY_SECONDS)
    job.cluster.resume("apiserver")


def no_lease(job: DrillJob) -> str:
    found = job.cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "leases", "-o", "name")
    return "" if f"/{LEASE}" in found else "this operator holds no Lease"


def take_lease(job: DrillJob) -> None:
    """Write another holder into the Lease, as after a leader was suspended for longer than the Lease lasts."""
    patch = json.dumps({"spec": {"holderIdentity": "somebody-else"}})
    job.strike()
    job.cluster.kubectl("-n", OPERATOR_NAMESPACE, "patch", "lease", LEASE, "--type=merge", "-p", patch)


def fill_disk(job: DrillJob) -> None:
    """Fill the disk of the folder, which is small and separate: see `drills/matrix.py`."""
    job.strike()
    try:
        with (job.checkpoints / BALLAST).open("wb", buffering=0) as file:
            while file.write(b"\0" * (1 << 20)):
                pass
    except OSError:
        return


def free_disk(job: DrillJob) -> None:
    _wait_until(job, DISK_FULL_SECONDS)
    (job.checkpoints / BALLAST).unlink(missing_ok=True)
    known = commits(job.checkpoints)
    job.watcher.wait(
        "a checkpoint after the disk has space again",
        lambda: any(path not in known for path in commits(job.checkpoints)),
        timeout=60,
    )


def _meanwhile(job: DrillJob, *words: str) -> None:
    """Start a kubectl that runs while the job is watched."""
    threading.Thread(target=lambda: job.cluster.kubectl(*words, check=False), daemon=True).start()


def _wait_until(job: DrillJob, seconds: float) -> None:
    """Wait for this long after the fault."""
    time.sleep(max(0.0, job.struck[-1] + seconds - time.time()))


INFRASTRUCTURE, INTERRUPTION, APPLICATION, OOM = "Infrastructure", "Interruption", "Application", "OOM"
NON_FINITE = "NonFinite"
LEADERS_NODE = Case(
    "leader-power",
    "node's power cut, the leading operator on it",
    cut_power_of_leader,
    INFRASTRUCTURE,
    repair=restore_power_under_another_leader,
    misplaced=crowding_elsewhere,
)

CASES = (
    Case("sidecar-killed", "sidecar SIGKILLed", kill_sidecar),
    Case("rank-killed", "rank process SIGKILLed", signal_rank(signal.SIGKILL), INFRASTRUCTURE),
    Case("rank-stopped", "rank process SIGSTOPped", signal_rank(signal.SIGSTOP), INFRASTRUCTURE),
    Case("exception", "exception in the script", told("raise"), APPLICATION),
    Case("exit-2", "script ends with 2", told("exit"), APPLICATION),
    Case("bad-sample", "a sample cannot be read", told("bad sample")),
    Case("nan-loss", "NaN in the loss of one step", told("nan loss"), skipped_steps=1),
    Case("nan-gradient", "NaN in a gradient of one step", told("nan gradient"), skipped_steps=1),
    Case("nan-weight", "NaN in the weights of one rank", told("nan weight"), NON_FINITE, skipped_steps=1),
    Case(
        "nan-row",
        "NaN in the loss of 20 steps in a row",
        told("nan loss", epochs=1),
        NON_FINITE,
        max_lost_steps=DRILL_INTERVAL_STEPS,
    ),
    Case(
        "flip-weight",
        "a bit flips in the weights of one rank",
        flip_weight,
        divergences=1,
        skip=all_nodes_diverged,
    ),
    Case("gpu-oom", "out of GPU memory in one step, one rank", told("gpu oom"), repeated_steps=1),
    Case("oom-process", "out of memory, one process", told("fill memory"), OOM, spoils_pod=True),
    Case("oom-container", "out of memory, the container", exhaust_container, OOM),
    Case("rank-slow", "a rank five times as slow", slow_down, repair=speed_up),
    Case("disk-full", "checkpoint volume full for 4 s", fill_disk, repair=free_disk),
    Case("pod-deleted", "pod deleted", delete_pod, INTERRUPTION),
    Case("pod-evicted", "pod evicted", evict_pod, INTERRUPTION),
    Case("coordinator-killed", "coordinator's pod", kill_coordinator, INFRASTRUCTURE),
    Case("operator-killed", "a pod, and the operator in mid-recovery", kill_launcher_and_operator, INFRASTRUCTURE),
    Case("all-killed", "all pods at once", kill_all, INFRASTRUCTURE, max_lost_steps=DRILL_INTERVAL_STEPS),
    Case("lease-lost", "the leader's Lease lost", take_lease, skip=no_lease),
    Case("node-drained", "kubectl drain", drain_node, INTERRUPTION, repair=uncordon),
    Case("node-scaled-down", "autoscaler takes the node away", scale_down, INTERRUPTION, repair=keep_nodes),
    LEADERS_NODE,
    Case("node-rebooted", "node rebooted", reboot, INFRASTRUCTURE),
    Case("node-partitioned", "node cut off for 15 s", cut_cable, INFRASTRUCTURE, repair=plug_cable),
    Case("node-power", "node's power cut", cut_power, INFRASTRUCTURE, repair=restore_power),
    Case(
        "api-away",
        "API server away for 60 s, a pod lost meanwhile",
        lose_api_and_worker,
        INFRASTRUCTURE,
        repair=return_api,
    ),
)
"""All rows, the least disruptive first."""
