"""Decide what one job needs next: ``decide(observed, now) -> Plan``.

The function is pure: the same input gives the same plan. The policies run in the order below. Each policy returns a
changed draft of the plan, and a draft that is ended goes to no further policy. The plan survives a crash between any
two actions: the next pass detects what is missing and plans it again.

Invariants, asserted on every plan:
- A terminal condition stays.
- The counter of incarnations, the generation and its active attempt ID never fall.
- No incarnation and no incident is listed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.status import ConditionType, Phase, Status
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import avoided_nodes, carry_out, incidents, restart_budget, symptoms
from holdfast_operator.decision.lifecycle import (
    active_deadline,
    completion,
    finished,
    startup_problems,
    suspension,
    unreadable_spec,
)
from holdfast_operator.decision.membership import publish
from holdfast_operator.decision.plan import ApplyChildren, Plan
from holdfast_operator.decision.reporting import conditions, divergences, goodput, progress, starting_point
from holdfast_operator.decision.reporting.slow_ranks import slow_ranks
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.decision.workers import (
    cleanup,
    departures,
    fencing,
    gang,
    lost_workers,
    observed_workers,
    preflight,
    relabelled_pods,
    rendezvous,
    replicas,
    scale_up,
)
from holdfast_operator.manifests.children import children, children_digest

Policy = Callable[[PlanDraft], PlanDraft]

_ZERO = AttemptId(generation=0, attempt=0)


def _children(draft: PlanDraft) -> PlanDraft:
    """Apply the NetworkPolicy, Service, ConfigMap and PodDisruptionBudget again when their content changes."""
    host = rendezvous.host_of(draft.status.in_phase(Phase.WANTED))
    name = children_digest(draft.seen.job, draft.seen.platform, host)
    lacks_address = host is not None and not draft.seen.rendezvous_ip  # only the answer to the apply contains it
    if draft.seen.applied == name and not lacks_address:
        # Record only children that were applied: if the status is written first, the apply may still fail.
        return draft.with_status(applied=name)
    manifests = children(draft.seen.job, draft.seen.platform, host)
    return draft.with_action(ApplyChildren(manifests=manifests, digest=name))


POLICIES: tuple[Policy, ...] = (
    unreadable_spec.apply,
    finished.apply,
    observed_workers.apply,
    relabelled_pods.apply,
    completion.apply,
    active_deadline.apply,
    avoided_nodes.apply,
    lost_workers.apply,
    departures.apply,
    fencing.apply,
    incidents.apply,
    divergences.apply,
    symptoms.apply,
    preflight.apply,
    startup_problems.pause,
    carry_out.apply,
    restart_budget.apply,
    suspension.apply,
    gang.time_out,
    scale_up.apply,
    rendezvous.apply,
    replicas.apply,
    _children,
    startup_problems.apply,
    gang.apply,
    publish.apply,
    progress.apply,
    goodput.apply,
    starting_point.apply,
    cleanup.apply,
    conditions.apply,
)


def decide(seen: Observed, now: datetime) -> Plan:
    """Return the status to write and then the actions to perform for one job."""
    draft = PlanDraft(seen=seen, now=now, status=seen.status)
    if seen.job.deleting:
        return _plan(draft)
    for policy in POLICIES:
        draft = policy(draft)
        if draft.ended:
            break
    else:
        draft = _look_again(draft)
    check_invariants(seen.status, draft.status)
    return _plan(draft)


def _look_again(draft: PlanDraft) -> PlanDraft:
    """Requeue a job that trains or starts, as silence triggers no pass. A suspended job changes only by events."""
    if draft.status.holds(ConditionType.SUSPENDED):
        return draft
    return draft.requeue_soon()


def _plan(draft: PlanDraft) -> Plan:
    words = conditions.summary(draft.status)
    return Plan(
        status=draft.status,
        actions=draft.actions,
        events=draft.events,
        counted=draft.counted,
        decided=draft.decided,
        recovered=draft.recovered,
        diverged=draft.diverged,
        slow_ranks=slow_ranks(draft),
        reason=words.reason,
        message=words.message,
        requeue_after=draft.wake.total_seconds() if draft.wake is not None else None,
        decided_at=draft.now,
    )


def check_invariants(before: Status, after: Status) -> None:
    """Raise ``AssertionError`` if a plan breaks an invariant."""
    if before.terminal and not (before.holds(ConditionType.COMPLETE), before.holds(ConditionType.FAILED)) == (
        after.holds(ConditionType.COMPLETE),
        after.holds(ConditionType.FAILED),
    ):
        raise AssertionError("a job that had ended changed its end")
    rose = (
        after.incarnations >= before.incarnations
        and after.membership.generation >= before.membership.generation
        and (after.membership.active or _ZERO) >= (before.membership.active or _ZERO)
        and after.membership.revision >= before.membership.revision
    )
    if not rose:
        raise AssertionError("a counter of the status fell")
    names = [worker.incarnation for worker in after.workers]
    if len(set(names)) != len(names) or any(name >= after.incarnations for name in names):
        raise AssertionError(f"incarnations are not unique and counted: {names} of {after.incarnations}")
    attempt_ids = [incident.attempt_id for incident in after.incidents if incident.attempt_id.attempt > 0]
    if len(set(attempt_ids)) != len(attempt_ids):
        raise AssertionError(f"an incident is recorded twice: {attempt_ids}")
