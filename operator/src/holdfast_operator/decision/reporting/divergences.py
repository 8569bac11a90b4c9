"""Replicas whose state differed: the count in the status, the condition, and the nodes that are avoided for it.

A launcher reports how often its ranks differed since its own start. The status records per worker how much of that
number the job's count includes, so a restarted operator counts nothing twice.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import JobReason, WorkerReason
from holdfast_operator.api.status import ConditionType, Divergence, Divergences, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.avoided_nodes import avoided_already, avoiding
from holdfast_operator.decision.failures.repeat_offenders import failures_since_boot
from holdfast_operator.decision.plan import DivergenceMetric
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.views.reports import ReportedDivergences

_REPEATED = WorkerReason.REPEATED_DIVERGENCE
_OVER = Reason(JobReason.NO_RECENT_DIVERGENCE, messages.job.no_recent_divergence())


def apply(draft: PlanDraft) -> PlanDraft:
    """Record the divergences that launchers report, and set the condition."""
    for worker in draft.status.workers:
        report = draft.seen.report(worker.pod_uid)
        if report is not None and report.divergences is not None:
            draft = _counted(draft, worker, report.divergences)
    return _with_condition(draft)


def _counted(draft: PlanDraft, worker: Worker, report: ReportedDivergences) -> PlanDraft:
    """Add what the launcher reports and the job's count does not include. A new launcher reports a lower number."""
    new = report.count - worker.divergences if report.count >= worker.divergences else report.count
    if worker.divergences != report.count:
        draft = draft.changed_worker(worker, divergences=report.count)
    found = report.last
    if new <= 0 or found is None:
        return draft
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
    counted = DivergenceMetric(ranks=new, repaired=found.repaired)
    draft = replace(draft, diverged=(*draft.diverged, counted))
    words = _words(last)
    draft = draft.with_event(words.reason, words.message, warning=True)
    return _blamed(draft, worker, last.step) if last.node else draft


def _words(last: Divergence) -> Reason:
    if last.repaired:
        message = messages.job.replica_repaired(last.rank, last.node, last.step, last.tensor)
        return Reason(JobReason.REPLICA_REPAIRED, message)
    return Reason(JobReason.NO_MAJORITY_OF_REPLICAS, messages.job.no_majority_of_replicas(last.step, last.tensor))


def _blamed(draft: PlanDraft, worker: Worker, step: int) -> PlanDraft:
    """Record the divergence for the worker's node, and avoid the node if it repeats. A reboot clears the record."""
    known = failures_since_boot(draft, draft.status.diverged_nodes, worker.node)
    if known.step == step:
        return draft
    times = tuple(time for time in known.times if draft.now - time < c.DIVERGENCE_WINDOW)
    known = replace(known, times=times, step=step).plus(draft.now)
    others = (entry for entry in draft.status.diverged_nodes if entry.node != worker.node)
    draft = draft.with_status(diverged_nodes=(*others, known)[-c.OFFENDERS_KEPT :])
    repeated = len(known.times) >= c.DIVERGENCES_TO_AVOID
    if not repeated or avoided_already(draft, worker.node, _REPEATED, c.DIVERGENCE_WINDOW):
        return draft
    elsewhere = draft.can_place_elsewhere(worker.node, [worker])
    hours = round(c.DIVERGENCE_WINDOW.total_seconds() / 3600)
    message = messages.job.repeated_divergence(worker.node, len(known.times), hours, elsewhere=elsewhere)
    if elsewhere:
        draft = avoiding(draft, worker.node, _REPEATED, c.DIVERGENCE_WINDOW)
    return draft.with_event(_REPEATED, message, warning=True)


def _with_condition(draft: PlanDraft) -> PlanDraft:
    """The condition is true for a day after the last divergence. A job without any does not have it."""
    divergences = draft.status.divergences
    if divergences is None:
        return draft
    recent = draft.now - divergences.last.time < c.DIVERGENCE_WINDOW
    words = _words(divergences.last) if recent else _OVER
    return draft.with_condition(ConditionType.REPLICAS_DIVERGED, recent, words)
