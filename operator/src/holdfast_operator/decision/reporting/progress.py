"""The newest step and checkpoint that launchers report, written at intervals and not at each step."""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import JobReason
from holdfast_operator.api.status import Phase, Progress
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting import messages
from holdfast_operator.views import Report


def apply(draft: PlanDraft) -> PlanDraft:
    return _quarantined(newest_progress(draft))


def newest_progress(draft: PlanDraft, *, force: bool = False) -> PlanDraft:
    """Update the newest step, at most once per ``pace`` unless ``force``."""
    best = newest_report(draft)
    known = draft.status.progress
    if best is None or best.committed_step is None or best.world is None:
        return _checkpoint(draft)  # a launcher that left after a last checkpoint reports no world
    due = known is None or known.time is None or draft.now - known.time >= draft.pace
    if not (due or force) or (known is not None and known.step == best.committed_step):
        return _checkpoint(draft)
    progress = Progress(step=best.committed_step, loss=best.loss, throughput=best.throughput, time=draft.now)
    return _checkpoint(draft.with_status(progress=progress))


def newest_report(draft: PlanDraft) -> Report | None:
    """Return the report with the newest step of the highest world."""
    return _newest(draft, draft.seen.reports)


def newest_living_report(draft: PlanDraft) -> Report | None:
    """Return the newest report of a pod that has not ended: if all pods of a world have ended, the world is over."""
    return _newest(draft, _living(draft))


def reports_of_newest_world(draft: PlanDraft) -> tuple[Report, ...]:
    """Return all fresh reports from the world of the newest living report."""
    best = newest_living_report(draft)
    if best is None or best.world is None:
        return ()
    attempt_id, told = best.world.attempt_id, (report for report in _living(draft) if report.fresh(draft.now))
    return tuple(report for report in told if report.world is not None and report.world.attempt_id == attempt_id)


def _living(draft: PlanDraft) -> tuple[Report, ...]:
    ended = {worker.pod_uid for worker in draft.status.in_phase(Phase.ENDED)}
    return tuple(report for report in draft.seen.reports if report.pod_uid not in ended)


def _newest(draft: PlanDraft, reports: tuple[Report, ...]) -> Report | None:
    running = [report for report in reports if report.world is not None and report.fresh(draft.now)]
    return max(
        running,
        key=lambda r: (r.world.attempt_id if r.world else None, r.committed_step or 0, r.pod_uid),
        default=None,
    )


def _checkpoint(draft: PlanDraft) -> PlanDraft:
    found = [draft.status.last_checkpoint] if draft.status.last_checkpoint else []
    told = (checkpoint for report in draft.seen.reports for checkpoint in report.checkpoints)
    # Node-local checkpoints are too frequent to record, and are lost with the pods.
    found += [checkpoint for checkpoint in told if checkpoint.tier not in (c.MEMORY_TIER, c.LOCAL_TIER)]
    newest = max(found, key=lambda item: (item.attempt_id, item.step), default=None)
    return draft if newest == draft.status.last_checkpoint else draft.with_status(last_checkpoint=newest)


def _quarantined(draft: PlanDraft) -> PlanDraft:
    """Report each corrupt checkpoint once."""
    known = draft.status.quarantined
    for report in draft.seen.reports:
        for item in report.quarantined:
            if item.path not in known:
                known = (*known, item.path)[-c.QUARANTINED_KEPT :]
                told = messages.job.checkpoint_quarantined(item.path, item.reason)
                draft = draft.with_event(JobReason.CHECKPOINT_QUARANTINED, told, warning=True)
    return draft.with_status(quarantined=known)
