"""The faults. Each injects one fault into a running job and prints a message.

A fault is a function of the job that returns once the fault is injected. `Drill.run` then watches the job, and
`judge` decides whether the promise was kept.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast_testbed.constants import OPERATOR_NAMESPACE
from holdfast_testbed.drill.job_view import AttemptId, Incident
from holdfast_testbed.drill.promises import Outcome, Promise, first_new_step, lost_steps
from holdfast_testbed.drill.watcher import PodView, Watcher
from holdfast_testbed.errors import UnplaceableError
from holdfast_testbed.waiting import wait_for

if TYPE_CHECKING:
    from holdfast_testbed.cluster.cluster import Cluster
    from holdfast_testbed.node.processes import Process

DRILL_INTERVAL_STEPS = 50
"""Steps between two checkpoints of the drills' job."""
SETTLE_SECONDS = 60.0
_COMMIT = re.compile(r"step-(\d+)\.g(\d+)\.a(\d+)")


@dataclass(frozen=True, kw_only=True)
class DrillJob:
    """A running job that faults are injected into, with its cluster and its watcher."""

    cluster: Cluster
    watcher: Watcher
    say: Callable[[str], None]
    struck: list[float] = field(default_factory=list)

    def strike(self) -> None:
        """Record the time of the fault. A fault calls this right before it, after the search for the target."""
        self.struck.append(time.time())

    @property
    def checkpoints(self) -> Path:
        watcher = self.watcher
        return self.cluster.checkpoint_dir(watcher.namespace) / watcher.namespace / watcher.job

    def workers(self) -> list[PodView]:
        """Return the running pods of the present generation, by index."""
        members = self.watcher.view.members
        alive = [p for p in self.watcher.pods if p.name in members and p.phase == "Running" and not p.deleting]
        return sorted(alive, key=lambda pod: members.index(pod.name))

    def launcher(self, pod: PodView) -> Process:
        """Return the container's first process, the only one whose parent is outside the container."""
        processes = self._trainer_processes(pod)
        inside = {process.pid for process in processes}
        return next(process for process in processes if process.ppid not in inside)

    def rank_process(self, pod: PodView) -> Process:
        """Return the process that trains, which may have been a standby before."""
        launcher = self.launcher(pod)
        return next(p for p in self._trainer_processes(pod) if p.ppid == launcher.pid and is_rank(p))

    def operator(self) -> Process:
        processes = self.cluster.pod_processes(OPERATOR_NAMESPACE, leader(self.cluster)["metadata"]["name"])
        return next(p for p in processes if "holdfast_operator" in " ".join(p.cmdline))

    def sidecar(self, pod: PodView) -> Process:
        processes = self.cluster.pod_processes(self.watcher.namespace, pod.name)
        return next(p for p in processes if p.container == "holdfast-sidecar")

    def node_number(self, pod: PodView) -> int:
        return int(pod.node.rsplit("-", 1)[1])

    def _trainer_processes(self, pod: PodView) -> list[Process]:
        processes = self.cluster.pod_processes(self.watcher.namespace, pod.name)
        return [p for p in processes if p.container == "trainer"]


def is_rank(child: Process) -> bool:
    """Return whether a child of the launcher trains, and is neither a standby nor a program of the launcher.

    A standby has a distinct process name until it becomes a rank. Its command line stays the same, and its code
    (`-c`) contains our module names too, as part of a word.
    """
    return not child.name.startswith("holdfast-") and not any(
        word.startswith("holdfast.launcher.") for word in child.cmdline
    )


@dataclass(frozen=True)
class Drill:
    """A fault with its promise.

    `repair` restores the cluster (not the job) afterwards; `verify` returns further promises that were not kept.
    With `takes_node` the promise holds for one worker: each worker must be on its own node.
    """

    name: str
    promise: Promise
    inflict: Callable[[DrillJob], None]
    _: KW_ONLY
    repair: Callable[[DrillJob], None] | None = None
    verify: Callable[[DrillJob], tuple[str, ...]] | None = None
    patience: float = 180.0
    takes_node: bool = False

    def run(self, job: DrillJob) -> Outcome:
        watcher = job.watcher
        before = watcher.newest()
        if before is None:
            raise RuntimeError("the job is not training yet: no fault can be injected")
        known = {incident.attempt_id for incident in watcher.view.incidents}
        watched_from = time.monotonic() - 5
        try:
            self.inflict(job)
            injected = time.monotonic()
            injected_wall = time.time()
            resumed = self._await_next_step(watcher, before.attempt_id, injected)
        finally:
            if self.repair is not None:
                self.repair(job)
        incidents = _new_incidents(watcher, known)
        seen = watcher.since(watched_from)
        detected = [i.detected.timestamp() - injected_wall for i in incidents if i.detected]
        return Outcome(
            injected_at=injected,
            before=before.attempt_id,
            resumed_seconds=resumed - injected,
            noticed_seconds=max(0.0, min(detected)) if detected else None,
            lost_steps=lost_steps(seen, before.attempt_id, incidents),
            incidents=incidents,
            complaints=self.verify(job) if self.verify is not None else (),
        )

    def _await_next_step(self, watcher: Watcher, before: AttemptId, since: float) -> float:
        """Return the time at which a later world was observed to complete a step."""
        watcher.wait(
            f"the next step after '{self.name}'",
            lambda: first_new_step(watcher.since(since), before) is not None,
            self.patience,
        )
        at = first_new_step(watcher.since(since), before)
        return at if at is not None else time.monotonic()


def _new_incidents(watcher: Watcher, known: set[AttemptId]) -> tuple[Incident, ...]:
    """Wait until each new incident has ended, and return them."""

    def fresh() -> tuple[Incident, ...]:
        return tuple(i for i in watcher.view.incidents if i.attempt_id not in known)

    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        incidents = fresh()
        if incidents and all(incident.resumed for incident in incidents):
            return incidents
        time.sleep(0.2)
    return fresh()


def leader(cluster: Cluster) -> dict[str, Any]:
    """Return the pod of the leading operator, which will lead for a while."""
    found: dict[str, Any] = {}

    def leads() -> bool:
        lease = ("get", "lease", "holdfast-operator", "-o", "jsonpath={.spec.holderIdentity}")
        holder = cluster.kubectl("-n", OPERATOR_NAMESPACE, *lease, check=False).strip()
        shown = holder and cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "pod", holder, "-o", "json", check=False)
        found.update(json.loads(shown) if shown else {})
        return bool(shown) and "deletionTimestamp" not in found["metadata"]

    wait_for(leads, what="one of the operators leads", seconds=60, every=0.5)
    return found


def kill_rank(job: DrillJob) -> None:
    pod = job.workers()[1]
    job.watcher.wait("a warm process on standby", lambda: job.watcher.warm(pod.name) > 0, timeout=90)
    process = job.rank_process(pod)
    job.strike()
    job.cluster.signal(process, signal.SIGKILL)
    job.say(f"SIGKILL to the rank process in {pod.name} (pid {process.pid} on {pod.node})")


def delete_pod(job: DrillJob, pod: PodView | None = None) -> None:
    """Delete this pod, or that of the last worker."""
    pod = pod or job.workers()[-1]
    job.strike()
    job.cluster.kubectl("-n", job.watcher.namespace, "delete", "pod", pod.name, "--wait=false")
    job.say(f"kubectl delete pod {pod.name}")


def announce_interruption(job: DrillJob) -> None:
    pod = workers_away_from_operator(job)[0]
    job.cluster.notice(job.node_number(pod), action="terminate", seconds=120)
    job.say(f"AWS announces that {pod.node} ends in 120 s ({pod.name} runs there)")


def reclaim_and_replace(job: DrillJob) -> None:
    """Replace the instance, as the cloud does after its notice."""
    for number in job.cluster.noticed():
        node = job.cluster.node(number)
        node.kill()
        job.cluster.clear_notice(number)
        node.start()
        job.say(f"AWS has taken {node.name} and brought a new instance under its name")


def kill_launcher_and_operator(job: DrillJob) -> None:
    """Kill both. They are looked up first, because recovery is faster than a request for the operator's pod."""
    pod = job.workers()[1]
    launcher, operator = job.launcher(pod), job.operator()
    job.strike()
    for process in (launcher, operator):
        job.cluster.signal(process, signal.SIGKILL)
    job.say(f"SIGKILL to the launcher of {pod.name}: the pod is lost")
    job.say(f"SIGKILL to the operator in the middle of the recovery (pid {operator.pid})")


def kill_all_and_damage(job: DrillJob) -> None:
    operator = job.operator()
    job.cluster.signal(operator, signal.SIGSTOP)
    job.say("the operator is stopped (SIGSTOP)")
    launchers = [job.launcher(pod) for pod in job.workers()]
    await_save(job)
    kill_at_once(job, launchers)
    job.say("SIGKILL to every launcher: nothing of the job is left running")
    commit = newest_commit(job.checkpoints)
    flip_one_bit(commit / "rank-0.safetensors")
    job.say(f"one bit of {commit.name}/rank-0.safetensors is flipped")
    job.cluster.signal(operator, signal.SIGCONT)
    job.say("the operator continues (SIGCONT)")


def kill_at_once(job: DrillJob, processes: Sequence[Process]) -> None:
    """Stop all processes before killing the first. Otherwise, survivors may form another world between two signals on
    a busy machine, and its end is a second incident."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            job.cluster.signal(process, number)


def await_save(job: DrillJob) -> None:
    """Wait until no save is in flight or due soon, because the steps during a save are lost as well."""

    def saved() -> bool:
        newest, found = job.watcher.newest(), commits(job.checkpoints)
        since = newest.step - step_of(found[-1]) if newest and found else DRILL_INTERVAL_STEPS
        return since < 0.5 * DRILL_INTERVAL_STEPS

    job.watcher.wait("a checkpoint while no other is being written", saved, timeout=120)


def damage_was_named(job: DrillJob) -> tuple[str, ...]:
    """Check that the corrupt checkpoint was quarantined and not deleted, and that an event of the job names it."""
    aside = [path.name for path in (job.checkpoints / "quarantine").glob("step-*") if path.is_dir()]
    if not aside:
        return ("the corrupt checkpoint was not moved to quarantine/",)
    told = job.cluster.kubectl(
        "-n", job.watcher.namespace, "get", "events", "--field-selector", "reason=CheckpointQuarantined",
        "-o", "jsonpath={.items[*].message}",
    )  # fmt: skip
    commit = ".".join(aside[0].split(".")[:3])
    return () if commit in told else (f"no event names the corrupt {commit}",)


def cut_power(job: DrillJob) -> None:
    _cut_power_under(job, lone_worker(job))


def cut_power_of_leader(job: DrillJob) -> None:
    """Cut the power of the leader's node. Its one worker is not replaced until another operator leads."""
    beside = workers_beside_leader(job)
    if len(beside) != 1:
        raise UnplaceableError(f"{len(beside)} workers are on the leader's node; expected one")
    _cut_power_under(job, beside[0])


def _cut_power_under(job: DrillJob, pod: PodView) -> None:
    job.strike()
    job.cluster.node(job.node_number(pod)).kill()
    job.say(f"power cut on {pod.node} ({pod.name} ran there)")


def restore_power(job: DrillJob) -> None:
    for number in range(1, job.cluster.nodes + 1):
        node = job.cluster.node(number)
        if not node.alive():
            node.start()
            job.say(f"power is back on node {number}")


def restore_power_under_another_leader(job: DrillJob) -> None:
    """Restore the power when another operator leads: the old leader would otherwise continue to lead."""
    nodes = [job.cluster.node(number) for number in range(1, job.cluster.nodes + 1)]
    dark = {node.name for node in nodes if not node.alive()}
    try:
        job.watcher.wait("another leader", lambda: leader(job.cluster)["spec"]["nodeName"] not in dark, timeout=60)
    finally:
        restore_power(job)


def raise_in_script(job: DrillJob) -> None:
    newest = job.watcher.newest()
    step = (newest.step if newest else 0) + 10
    target = job.checkpoints / "inject.json"
    unfinished = target.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"raise_at_step": step}))
    unfinished.rename(target)
    job.say(f"the script will raise an exception at step {step}")
    job.watcher.wait_for_step(step - 2, timeout=60)


def commits(folder: Path) -> list[Path]:
    """Return the published checkpoints, the oldest first, without those being written."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _COMMIT.fullmatch(path.name))]
    whole = [(match, path) for match, path in named if (path / "MANIFEST.json").exists()]
    return [path for match, path in sorted(whole, key=lambda entry: tuple(map(int, entry[0].groups())))]


def step_of(commit: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(commit.name.split(".")[0].removeprefix("step-"))


def newest_commit(folder: Path) -> Path:
    """Return the checkpoint that a restart tries first."""
    found = commits(folder)
    if not found:
        raise FileNotFoundError(f"no checkpoint in {folder}: the job has not written one yet")
    return found[-1]


def flip_one_bit(path: Path) -> None:
    """Flip a bit in the middle of the payload. Without a digest, such corruption would load silently."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))


def workers_away_from_operator(job: DrillJob) -> list[PodView]:
    """Return the workers on other nodes than the leading operator, whose loss is a separate drill."""
    host = leader(job.cluster)["spec"]["nodeName"]
    return [pod for pod in reversed(job.workers()) if pod.node != host]


def workers_beside_leader(job: DrillJob) -> list[PodView]:
    """Return the workers on the leading operator's node."""
    host = leader(job.cluster)["spec"]["nodeName"]
    return [pod for pod in job.workers() if pod.node == host]


def lone_worker(job: DrillJob) -> PodView:
    """Return a worker away from the operator, alone on its node if possible.

    Two of three would be the majority. Without a majority no worker may continue, which is another promise.
    """
    nodes = [worker.node for worker in job.workers()]
    return min(workers_away_from_operator(job), key=lambda worker: nodes.count(worker.node))


def _sharing_worker(job: DrillJob) -> PodView | None:
    nodes = [worker.node for worker in job.workers()]
    return next((worker for worker in reversed(job.workers()) if nodes.count(worker.node) > 1), None)


def crowding_worker(job: DrillJob) -> PodView | None:
    """Return a worker that shares its node, if none away from the operator has a node alone."""
    nodes = [worker.node for worker in job.workers()]
    if any(nodes.count(worker.node) == 1 for worker in workers_away_from_operator(job)):
        return None
    return _sharing_worker(job)


def crowding_elsewhere(job: DrillJob) -> PodView | None:
    """Return a worker that shares its node, if the leader's node does not have exactly one worker."""
    if len(workers_beside_leader(job)) == 1:
        return None
    return _sharing_worker(job)


def _promise(fault: str, seconds: float, cause: str, *, intervals: int = 0) -> Promise:
    lost = intervals * DRILL_INTERVAL_STEPS
    return Promise(fault=fault, within_seconds=seconds, max_lost_steps=lost, cause=cause)


DRILLS = (
    Drill("rank killed", _promise("rank process SIGKILLed", 3, "Infrastructure"), kill_rank),
    Drill("pod deleted", _promise("pod deleted", 3, "Interruption"), delete_pod),
    Drill(
        "spot notice",
        _promise("spot notice on a node", 10, "Interruption"),
        announce_interruption,
        repair=reclaim_and_replace,
        takes_node=True,
    ),
    Drill(
        "operator killed",
        _promise("launcher killed, and the operator in mid-recovery", 5, "Infrastructure"),
        kill_launcher_and_operator,
    ),
    Drill(
        "all killed, checkpoint corrupt",
        _promise("all launchers killed, newest checkpoint corrupt", 45, "Infrastructure", intervals=2),
        kill_all_and_damage,
        verify=damage_was_named,
    ),
    Drill(
        "power cut",
        _promise("node's power cut", 5, "Infrastructure"),
        cut_power,
        repair=restore_power,
        takes_node=True,
    ),
    Drill("exception", _promise("exception in the script", 10, "Application"), raise_in_script),
)
"""The promises of the README's table, in the order of the demo."""
