"""What users read: the conditions, the reason in ``status.summary``, and the number of workers that train.

Ready: all requested workers train. Restarting: the job recovers from an incident. Degraded: fewer workers train than
requested, checkpoints fail, a rank is slow, or training cannot continue and the message contains the fix. Each pass
adds at most one message, which event and log repeat.
"""

from __future__ import annotations

from holdfast_operator.api import names as c
from holdfast_operator.api.reasons import JobReason, MembershipReason
from holdfast_operator.api.status import MOST_TELLING, ConditionType, Incident, Status
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.lifecycle import suspension
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.reporting.progress import newest_living_report, reports_of_newest_world
from holdfast_operator.decision.reporting.slow_ranks import slow_ranks
from holdfast_operator.decision.set_condition import Reason

RUNNING_PHASES = frozenset({"Running", "Draining"})
# Reasons that need an administrator, or that cost training time. Other waits are part of a normal start.
_DEGRADING = frozenset(
    {MembershipReason.AWAITING_FENCE, MembershipReason.GENERATION_CONFLICT, MembershipReason.FOREIGN_CLAIMS}
)
# By the cause that launchers report. docs/reference/metrics.md describes further fixes.
_FIXES = {
    "Full": "free space on the checkpoint volume",
    "ReadOnly": "make the checkpoint volume writable",
    "Denied": "allow the pods to write to the checkpoint volume",
    "NonFinite": "find the step that made a weight infinite or NaN",
}
_NAMED = 3  # of the slow ranks
_LOOK = "check the checkpoint volume and its server"
# The same for a job whose checkpoints are only in an object store.
_FIXES_OF_STORE = {
    "Full": "free space in the object store, or raise its quota",
    "Denied": "allow the pods to list, read, write and delete objects",
    "Credentials": "renew the credentials in the secret of checkpoint.object",
    "NoBucket": "create the bucket of checkpoint.object.url",
    "Throttled": "set checkpoint.maxBytesPerSecond, or a longer interval between checkpoints",
    "NonFinite": _FIXES["NonFinite"],
}
_LOOK_AT_STORE = "check the object store and the network"


def apply(draft: PlanDraft) -> PlanDraft:
    """Set the conditions from the results of the earlier policies."""
    draft = draft.with_status(observed_generation=draft.seen.job.generation)
    if draft.spec.suspend:
        return suspension.shown(draft)
    training = _training(draft)
    if training is None and _blind(draft):
        # The operator has just started, and the reports may still arrive.
        return draft.requeue_soon()
    draft = _stall(draft, training)
    if training is None and _between_worlds(draft):
        return draft.requeue_in(c.STALL)
    training = training or 0
    restarting = _restarting(draft, training)
    degraded = _degraded(draft, training)
    ready = _ready(draft, training)
    well = Reason(JobReason.NOT_RECOVERING, messages.job.no_recovery())
    settled = _set(draft, ConditionType.RESTARTING, restarting, well)
    well = Reason(JobReason.ALL_WORKERS_TRAINING, messages.job.all_training())
    settled = _set(settled, ConditionType.DEGRADED, degraded, well)
    settled = _set_ready(settled, training, degraded or restarting or ready)
    return _shown(_told(draft, settled), training)


def _stall(draft: PlanDraft, training: int | None) -> PlanDraft:
    """Record since when a job that has trained before does not train."""
    if training is not None or draft.status.membership.active is None:
        return draft.with_status(stalled_since=None)
    return draft.with_status(stalled_since=draft.status.stalled_since or draft.now)


def _between_worlds(draft: PlanDraft) -> bool:
    """Return whether one world ends for the next one as planned. This is short and no failure, so it is not shown."""
    since = draft.status.stalled_since
    planned = _open(draft) is None and draft.status.trouble is None
    return planned and since is not None and draft.now - since < c.STALL and draft.hold is None


def _training(draft: PlanDraft) -> int | None:
    """Return the size of the running world; None if no launcher reports one."""
    best = newest_living_report(draft)
    if best is None or best.world is None or best.phase not in RUNNING_PHASES:
        return None
    return len(best.world.members)


def _blind(draft: PlanDraft) -> bool:
    heard = any(report.fresh(draft.now) for report in draft.seen.reports)
    return not heard and not draft.seen.warmed_up(draft.now) and draft.status.membership.active is not None


def _ready(draft: PlanDraft, training: int) -> Reason:
    wanted = draft.spec.replicas
    if training:
        told = messages.job.training(training, wanted, launched=draft.spec.launched)
        return Reason(JobReason.TRAINING, _with_shared_tier(draft, told + _standing_by(draft)))
    if draft.hold is not None:
        return draft.hold
    phases = sorted({f"{report.phase}: {report.message}" for report in draft.seen.reports if report.phase})
    return Reason(JobReason.STARTING, _with_shared_tier(draft, messages.job.starting(phases[:2])))


def _standing_by(draft: PlanDraft) -> str:
    if not draft.spec.spares:
        return ""
    ready = sum(worker.ready_at is not None for worker in draft.spares)
    return f"; {messages.job.spares_ready(ready, draft.spec.spares)}"


def _with_shared_tier(draft: PlanDraft, message: str) -> str:
    """Return the message; of a job without a place for checkpoints, it reports this too."""
    if draft.spec.checkpoint.has_shared_tier or not draft.spec.launched:
        return message
    return f"{message}; {messages.job.no_shared_tier()}"


def _restarting(draft: PlanDraft, training: int) -> Reason | None:
    open_incident = _open(draft)
    if open_incident is None:
        lost = draft.status.membership.active is not None and not training
        waits = draft.hold.message if draft.hold else messages.job.recovering()
        return Reason(JobReason.RECOVERING, waits) if lost else None
    waits = f"; {draft.hold.message}" if draft.hold and not training else ""
    decided = f"; {open_incident.why}" if open_incident.why else ""
    message = f"{open_incident.cause}: {open_incident.message}{decided}{waits}"
    return Reason(open_incident.reason, message)


def _open(draft: PlanDraft) -> Incident | None:
    """Return the newest incident, unless training resumed after it."""
    newest = draft.status.incidents[-1] if draft.status.incidents else None
    return newest if newest is not None and newest.resumed is None else None


def _degraded(draft: PlanDraft, training: int) -> Reason | None:
    trouble = draft.status.trouble
    if trouble is not None:
        return Reason(trouble.reason, trouble.message)
    if draft.hold is not None and draft.hold.reason in _DEGRADING:
        return draft.hold
    if training and (unsaved := _unsaved(draft)) is not None:
        return unsaved
    if 0 < training < draft.spec.replicas:
        waits = f"; {draft.hold.message}" if draft.hold else ""
        told = messages.job.fewer_training(training, draft.spec.replicas, launched=draft.spec.launched)
        return Reason(JobReason.RUNNING_WITH_FEWER_WORKERS, told + waits)
    return _slow(draft) if training else None


def _slow(draft: PlanDraft) -> Reason | None:
    slow = slow_ranks(draft)
    named = [
        messages.job.slow_rank(
            one.rank,
            f"{one.pod} on {one.node}",
            seconds=one.seconds,
            median=one.median_seconds,
            activity=one.activity,
        )
        for one in slow[:_NAMED]
    ]
    return Reason(JobReason.SLOW_RANKS, messages.job.slow_ranks(named, len(slow) - len(named))) if slow else None


def _unsaved(draft: PlanDraft) -> Reason | None:
    """Return the report of failing checkpoints that lasts longest, as a replacement has seen fewer failures."""
    reports = reports_of_newest_world(draft)
    told = [(report.unsaved, report.pod_uid) for report in reports if report.unsaved is not None]
    if not told:
        return None
    unsaved, _ = min(told, key=lambda entry: (entry[0].since, entry[1]))
    last, since = draft.status.last_checkpoint, f"{unsaved.since:%Y-%m-%dT%H:%M:%SZ}"
    fix = _fix(draft, unsaved.cause)
    message = messages.checkpoints.checkpoints_failing(
        since, unsaved.cause, unsaved.message, last.step if last else 0, fix
    )
    return Reason(JobReason.CHECKPOINTS_FAILING, message)


def _fix(draft: PlanDraft, cause: str) -> str:
    if draft.spec.checkpoint.shared_store is not None:
        return _FIXES_OF_STORE.get(cause, _LOOK_AT_STORE)
    return _FIXES.get(cause, _LOOK)


def _set(draft: PlanDraft, kind: ConditionType, words: Reason | None, otherwise: Reason) -> PlanDraft:
    return draft.with_condition(kind, words is not None, words or otherwise)


def _set_ready(draft: PlanDraft, training: int, words: Reason) -> PlanDraft:
    holds = training >= draft.spec.replicas
    return draft.with_condition(ConditionType.READY, holds, _ready(draft, training) if holds else words)


def _shown(draft: PlanDraft, training: int) -> PlanDraft:
    """Set the summary to the reason of the most important condition."""
    needs_help = draft.status.trouble is not None or (draft.hold is not None and draft.hold.reason in _DEGRADING)
    kinds = (ConditionType.DEGRADED, ConditionType.RESTARTING)
    shown = draft.status.first_true(*(kinds if needs_help else reversed(kinds)))
    shown = shown or draft.status.condition(ConditionType.READY)
    return _summed_up(draft, shown.reason if shown else "", training)


def _summed_up(draft: PlanDraft, reason: str, training: int) -> PlanDraft:
    return draft.with_status(summary=reason, wanted_workers=draft.spec.replicas, ready_workers=training)


def _told(before: PlanDraft, after: PlanDraft) -> PlanDraft:
    """Add an event for each condition that changed, or that is true for another reason."""
    for kind in (ConditionType.READY, ConditionType.RESTARTING, ConditionType.DEGRADED):
        old, new = before.status.condition(kind), after.status.condition(kind)
        if new is None or (not new.status and kind != ConditionType.READY):
            continue
        if old is None or (old.status, old.reason) != (new.status, new.reason):
            already = any(event.reason == new.reason for event in after.events)
            if not already:
                after = after.with_event(new.reason, new.message, warning=kind == ConditionType.DEGRADED)
    return after


def summary(status: Status) -> Reason:
    """Return the reason and message that summarise the status."""
    told = status.first_true(*MOST_TELLING) or status.condition(ConditionType.READY)
    return Reason(told.reason, told.message) if told else Reason(JobReason.NEW, "")
