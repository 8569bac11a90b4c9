"""Decide the membership, and publish its document when it changes.

The revision increases with every change of the document, including settings, counts and directives.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import MembershipReason, RecoveryAction
from holdfast_operator.api.status import Incident, Member, Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import incidents, oom
from holdfast_operator.decision.membership import rules
from holdfast_operator.decision.membership.candidates import (
    NO_INDEX,
    Candidate,
    MembershipInput,
    MembershipRules,
    Wait,
)
from holdfast_operator.decision.plan import LabelPod, Publish
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.decision.workers.fencing import proved_gone
from holdfast_operator.manifests.common import Manifest, digest
from holdfast_operator.manifests.membership_document import membership_document
from holdfast_operator.views import PodView, ReportedIncident


def apply(draft: PlanDraft) -> PlanDraft:
    """Decide the membership, and serve the document if it changed."""
    before = draft.status.membership
    draft = _decided(draft)
    after = replace(draft.status.membership, drain=_drain(draft), acknowledged=_acknowledged(draft))
    draft = draft.with_status(membership=replace(after, revision=before.revision))
    if after.generation == 0:
        return draft
    return _labelled(_served(draft))


def _decided(draft: PlanDraft) -> PlanDraft:
    verdict = rules.decide(_input(draft), draft.now)
    words = Reason(verdict.reason, verdict.message)
    if isinstance(verdict, Wait):
        quiet = verdict.reason is MembershipReason.UP_TO_DATE
        keep = draft.hold is not None and verdict.reason is not MembershipReason.AWAITING_FENCE
        return draft if quiet or keep else replace(draft, hold=words)
    after = verdict.membership
    if after.generation > draft.status.membership.generation:
        pods = [member.pod for member in after.members]
        told = messages.membership.generation_published(after.generation, verdict.message, pods)
        draft = draft.with_event(MembershipReason.GENERATION_PUBLISHED, told)
    elif verdict.reason is not MembershipReason.UP_TO_DATE and draft.hold is None:
        draft = replace(draft, hold=words)
    return draft.with_status(membership=after)


def _names(draft: PlanDraft) -> dict[str, str]:
    """Return the pods' names with their nodes, for messages, by UID."""
    names = {}
    for worker in draft.status.workers:
        if worker.known:
            where = f" (on {worker.node})" if worker.node else ""
            names[worker.pod_uid] = f"{pod_name(draft.seen.job.name, worker.incarnation)}{where}"
    return names


# A change of only these fields makes no new revision: pods need the durable step only with the next generation.
_UNTOLD = ("revision", "jobKey", "durableStep")


def _served(draft: PlanDraft) -> PlanDraft:
    membership = draft.status.membership
    document = _document(draft)
    name = digest({key: value for key, value in document.items() if key not in _UNTOLD})
    if name != draft.status.document:
        membership = replace(membership, revision=membership.revision + 1)
        draft = draft.with_status(membership=membership, document=name)
        document = {**document, "revision": membership.revision}
    if draft.seen.published != membership.revision:
        draft = draft.with_action(Publish(revision=membership.revision, document=document))
    return draft


def _document(draft: PlanDraft) -> Manifest:
    status, newest = draft.status, draft.status.last_checkpoint
    step = None if newest is None else newest.step
    return membership_document(
        draft.seen.job, draft.spec, status.membership, _restarts(draft), draft.seen.job_key, durable_step=step
    )


def _restarts(draft: PlanDraft) -> dict[str, int]:
    """Count the acknowledged restarts by cause. Launchers add the others themselves."""
    acknowledged = set(draft.status.membership.acknowledged)
    counted = [i for i in draft.status.incidents if i.attempt_id.attempt > 0 and i.action != RecoveryAction.IGNORE]
    pending = [incident.cause for incident in counted if incident.attempt_id not in acknowledged]
    counts = {count.cause: len(count.times) - pending.count(count.cause) for count in draft.status.incidents_by_cause}
    return {cause: max(0, count) for cause, count in counts.items()}


def _acknowledged(draft: PlanDraft) -> tuple[AttemptId, ...]:
    """Return the attempt IDs whose incidents are recorded permanently.

    An incident is recorded permanently when its lost steps are known, when no launcher reports it any more, or after
    ``ACKNOWLEDGE_AFTER``.
    """
    tales = [incident for report in draft.seen.reports for incident in report.incidents]
    told = {tale.attempt_id for tale in tales}
    known = {incident.attempt_id: incident for incident in draft.status.incidents}
    parts = {tale.attempt_id for tale in tales if _counted_with_another(draft, tale) and _over(draft.now, tale)}
    done = {
        attempt_id
        for attempt_id, incident in known.items()
        if attempt_id.attempt > 0 and _closed(draft.now, incident, told)
    }
    forgotten = {attempt_id for attempt_id in told if draft.status.forgot(attempt_id)}
    # An acknowledged incident stays acknowledged, because the counts depend on it. A part of one has no own record.
    oldest = min((attempt_id for attempt_id in known if attempt_id.attempt > 0), default=None)
    before = {
        attempt_id
        for attempt_id in draft.status.membership.acknowledged
        if oldest is not None and attempt_id >= oldest
    }
    return tuple(sorted(done | parts | forgotten | before))


def _counted_with_another(draft: PlanDraft, told: ReportedIncident) -> bool:
    if told.attempt_id in {incident.attempt_id for incident in draft.status.incidents}:
        return False
    return oom.taken_in(draft, told) or incidents.loss_before(draft, told) is not None


def _over(now: datetime, told: ReportedIncident) -> bool:
    return told.resumed is not None or told.detected is None or now - told.detected > c.ACKNOWLEDGE_AFTER


def _closed(now: datetime, incident: Incident, told: set[AttemptId]) -> bool:
    return (
        incident.resumed is not None
        or incident.attempt_id not in told
        or now - incident.detected > c.ACKNOWLEDGE_AFTER
    )


def _drain(draft: PlanDraft) -> tuple[str, ...]:
    """Return the workers that must leave while any generation that may be alive lists them."""
    named = draft.status.membership.named()
    leaving = draft.status.in_phase(Phase.LEAVING)
    return tuple(sorted(worker.pod_uid for worker in leaving if worker.pod_uid in named))


def _labelled(draft: PlanDraft) -> PlanDraft:
    """Set each pod's index label to its index in the generation."""
    places = {member.pod_uid: str(member.index) for member in draft.status.membership.members}
    for worker in draft.status.workers:
        pod = draft.pod(worker)
        if pod is None or pod.absent or pod.terminal:
            continue
        index = places.get(pod.uid, "")
        if index and pod.index_label != index:
            draft = draft.with_action(LabelPod(name=pod.name, uid=pod.uid, index=index))
    return draft


def _input(draft: PlanDraft) -> MembershipInput:
    spec, before = draft.spec, draft.status.membership
    pods = [(worker, draft.pod(worker)) for worker in draft.status.workers]
    wait = timedelta(seconds=spec.shrink_after_seconds)
    return MembershipInput(
        membership=before,
        workers=tuple(_candidate(draft, worker, pod) for worker, pod in pods if pod),
        proved_gone=proved_gone(draft) | frozenset(before.gone),
        rules=MembershipRules(
            replicas=draft.target or spec.replicas,
            min_replicas=spec.min_replicas,
            replica_step=spec.replica_step,
            may_shrink=spec.shrinkable,
            first_wait=max(timedelta(seconds=c.FIRST_ATTEMPT_WAIT_SECONDS), wait),
            shrink_after=wait,
            on_demand=min(spec.scheduling.on_demand, draft.target),
        ),
        publication=f"p{before.generation + 1}-{draft.seen.nonce}",
        job_uid=draft.seen.job.uid,
        stalled_since=draft.status.stalled_since,
        names=_names(draft),
    )


def _candidate(draft: PlanDraft, worker: Worker, pod: PodView) -> Candidate:
    """Return the worker as a candidate. Ready includes a passed preflight (``observed_workers``)."""
    report = draft.seen.report(worker.pod_uid)
    member = Member(
        index=int(pod.index_label) if pod.index_label.isdigit() else NO_INDEX,
        pod=pod.name,
        pod_uid=pod.uid,
        ip=pod.ip,
        store=report.store if report else c.PORT_STORE,
        control=report.control if report else c.PORT_CONTROL,
        node=pod.node,
    )
    launcher = report if report is not None and report.has_launcher else None
    ready = launcher is not None and launcher.ready and launcher.fresh(draft.now)
    ended = worker.phase is Phase.ENDED or pod.absent
    return Candidate(
        member=member,
        on_demand=worker.on_demand,
        ready=ready and worker.ready_at is not None and bool(pod.ip),
        ended=ended,
        leaving=ended or worker.phase is not Phase.WANTED or pod.leaving,
        unplaced=bool(pod.unschedulable) and not pod.bound,
        ready_at=worker.ready_at,
        report=launcher,
    )
