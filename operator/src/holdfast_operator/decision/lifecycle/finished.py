"""Complete and Failed are final: the operator only removes what still runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_operator.api import names as c
from holdfast_operator.api.status import ConditionType
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.plan import DeleteJob, DeletePod
from holdfast_operator.decision.reporting import goodput
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.views import PodView

SIDE_CONTAINER = "its trainer has ended, and another container of the template still runs"


def apply(draft: PlanDraft) -> PlanDraft:
    """End the pass of a job that has ended. Ended pods stay, for their logs, until the job is deleted."""
    if not draft.status.terminal:
        return draft
    complete = draft.status.holds(ConditionType.COMPLETE)
    since = draft.status.completion_time or draft.now
    grace = c.COMPLETE_GRACE if complete else timedelta(0)
    why = "the job is complete" if complete else "the job failed"
    named = draft.status.membership.named()
    left = [pod for pod in draft.seen.pods if _runs(pod)]
    # Launchers that trained exit by themselves. A spare does not detect the end.
    spare = [pod for pod in left if complete and pod.uid not in named]
    draft = draft.with_action(*(DeletePod(name=pod.name, uid=pod.uid, why=why) for pod in spare))
    left = [pod for pod in left if pod not in spare]
    draft = _outlasted(draft, since)
    if left and draft.now < since + grace:
        return replace(draft, ended=True).requeue_at(since + grace)
    draft = draft.with_action(*(DeletePod(name=pod.name, uid=pod.uid, why=why) for pod in left))
    return replace(_deleted(draft, since), ended=True)


def _outlasted(draft: PlanDraft, since: datetime) -> PlanDraft:
    """Delete pods in which another container still runs after the trainer has exited."""
    pods = [pod for pod in draft.seen.pods if pod.outlasted]
    due = since + c.SIDE_CONTAINER_GRACE
    if pods and draft.now < due:
        return draft.requeue_at(due)
    return draft.with_action(*(DeletePod(name=pod.name, uid=pod.uid, why=SIDE_CONTAINER) for pod in pods))


def _deleted(draft: PlanDraft, since: datetime) -> PlanDraft:
    """Delete the job after its TTL, once no pod runs. Pods on lost nodes do not delay this."""
    ttl = draft.spec.ttl_seconds
    if ttl is None:
        return draft
    here = (pod for pod in draft.seen.pods if not pod.absent and not pod.terminal)
    ends = ((pod.deleted_at or draft.now) + c.GONE_MARGIN for pod in here)
    due = max([since + timedelta(seconds=ttl), *ends])
    if draft.now < due:
        return draft.requeue_at(due)
    return draft.with_action(DeleteJob(uid=draft.seen.job.uid, why=f"it ended {ttl} s ago (ttlSecondsAfterFinished)"))


def _runs(pod: PodView) -> bool:
    return not pod.absent and not pod.terminal and pod.deleted_at is None


def finish(draft: PlanDraft, kind: ConditionType, reason: str, message: str) -> PlanDraft:
    """Complete or fail the job in this pass."""
    draft = goodput.settled(draft)
    words = Reason(reason, message)
    suspended = (ConditionType.SUSPENDED,) if draft.status.condition(ConditionType.SUSPENDED) else ()
    for each in (*suspended, ConditionType.READY, ConditionType.RESTARTING, ConditionType.DEGRADED, kind):
        draft = draft.with_condition(each, each is kind, words)
    settled = draft.status.condition(kind)
    word = settled.reason if settled else reason
    draft = draft.with_status(
        summary=word,
        ready_workers=0,
        wanted_workers=draft.spec.replicas,
        stalled_since=None,
        completion_time=draft.now,
        observed_generation=draft.seen.job.generation,
        trouble=None,
        backoff_until=None,
    )
    draft = replace(draft, ended=True).with_event(word, message, warning=kind is ConditionType.FAILED)
    return draft.requeue_in(timedelta(seconds=1))
