"""The cause for which a worker ended: one of the four causes, or none if the operator ordered the end or the template
cannot run.

A cause is decided once, when the operator detects the end (docs/reference/protocol.md, Causes).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import Cause, FailureReason, JobReason, StartupReason
from holdfast_operator.decision.reporting import messages
from holdfast_operator.views import Exit, NodeView, PodView

TAINT_MANAGER = "DeletionByTaintManager"
PREEMPTION = "PreemptionByScheduler"

# The kubelet's reason for refusing a pod → what to do.
_HELPS = {
    "OutOf": "the scheduler does not count all that uses the node: look for static pods and reserved resources",
    "UnexpectedAdmissionError": "check the device plugin and the kubelet's log on the node",
    "TopologyAffinityError": "request what fits one NUMA node, or change topologyManagerPolicy of the kubelet",
    "SysctlForbidden": "allow the sysctl on the nodes (allowedUnsafeSysctls of the kubelet), or remove it from the"
    " template",
    "NodePorts": "another pod of the node uses the port: remove hostPort and hostNetwork from the template",
    "NodeAffinity": "the node's labels have changed: compare them with the template's nodeSelector and affinity",
    "AppArmor": "load the AppArmor profile on the nodes, or remove it from the template",
    "NodeShutdown": "the node is shutting down",
}
_COMPARE = "compare the template with what the node allows"


@dataclass(frozen=True)
class ExitCause:
    """A cause (None: no incident) with its reason and message."""

    cause: Cause | None
    reason: str
    message: str


def node_dead(node: NodeView | None, now: datetime) -> bool:
    """Return whether the node's object is gone, or the node has been silent for too long."""
    return node is None or node.dead(now)


def _cut_off(pod: PodView, node: NodeView | None) -> bool:
    """Return whether a taint evicted the pod because its node is silent, and not for another reason."""
    return pod.disruption == TAINT_MANAGER and node is not None and node.tainted_silent


def of_departure(pod: PodView, node: NodeView | None, now: datetime) -> ExitCause:
    """Return the cause for a pod that another client deletes, or whose object is gone."""
    preempted = pod.disruption == PREEMPTION  # the scheduler wants the node, so it is not lost
    if pod.bound and not preempted and (node_dead(node, now) or _cut_off(pod, node)):
        message = messages.workers.node_lost(pod.name, pod.node)
        return ExitCause(Cause.INFRASTRUCTURE, FailureReason.NODE_LOST, message)
    if pod.disruption:
        message = messages.workers.pod_disrupted(pod.name, pod.disruption, pod.disruption_note)
        return ExitCause(Cause.INTERRUPTION, pod.disruption, message)
    return ExitCause(Cause.INTERRUPTION, FailureReason.POD_DELETED, messages.workers.pod_deleted(pod.name))


def fails(code: int | None, *, launched: bool) -> bool:
    """Return whether this is the exit code of a failure. Code 75 has its meaning only from Holdfast's launcher."""
    return code not in ((None, c.EXIT_COMPLETE, c.EXIT_LEFT) if launched else (None, c.EXIT_COMPLETE))


def of_exit(pod: PodView, node: NodeView | None, now: datetime, *, launched: bool = True) -> ExitCause:
    """Return the cause for a pod that ended. Eviction and deletion take precedence over the container's exit code.

    A program without Holdfast's launcher answers SIGTERM with any exit code, including 0.
    """
    ended = pod.exit
    if ended is not None and ended.reason == FailureReason.OOM_KILLED:
        return ExitCause(Cause.OOM, FailureReason.OOM_KILLED, messages.workers.oom_killed(pod.name))
    if pod.over_limit:
        # This holds for any exit code that SIGTERM caused: the next pod would be evicted as well.
        message = messages.workers.pod_evicted(pod.name, pod.node, pod.failure)
        return ExitCause(Cause.APPLICATION, FailureReason.EVICTED, message)
    if pod.leaving and (not launched or ended is None or _ended_by_departure(pod, ended)):
        return of_departure(pod, node, now)
    if ended is None and pod.unprepared:
        message = messages.workers.init_container_failed(pod.name, pod.unprepared)
        return ExitCause(None, StartupReason.INIT_CONTAINER_FAILED, message)
    if ended is None:
        return ExitCause(Cause.INFRASTRUCTURE, StartupReason.POD_REFUSED, _refusal(pod))
    if launched and ended.code == c.EXIT_LEFT:
        return ExitCause(Cause.INTERRUPTION, FailureReason.DRAINED_ON_REQUEST, messages.workers.drained(pod.name))
    return _of_code(pod, ended, launched=launched)


def _ended_by_departure(pod: PodView, ended: Exit) -> bool:
    """Return whether the container ended because its pod was asked to leave.

    An unknown exit status says only that the node was down then. A taint may have deleted the pod for that.
    """
    if ended.unseen:
        return pod.disruption != TAINT_MANAGER
    return ended.code in (c.EXIT_LEFT, c.EXIT_SIGKILL, 143)


def _refusal(pod: PodView) -> str:
    """Return the kubelet's message and what to do."""
    helps = _HELPS.get("OutOf" if pod.failure_reason.startswith("OutOf") else pod.failure_reason, _COMPARE)
    return messages.workers.pod_refused(pod.name, pod.node, pod.failure.rstrip(". "), helps)


def _of_code(pod: PodView, ended: Exit, *, launched: bool) -> ExitCause:
    words = ended.words()
    if ended.code == c.EXIT_COMPLETE:
        return ExitCause(None, JobReason.COMPLETED, messages.workers.worker_completed(pod.name))
    if ended.cause is not None:
        return ExitCause(ended.cause, ended.reason or ended.cause, f"{pod.name}: {words}")
    cannot_start = ended.reason in ("StartError", "ContainerCannotRun")
    if ended.code == c.EXIT_NOT_FOUND or cannot_start:
        return ExitCause(None, _start_reason(ended), _start_message(pod, ended))
    if ended.unseen:
        message = messages.workers.exit_status_unknown(pod.name)
        return ExitCause(Cause.INFRASTRUCTURE, FailureReason.EXIT_STATUS_UNKNOWN, message)
    message = messages.workers.exited(pod.name, ended.code, words)
    if ended.code in (c.EXIT_SIGKILL, 143):
        return ExitCause(Cause.INFRASTRUCTURE, FailureReason.KILLED, message)
    if launched and ended.code == c.EXIT_LAUNCHER:
        return ExitCause(Cause.INFRASTRUCTURE, FailureReason.LAUNCHER_FAILED, message)
    return ExitCause(Cause.APPLICATION, FailureReason.EXIT_CODE, message)


def _start_reason(ended: Exit) -> str:
    missing = ended.code == c.EXIT_NOT_FOUND or "not found" in ended.message or "no such file" in ended.message
    return StartupReason.HOLDFAST_MISSING if missing else StartupReason.CONTAINER_FAILED


def _start_message(pod: PodView, ended: Exit) -> str:
    told = f": {ended.message}" if ended.message else f" (exit code {ended.code})"
    if _start_reason(ended) == StartupReason.HOLDFAST_MISSING:
        return messages.workers.command_missing(pod.name, told)
    return messages.workers.container_failed(pod.name, told)
