"""One exhaustion of a container's memory is one incident, however many of its processes the kernel ends.

The kernel ends one process after the other: a rank, the warm process that replaced it, the launcher. A launcher
reports in ``partOf`` that the end of an attempt belongs to an earlier one. The operator observes the end of the
container. A report that only misses a peer in the same attempt never overrides the cause OOM.

Invariant: an exit is counted with another attempt's incident only if it ended a pod or a launcher reports it as a
part. A container that runs out of memory repeatedly is therefore counted each time.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import COLLATERAL, Cause, RecoveryAction
from holdfast_operator.api.status import Incident, Phase, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import evidence
from holdfast_operator.decision.failures.record_incident import judged_anew
from holdfast_operator.views import ReportedIncident


def whole(draft: PlanDraft, told: ReportedIncident) -> Incident | None:
    """Return the recorded incident that the reported one is a part of."""
    if told.part_of is None or told.part_of >= told.attempt_id:
        return None
    return next((known for known in draft.status.incidents if known.attempt_id == told.part_of), None)


def taken_in(draft: PlanDraft, told: ReportedIncident) -> bool:
    """Return whether the reported incident needs no record: the one that includes it is recorded or has expired."""
    if told.part_of is None or told.part_of >= told.attempt_id:
        return False
    return whole(draft, told) is not None or draft.status.forgot(told.part_of)


def informed(
    draft: PlanDraft, known: Incident, told: ReportedIncident, worker: Worker | None
) -> tuple[PlanDraft, Incident]:
    """Return the incident with the cause that a launcher reports, if only lost peers were reported before."""
    blind = known.reason in COLLATERAL and known.cause == Cause.INFRASTRUCTURE
    if not blind or told.cause != Cause.OOM:
        return draft, known
    changed = replace(
        known,
        cause=told.cause,
        reason=reason_word(told.reason),
        message=say(told.message),
        pod=told.pod,
        rank=told.rank,
        node=told.node,
    )
    return judged_anew(draft, known, changed, evidence.of_incident(draft, worker, told, known.detected), worker)


def told_of(draft: PlanDraft, worker: Worker) -> Incident | None:
    """Return the incident that includes the end of this worker's attempt, as launchers report it."""
    tales = (
        tale for report in draft.seen.reports for tale in report.incidents if tale.attempt_id == worker.attempt_id
    )
    found = (whole(draft, tale) for tale in tales)
    return next((known for known in found if known is not None), None)


def of_container(draft: PlanDraft, worker: Worker) -> Incident | None:
    """Return the OOM incident of this pod that the exit of its container belongs to, where no launcher reports it."""
    killed = worker.cause == Cause.OOM or worker.exit_code == c.EXIT_SIGKILL
    if not killed or worker.phase is not Phase.ENDED:
        return None
    name, since = pod_name(draft.seen.job.name, worker.incarnation), worker.since or draft.now
    for known in reversed(draft.status.incidents):
        ours = known.pod == name and known.cause == Cause.OOM and known.attempt_id.attempt > 0
        if ours and known.action != RecoveryAction.IGNORE and since - known.detected < c.SAME_EXHAUSTION:
            return known
    return None
