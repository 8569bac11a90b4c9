"""Workers that rendezvous without Holdfast's launcher (``rendezvous.backend``).

With C10d, one worker's ``torchrun`` hosts the store by which all find each other. If that worker is lost, the others
cannot continue and no newcomer finds them, so all leave and start again with another host. Only the store keeps two
worlds of a job apart. New workers are therefore created only after the old host is proved gone.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import MembershipReason, WaitReason, WorkerReason
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.set_condition import Reason
from holdfast_operator.decision.workers.replicas import order_away


def apply(draft: PlanDraft) -> PlanDraft:
    """Order workers away whose host is lost. A host that returns is replaced as well."""
    if draft.spec.rendezvous != c.C10D:
        return draft
    wanted = draft.status.in_phase(Phase.WANTED)
    host = host_of(wanted)
    for worker in wanted:
        if worker.host is not None and worker.host != host:
            draft = order_away(draft, worker, WorkerReason.RENDEZVOUS_HOST_LOST, _left_behind(draft, worker.host))
    return draft


def _left_behind(draft: PlanDraft, host: int) -> str:
    name = pod_name(draft.seen.job.name, host)
    return messages.workers.rendezvous_host_lost(name)


def waits(draft: PlanDraft) -> PlanDraft | None:
    """Return the draft with what must happen before pods are created; None: nothing."""
    if draft.spec.rendezvous != c.C10D:
        return None
    if not draft.seen.rendezvous_ip:
        words = Reason(WaitReason.WAITING_FOR_SERVICE, messages.workers.waiting_for_service())
        return replace(draft, hold=words).requeue_in(c.POLL_OPEN)
    before = _earlier_host(draft)
    if before is None:
        return None
    message = messages.workers.waiting_for_rendezvous_host(
        pod_name(draft.seen.job.name, before.incarnation), before.node
    )
    reason = MembershipReason.AWAITING_FENCE if before.phase is Phase.LOST else MembershipReason.WAITING_FOR_WORKERS
    return draft.waiting_for(reason, message).requeue_soon()


def _earlier_host(draft: PlanDraft) -> Worker | None:
    """Return a host whose pod may still exist. Its world ends with it."""
    present = host_of(draft.status.in_phase(Phase.WANTED))
    going = draft.status.in_phase(Phase.LEAVING, Phase.LOST)
    return next((worker for worker in going if worker.known and worker.hosts and worker.host != present), None)


def host_of(workers: tuple[Worker, ...]) -> int | None:
    """Return the incarnation of the newest host; older ones were given up before it was created."""
    return max((worker.incarnation for worker in workers if worker.hosts), default=None)
