"""Workers that will leave: deleted, disrupted, noticed, or on a node that leaves.

They drain, and the replacement is requested at once. A cordon alone ends no pod. It therefore moves a worker only if
other nodes have capacity for it and for all workers without a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import Cause, FailureReason
from holdfast_operator.api.status import Phase, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import causes
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.workers.replicas import unplaced
from holdfast_operator.views import Notice, PodView


@dataclass(frozen=True, kw_only=True)
class _Departure:
    verdict: causes.ExitCause
    shun_node: bool


def apply(draft: PlanDraft) -> PlanDraft:
    """Move workers from Wanted to Leaving."""
    for node in _recommended(draft):
        draft = avoiding(draft, node, FailureReason.REBALANCE_RECOMMENDED, c.AVOID_NOTICED)
    # Workers that must leave come first, as they need the capacity first.
    for judge in (_must_go, _may_go):
        for worker in draft.status.in_phase(Phase.WANTED):
            pod = draft.pod(worker)
            going = judge(draft, worker, pod) if pod is not None and not pod.absent else None
            if pod is not None and going is not None:
                draft = _leave(draft, worker, pod, going)
    return draft


def _leave(draft: PlanDraft, worker: Worker, pod: PodView, going: _Departure) -> PlanDraft:
    verdict = going.verdict
    worker = replace(
        worker,
        phase=Phase.LEAVING,
        since=draft.now,
        cause=verdict.cause,
        reason=reason_word(verdict.reason),
        message=say(verdict.message),
    )
    draft = draft.with_worker(worker).with_event(worker.reason, worker.message, warning=True)
    if going.shun_node and pod.node:
        return avoiding(draft, pod.node, worker.reason, c.AVOID_NOTICED)
    return draft


def _must_go(draft: PlanDraft, worker: Worker, pod: PodView) -> _Departure | None:
    node = draft.node(worker)
    if pod.leaving:
        return _Departure(verdict=causes.of_departure(pod, node, draft.now), shun_node=False)
    notice = _notice(draft, pod)
    if notice is not None:
        words = messages.workers.interruption_notice(notice.source, pod.node, pod.name, notice.reason)
        reason = f"{notice.source}Notice"
        return _Departure(verdict=_interrupted(reason, words), shun_node=True)
    if node is not None and node.announced:
        words = messages.workers.node_leaving(node.name, pod.name, node.announced)
        return _Departure(verdict=_interrupted(FailureReason.NODE_LEAVING, words), shun_node=True)
    mark = node.mark if node is not None and not draft.spec.remediation_opt_out else None
    if mark is not None and mark.drains:
        words = messages.workers.node_remediated(pod.node, pod.name, mark.message)
        return _Departure(verdict=_interrupted(FailureReason.NODE_REMEDIATION, words), shun_node=True)
    return None


def _may_go(draft: PlanDraft, worker: Worker, pod: PodView) -> _Departure | None:
    node = draft.node(worker)
    if node is None or not node.unschedulable or (node.mark is not None and draft.spec.remediation_opt_out):
        return None
    if not draft.can_place_elsewhere(pod.node, (worker, *unplaced(draft))):
        return None
    words = messages.workers.node_cordoned(node.name, pod.name)
    return _Departure(verdict=_interrupted(FailureReason.NODE_CORDONED, words), shun_node=False)


def _interrupted(reason: str, message: str) -> causes.ExitCause:
    return causes.ExitCause(Cause.INTERRUPTION, reason, message)


def _notice(draft: PlanDraft, pod: PodView) -> Notice | None:
    """Return a notice for the pod's node that any worker's sidecar there reports."""
    for worker in draft.status.workers:
        report = draft.seen.report(worker.pod_uid)
        if report is None or worker.node != pod.node or worker.phase is Phase.ENDED:
            continue
        leaving = next((notice for notice in report.notices if notice.leaves), None)
        if leaving is not None:
            return leaving
    return None


def _recommended(draft: PlanDraft) -> list[str]:
    """Return nodes with an advisory notice: no worker leaves, and new ones go elsewhere if there is capacity."""
    return [
        worker.node
        for worker in draft.status.in_phase(Phase.WANTED)
        for report in [draft.seen.report(worker.pod_uid)]
        if report is not None and worker.node
        for notice in report.notices
        if notice.advises
    ]
