"""Replicas whose state differed: the count in the status, the condition, and the nodes that are avoided for it.

A launcher reports how often its ranks differed since its own start. The status records per worker how much of that
number the job's count includes, so a restarted operator counts nothing twice.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import JobReason, WorkerReason
from holdfast_operator.api.status import ConditionType, Divergence, Divergences, Worker
from holdfast_operator.api.status.failure_history import NodeFailures
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoiding
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.views.reports import ReportedDivergences

_OVER = Reason(JobReason.NO_RECENT_DIVERGENCE, messages.job.no_recent_divergence())


def apply(draft: PlanDraft) -> PlanDraft:
    """Record the divergences that launchers report, and set the condition."""
    for worker in draft.status.workers:
        report = draft.seen.report(worker.pod_uid)
        if report is not None and report.divergences is not None:
            draft = _counted(draft, worker, report.divergences)
    return _with_condition(draft)


def _counted(draft: PlanDraft, worker: Worker, told: ReportedDivergences) -> PlanDraft:
    """Add what the launcher reports and the job's count does not include. A new launcher reports a lower number."""
    new = told.count - worker.divergences if told.count >= worker.divergences else told.count
    if worker.divergences != told.count:
        draft = draft.changed_worker(worker, divergences=told.count)
    if new <= 0:
        return draft
    found = told.last
    last = Divergence(
        rank=found.rank,
        node=worker.node if found.repaired else "",
        step=found.step,
        tensor=found.tensor,
        repaired=found.repaired,
        time=min(found.time, draft.now),
    )
    before = draft.status.divergences.count if draft.status.divergences is not None else 0
    draft = draft.with_status(divergences=Divergences(count=min(before + new, c.MAX_NUMBER), last=last))
    draft = replace(draft, diverged=(*draft.diverged, found.repaired))
    words = _words(last)
    draft = draft.with_event(words.reason, words.message, warning=True)
    return _blamed(draft, worker) if last.node else draft


def _words(last: Divergence) -> Reason:
    if last.repaired:
        message = messages.job.replica_repaired(last.rank, last.node, last.step, last.tensor)
        return Reason(JobReason.REPLICA_REPAIRED, message)
    return Reason(JobReason.NO_MAJORITY_OF_REPLICAS, messages.job.no_majority_of_replicas(last.step, last.tensor))


def _blamed(draft: PlanDraft, worker: Worker) -> PlanDraft:
    """Record the divergence for the worker's node, and avoid the node if it repeats. A reboot clears the record."""
    view = draft.seen.node(worker.node)
    boot_id = view.boot_id if view is not None else ""
    known = next((entry for entry in draft.status.diverged_nodes if entry.node == worker.node), None)
    if known is None or (boot_id and known.boot_id != boot_id):
        known = NodeFailures(node=worker.node, boot_id=boot_id)
    times = tuple(time for time in known.times if draft.now - time < c.DIVERGENCE_WINDOW)
    known = replace(known, times=times).plus(draft.now)
    others = (entry for entry in draft.status.diverged_nodes if entry.node != worker.node)
    draft = draft.with_status(diverged_nodes=(*others, known)[-c.OFFENDERS_KEPT :])
    if len(known.times) < c.DIVERGENCES_TO_AVOID:
        return draft
    elsewhere = draft.can_place_elsewhere(worker.node, [worker])
    hours = round(c.DIVERGENCE_WINDOW.total_seconds() / 3600)
    message = messages.job.repeated_divergence(worker.node, len(known.times), hours, elsewhere=elsewhere)
    if elsewhere:
        draft = avoiding(draft, worker.node, WorkerReason.REPEATED_DIVERGENCE, c.DIVERGENCE_WINDOW)
    return draft.with_event(WorkerReason.REPEATED_DIVERGENCE, message, warning=True)


def _with_condition(draft: PlanDraft) -> PlanDraft:
    """The condition is true for a day after the last divergence. A job without any does not have it."""
    divergences = draft.status.divergences
    if divergences is None:
        return draft
    recent = draft.now - divergences.last.time < c.DIVERGENCE_WINDOW
    words = _words(divergences.last) if recent else _OVER
    return draft.with_condition(ConditionType.REPLICAS_DIVERGED, recent, words)
