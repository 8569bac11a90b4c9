"""One exhaustion of a container's memory is one incident, however many of its processes the kernel ends.

The kernel ends one process after the other: a rank, the warm process that took its place, the launcher. Launchers
say which end of an attempt is part of which (``partOf``); the end of the container itself is seen here. What others
say of the same attempt, who only miss a peer, never stands against it.

Invariant: only what ended a pod, or what launchers call a part, is counted with an incident of another pair, so what
fills its memory time and again is counted time and again.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import COLLATERAL, Cause
from holdfast_operator.api.status import Incident, Phase, Worker, reason_word, say
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import evidence
from holdfast_operator.decision.failures.record_incident import judged_anew
from holdfast_operator.views import ReportedIncident


def whole(draft: PlanDraft, told: ReportedIncident) -> Incident | None:
    """The incident that this one is counted with."""
    if told.part_of is None or told.part_of >= told.pair:
        return None
    return next((known for known in draft.status.incidents if known.pair == told.part_of), None)


def taken_in(draft: PlanDraft, told: ReportedIncident) -> bool:
    """Whether it needs no record of its own: what it is part of is recorded, or was and is forgotten."""
    if told.part_of is None or told.part_of >= told.pair:
        return False
    return whole(draft, told) is not None or draft.status.forgot(told.part_of)


def informed(
    draft: PlanDraft, known: Incident, told: ReportedIncident, worker: Worker | None
) -> tuple[PlanDraft, Incident]:
    """The incident with what a launcher knows better than those who spoke first."""
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
    """The incident with which launchers count the end of the world that this worker's container ended."""
    tales = (tale for report in draft.seen.reports for tale in report.incidents if tale.pair == worker.pair)
    found = (whole(draft, tale) for tale in tales)
    return next((known for known in found if known is not None), None)


def of_container(draft: PlanDraft, worker: Worker) -> Incident | None:
    """The incident of this pod's memory that its container's end is the last part of, where no launcher says it."""
    killed = worker.cause == Cause.OOM or worker.exit_code == c.EXIT_SIGKILL
    if not killed or worker.phase is not Phase.ENDED:
        return None
    name, since = pod_name(draft.seen.job.name, worker.incarnation), worker.since or draft.now
    for known in reversed(draft.status.incidents):
        ours = known.pod == name and known.cause == Cause.OOM and known.pair.attempt > 0
        if ours and since - known.detected < c.SAME_EXHAUSTION:
            return known
    return None
