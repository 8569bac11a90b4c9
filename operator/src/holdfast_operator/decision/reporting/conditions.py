"""What a user reads: conditions, the one word of ``status.status``, the count of workers that train.

Ready: all wanted workers train. Restarting: an incident is being recovered from. Degraded: fewer workers train than
wanted, checkpoints fail, or training cannot go on and the message says what would help. At most one line of words is
made here; the event and the log repeat it.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.status import Incident, Status
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.lifecycle import suspension
from holdfast_operator.decision.reporting.progress import newest_living_report, reports_of_newest_world
from holdfast_operator.decision.set_condition import Reason, set_condition

RUNNING_PHASES = frozenset({"Running", "Draining"})
# Holds that a person must do something about, or that cost training time: the rest is the way a start goes.
_DEGRADING = frozenset({"AwaitingFence", "GenerationConflict", "ForeignClaims"})
# By the cause that launchers give; what else helps is in docs/reference/metrics.md.
_MENDS = {
    "Full": "make room on the checkpoint volume",
    "ReadOnly": "make the checkpoint volume writable",
    "Denied": "allow the pods to write to the checkpoint volume",
    "NonFinite": "look for the step that made a weight infinite or NaN",
}
_LOOK = "look at the checkpoint volume and its server"


def apply(draft: PlanDraft) -> PlanDraft:
    """Set the conditions from what the policies before found."""
    draft = draft.with_status(observed_generation=draft.seen.job.generation)
    if draft.spec.suspend:
        return suspension.shown(draft)
    training = _training(draft)
    if training is None and _blind(draft):
        # Just started: the reports that would tell are on their way.
        return draft.requeue_soon()
    draft = _stall(draft, training)
    if training is None and _between_worlds(draft):
        return draft.requeue_in(c.STALL)
    training = training or 0
    restarting = _restarting(draft, training)
    degraded = _degraded(draft, training)
    ready = _ready(draft, training)
    settled = _set(draft, c.RESTARTING, restarting, Reason(reason="NoIncident", message="nothing is recovered from"))
    settled = _set(settled, c.DEGRADED, degraded, Reason(reason="AsWanted", message="nothing is missing"))
    settled = _set_ready(settled, training, degraded or restarting or ready)
    return _shown(_told(draft, settled), training)


def _stall(draft: PlanDraft, training: int | None) -> PlanDraft:
    """Since when a job that has trained does not."""
    if training is not None or draft.status.membership.active is None:
        return draft.with_status(stalled_since=None)
    return draft.with_status(stalled_since=draft.status.stalled_since or draft.now)


def _between_worlds(draft: PlanDraft) -> bool:
    """A world makes room for the next, as planned: that is over in a moment and no failure to be shown."""
    since = draft.status.stalled_since
    planned = _open(draft) is None and draft.status.trouble is None
    return planned and since is not None and draft.now - since < c.STALL and draft.hold is None


def _training(draft: PlanDraft) -> int | None:
    """Members of the world that runs; None if nobody says."""
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
        do = _verb(draft)
        told = f"{training} of {wanted} workers {do}"
        if training > wanted:
            told = f"{training} workers {do}, {wanted} were asked for"
        return Reason(reason="Training", message=_with_volume(draft, told + _standing_by(draft)))
    if draft.hold is not None:
        return draft.hold
    phases = sorted({f"{report.phase}: {report.message}" for report in draft.seen.reports if report.phase})
    told = f"; launchers say {'; '.join(phases[:2])}" if phases else ""
    return Reason(reason="Starting", message=_with_volume(draft, f"the workers start{told}"))


def _standing_by(draft: PlanDraft) -> str:
    if not draft.spec.spares:
        return ""
    ready = sum(worker.ready_at is not None for worker in draft.spares)
    return f"; {ready} of {draft.spec.spares} spares stand by"


def _verb(draft: PlanDraft) -> str:
    """Whether they train is known from Holdfast's launchers only."""
    return "train" if draft.spec.launched else "run"


def _with_volume(draft: PlanDraft, message: str) -> str:
    if draft.spec.checkpoint.claim_name or not draft.spec.launched:
        return message
    return f"{message}; there is no checkpoint.volume, so no checkpoint outlives the pods"


def _restarting(draft: PlanDraft, training: int) -> Reason | None:
    open_incident = _open(draft)
    if open_incident is None:
        lost = draft.status.membership.active is not None and not training
        waits = draft.hold.message if draft.hold else "the workers form the next world"
        return Reason(reason="Recovering", message=waits) if lost else None
    waits = f"; {draft.hold.message}" if draft.hold and not training else ""
    decided = f"; {open_incident.why}" if open_incident.why else ""
    message = f"{open_incident.cause}: {open_incident.message}{decided}{waits}"
    return Reason(reason=open_incident.reason, message=message)


def _open(draft: PlanDraft) -> Incident | None:
    """The newest incident, unless training went on after it."""
    newest = draft.status.incidents[-1] if draft.status.incidents else None
    return newest if newest is not None and newest.resumed is None else None


def _degraded(draft: PlanDraft, training: int) -> Reason | None:
    trouble = draft.status.trouble
    if trouble is not None:
        return Reason(reason=trouble.reason, message=trouble.message)
    if draft.hold is not None and draft.hold.reason in _DEGRADING:
        return draft.hold
    if training and (unsaved := _unsaved(draft)) is not None:
        return unsaved
    if 0 < training < draft.spec.replicas:
        waits = f"; {draft.hold.message}" if draft.hold else ""
        told = f"{training} of {draft.spec.replicas} workers {_verb(draft)}, the others are being replaced"
        return Reason(reason="Shrunk", message=told + waits)
    return None


def _unsaved(draft: PlanDraft) -> Reason | None:
    """By the launcher that says so for longest: one in a lost worker's place has seen no checkpoint fail yet."""
    reports = reports_of_newest_world(draft)
    told = [(report.unsaved, report.pod_uid) for report in reports if report.unsaved is not None]
    if not told:
        return None
    unsaved, _ = min(told, key=lambda pair: (pair[0].since, pair[1]))
    last, since = draft.status.last_checkpoint, f"{unsaved.since:%Y-%m-%dT%H:%M:%SZ}"
    message = (
        f"no checkpoint could be written since {since} ({unsaved.cause}): {unsaved.message}; training continues, but "
        f"resumes from step {last.step if last else 0} if all workers are lost: {_MENDS.get(unsaved.cause, _LOOK)}"
    )
    return Reason(reason="CheckpointsFailing", message=message)


def _set(draft: PlanDraft, kind: str, words: Reason | None, otherwise: Reason) -> PlanDraft:
    shown = words or otherwise
    generation = draft.seen.job.generation
    status = set_condition(draft.status, kind, words is not None, shown, generation=generation, now=draft.now)
    return replace(draft, status=status)


def _set_ready(draft: PlanDraft, training: int, words: Reason) -> PlanDraft:
    holds = training >= draft.spec.replicas
    if holds:
        words = _ready(draft, training)
    generation = draft.seen.job.generation
    status = set_condition(draft.status, c.READY, holds, words, generation=generation, now=draft.now)
    return replace(draft, status=status)


def _shown(draft: PlanDraft, training: int) -> PlanDraft:
    """The reason of the condition that says most."""
    needs_help = draft.status.trouble is not None or (draft.hold is not None and draft.hold.reason in _DEGRADING)
    for kind in (c.DEGRADED, c.RESTARTING) if needs_help else (c.RESTARTING, c.DEGRADED):
        condition = draft.status.condition(kind)
        if condition is not None and condition.status:
            return draft.with_status(status=condition.reason, ready=_count(draft, training))
    ready = draft.status.condition(c.READY)
    return draft.with_status(status=ready.reason if ready else "", ready=_count(draft, training))


def _count(draft: PlanDraft, training: int) -> str:
    return f"{training}/{draft.spec.replicas}"


def _told(before: PlanDraft, after: PlanDraft) -> PlanDraft:
    """An event for each condition that turned, or is true for another reason."""
    for kind in (c.READY, c.RESTARTING, c.DEGRADED):
        old, new = before.status.condition(kind), after.status.condition(kind)
        if new is None or (not new.status and kind != c.READY):
            continue
        if old is None or (old.status, old.reason) != (new.status, new.reason):
            already = any(event.reason == new.reason for event in after.events)
            if not already:
                after = after.with_event(new.reason, new.message, warning=kind == c.DEGRADED)
    return after


def summary(status: Status) -> Reason:
    """The line that stands for the whole status."""
    for kind in (c.FAILED, c.COMPLETE, c.SUSPENDED, c.RESTARTING, c.DEGRADED):
        condition = status.condition(kind)
        if condition is not None and condition.status:
            return Reason(reason=condition.reason, message=condition.message)
    ready = status.condition(c.READY)
    return Reason(reason=ready.reason, message=ready.message) if ready else Reason(reason="New", message="")
