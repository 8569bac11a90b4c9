"""The membership and the document that tells it: what ``membership`` decides, in the words of status and contract.

The revision rises with every change of the document, also of settings, counts and directives.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api import status as st
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import MembershipReason, RecoveryAction
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import incidents, oom
from holdfast_operator.decision.membership import rules
from holdfast_operator.decision.plan import LabelPod, Publish
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.decision.workers.fencing import proved_gone
from holdfast_operator.manifests.common import Manifest, digest
from holdfast_operator.manifests.membership_document import membership_document
from holdfast_operator.views import PodView, Report, ReportedIncident


def apply(draft: PlanDraft) -> PlanDraft:
    """Decide the membership, then serve whatever of the document is new."""
    before = draft.status.membership
    draft = _decided(draft, before)
    after = replace(draft.status.membership, drain=_drain(draft), acknowledged=_acknowledged(draft))
    draft = draft.with_status(membership=replace(after, revision=before.revision))
    if after.generation == 0:
        return draft
    return _labelled(_served(draft))


def _decided(draft: PlanDraft, before: st.Membership) -> PlanDraft:
    verdict = rules.decide(_observed(draft, before), draft.now.timestamp())
    if isinstance(verdict, rules.Hold):
        quiet = verdict.reason is MembershipReason.UP_TO_DATE
        keep = draft.hold is not None and verdict.reason is not MembershipReason.AWAITING_FENCE
        words = draft.hold if quiet or keep else Reason(reason=verdict.reason, message=verdict.message)
        return replace(draft, hold=words)
    after = _back(verdict.membership, before)
    if after.generation > before.generation:
        pods = [member.pod for member in after.members]
        told = messages.generation_published(after.generation, verdict.message, pods)
        draft = draft.with_event(MembershipReason.GENERATION_PUBLISHED, told)
    elif verdict.reason not in (MembershipReason.UP_TO_DATE, MembershipReason.RECORDED) and draft.hold is None:
        draft = replace(draft, hold=Reason(reason=verdict.reason, message=verdict.message))
    return draft.with_status(membership=after)


def _names(draft: PlanDraft) -> dict[str, str]:
    """Pods with their nodes, for messages: UIDs say nothing to people."""
    names = {}
    for worker in draft.status.workers:
        if worker.known:
            where = f" (on {worker.node})" if worker.node else ""
            names[worker.pod_uid] = f"{pod_name(draft.seen.job.name, worker.incarnation)}{where}"
    return names


# What alone makes no revision: pods need no word of each checkpoint, only the newest at the next generation.
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
    """Those acknowledged: launchers add the others themselves."""
    acknowledged = set(draft.status.membership.acknowledged)
    counted = [i for i in draft.status.incidents if i.pair.attempt > 0 and i.action != RecoveryAction.IGNORE]
    pending = [incident.cause for incident in counted if incident.pair not in acknowledged]
    counts = {count.cause: len(count.times) - pending.count(count.cause) for count in draft.status.restarts}
    return {cause: max(0, count) for cause, count in counts.items()}


def _acknowledged(draft: PlanDraft) -> tuple[AttemptId, ...]:
    """Recorded for good: with the steps lost, or no longer told, or told so long that nothing more will come."""
    tales = [incident for report in draft.seen.reports for incident in report.incidents]
    told = {tale.pair for tale in tales}
    known = {incident.pair: incident for incident in draft.status.incidents}
    parts = {tale.pair for tale in tales if _counted_with_another(draft, tale) and _over(draft.now, tale)}
    done = {pair for pair, incident in known.items() if pair.attempt > 0 and _closed(draft.now, incident, told)}
    forgotten = {pair for pair in told if draft.status.forgot(pair)}
    # What was acknowledged stays so: it was counted on that. Parts of an incident have no record of their own.
    oldest = min((pair for pair in known if pair.attempt > 0), default=None)
    before = {pair for pair in draft.status.membership.acknowledged if oldest is not None and pair >= oldest}
    return tuple(sorted(done | parts | forgotten | before))


def _counted_with_another(draft: PlanDraft, told: ReportedIncident) -> bool:
    if told.pair in {incident.pair for incident in draft.status.incidents}:
        return False
    return oom.taken_in(draft, told) or incidents.loss_before(draft, told) is not None


def _over(now: datetime, told: ReportedIncident) -> bool:
    return told.resumed is not None or told.detected is None or now - told.detected > c.ACKNOWLEDGE_AFTER


def _closed(now: datetime, incident: st.Incident, told: set[AttemptId]) -> bool:
    return incident.resumed is not None or incident.pair not in told or now - incident.detected > c.ACKNOWLEDGE_AFTER


def _drain(draft: PlanDraft) -> tuple[str, ...]:
    """Those who must leave, as long as a generation that may live lists them: also when the newest omits them."""
    named = draft.status.membership.named()
    leaving = draft.status.in_phase(st.Phase.LEAVING)
    return tuple(sorted(worker.pod_uid for worker in leaving if worker.pod_uid in named))


def _labelled(draft: PlanDraft) -> PlanDraft:
    """The index on the pod follows the generation."""
    places = {member.pod_uid: str(member.index) for member in draft.status.membership.members}
    for worker in draft.status.workers:
        pod = draft.pod(worker)
        if pod is None or pod.absent or pod.terminal:
            continue
        index = places.get(pod.uid, "")
        if index and pod.index_label != index:
            draft = draft.with_action(LabelPod(name=pod.name, uid=pod.uid, index=index))
    return draft


# To and from the words of ``membership``


def _observed(draft: PlanDraft, before: st.Membership) -> rules.Observed:
    spec = draft.spec
    return rules.Observed(
        membership=_there(before),
        workers=tuple(_worker(draft, worker, pod) for worker in draft.status.workers if (pod := draft.pod(worker))),
        proved_gone=proved_gone(draft) | frozenset(before.gone),
        rules=rules.MembershipRules(
            replicas=draft.target or spec.replicas,
            min_replicas=spec.min_replicas,
            replica_step=spec.replica_step,
            may_shrink=spec.shrinkable,
            first_wait=max(c.FIRST_ATTEMPT_WAIT_SECONDS, float(spec.shrink_after_seconds)),
            shrink_after=float(spec.shrink_after_seconds),
            on_demand=min(spec.scheduling.on_demand, draft.target),
        ),
        publication=f"p{before.generation + 1}-{draft.seen.nonce}",
        job_uid=draft.seen.job.uid,
        stalled_since=draft.status.stalled_since.timestamp() if draft.status.stalled_since else None,
        names=_names(draft),
    )


def _worker(draft: PlanDraft, worker: st.Worker, pod: PodView) -> rules.Worker:
    report = draft.seen.report(worker.pod_uid)
    return rules.Worker(
        pod_uid=pod.uid,
        pod=pod.name,
        ip=pod.ip,
        node=pod.node,
        store_port=report.store if report else c.PORT_STORE,
        control_port=report.control if report else c.PORT_CONTROL,
        index=int(pod.index_label) if pod.index_label.isdigit() else None,
        on_demand=worker.on_demand,
        terminal=worker.phase is st.Phase.ENDED or pod.absent,
        leaving=worker.phase is not st.Phase.WANTED or pod.leaving,
        unplaced=bool(pod.unschedulable) and not pod.bound,
        ready_since=worker.ready_at.timestamp() if worker.ready_at else None,
        report=_report(draft, report, worker, pod) if report is not None and report.has_launcher else None,
    )


def _report(draft: PlanDraft, report: Report, worker: st.Worker, pod: PodView) -> rules.Report:
    """Ready includes a passed preflight; a preflight stays passed (``observed_workers``)."""
    world = report.world
    own = _claim(report.highest_claim) if report.highest_claim else None
    return rules.Report(
        ready=report.ready and worker.ready_at is not None and bool(pod.ip),
        fresh=report.fresh(draft.now),
        accepted=_pair(report.accepted),
        started=_pair(report.started),
        world=rules.World(
            pair=rules.Pair(world.pair.generation, world.pair.attempt),
            publication=world.publication,
            members=world.members,
        )
        if world
        else None,
        lost=frozenset(report.lost_members),
        conflict=report.conflict,
        highest_claim=own,
        checkpointing=report.checkpointing,
        foreign_claims=tuple(filter(None, map(_claim, report.foreign_claims))),
    )


def _there(before: st.Membership) -> rules.Membership | None:
    if before.generation == 0 and not before.claims:
        return None
    return rules.Membership(
        revision=before.revision,
        generation=before.generation,
        publication=before.publication,
        active=_pair(before.active),
        previous=tuple(
            rules.Previous(
                generation=entry.generation,
                publication=entry.publication,
                members=entry.members,
                through=entry.through,
            )
            for entry in before.previous
        ),
        gone=before.gone,
        claims=tuple(filter(None, map(_claim, before.claims))),
        members=tuple(_member(member) for member in before.members),
    )


def _member(member: st.Member) -> rules.Member:
    return rules.Member(
        index=member.index,
        pod_uid=member.pod_uid,
        pod=member.pod,
        ip=member.ip,
        store_port=member.store,
        control_port=member.control,
        node=member.node,
    )


def _back(after: rules.Membership, before: st.Membership) -> st.Membership:
    return replace(
        before,
        revision=after.revision,
        generation=after.generation,
        publication=after.publication,
        active=AttemptId(generation=after.active.generation, attempt=after.active.attempt) if after.active else None,
        previous=tuple(
            st.EarlierGeneration(
                generation=entry.generation,
                publication=entry.publication,
                members=entry.members,
                through=entry.through,
            )
            for entry in after.previous
        ),
        gone=after.gone,
        claims=tuple(_claim_json(claim) for claim in after.claims),
        members=tuple(
            st.Member(
                index=member.index,
                pod=member.pod,
                pod_uid=member.pod_uid,
                ip=member.ip,
                store=member.store_port,
                control=member.control_port,
                node=member.node,
            )
            for member in after.members
        ),
    )


def _pair(pair: AttemptId | None) -> rules.Pair | None:
    return rules.Pair(pair.generation, pair.attempt) if pair else None


def _claim(value: Json) -> rules.Claim | None:
    pair, from_pair = parse_pair(value), parse_pair(value.get("fromPair"))
    if pair is None:
        return None
    return rules.Claim(
        pair=rules.Pair(pair.generation, pair.attempt),
        job_uid=str(value.get("jobUID") or ""),
        publication=str(value.get("publication") or ""),
        from_step=int(value.get("fromStep") or 0),
        from_pair=_pair(from_pair),
    )


def _claim_json(claim: rules.Claim) -> Manifest:
    from_pair = claim.from_pair
    return {
        "version": c.PROTOCOL_VERSION,
        "jobUID": claim.job_uid,
        "publication": claim.publication,
        "generation": claim.pair.generation,
        "attempt": claim.pair.attempt,
        "fromStep": claim.from_step,
        "fromPair": {"generation": from_pair.generation, "attempt": from_pair.attempt} if from_pair else None,
    }
