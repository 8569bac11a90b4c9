"""``decide(observed, now) -> Plan``: pure, total, the same answer for the same input.

The policies are tried in this order; each returns a changed draft of the plan, and one that ends the draft is the
last. A crash between any two actions of a plan loses nothing: the next pass sees what is missing and plans it again.

Invariants, asserted on every plan: a terminal condition stays; the counter of incarnations, the generation and its
active pair never fall; no incarnation is listed twice; no incident is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from holdfast_operator import constants as c
from holdfast_operator.actions import ApplyChildren, Plan
from holdfast_operator.api import Pair
from holdfast_operator.manifests import children, children_digest
from holdfast_operator.policies import (
    avoid,
    budget,
    completion,
    conditions,
    deadline,
    disposal,
    fence,
    gang,
    goodput,
    growth,
    incidents,
    interruption,
    loss,
    origin,
    preflight,
    progress,
    publication,
    relabelled,
    rendezvous,
    replicas,
    restart,
    roster,
    suspension,
    symptoms,
    template,
    terminal,
    unreadable,
)
from holdfast_operator.policies.draft import Draft
from holdfast_operator.seen import Observed
from holdfast_operator.status import Phase, Status

Policy = Callable[[Draft], Draft]

_ZERO = Pair(generation=0, attempt=0)


def _children(draft: Draft) -> Draft:
    """NetworkPolicy, Service, ConfigMap and PodDisruptionBudget, once for each content of theirs."""
    host = rendezvous.host_of(draft.status.in_phase(Phase.WANTED))
    name = children_digest(draft.seen.job, draft.seen.platform, host)
    lacks_address = host is not None and not draft.seen.rendezvous_ip  # which nothing but the apply's answer tells
    if draft.seen.applied == name and not lacks_address:
        # Only what was done is written: applied after the status, it might not have been.
        return draft.but(applied=name)
    manifests = children(draft.seen.job, draft.seen.platform, host)
    return draft.act(ApplyChildren(manifests=manifests, digest=name))


POLICIES: tuple[Policy, ...] = (
    unreadable.apply,
    terminal.apply,
    roster.apply,
    relabelled.apply,
    completion.apply,
    deadline.apply,
    avoid.apply,
    loss.apply,
    interruption.apply,
    fence.apply,
    incidents.apply,
    symptoms.apply,
    preflight.apply,
    template.pause,
    restart.apply,
    budget.apply,
    suspension.apply,
    gang.time_out,
    growth.apply,
    rendezvous.apply,
    replicas.apply,
    _children,
    template.apply,
    gang.apply,
    publication.apply,
    progress.apply,
    goodput.apply,
    origin.apply,
    disposal.apply,
    conditions.apply,
)


def decide(seen: Observed, now: datetime) -> Plan:
    """What to write, then to do, about one job."""
    draft = Draft(seen=seen, now=now, status=seen.status)
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


def _look_again(draft: Draft) -> Draft:
    """Reports wake nobody, so what trains or starts is looked at; what is suspended changes by events only."""
    if draft.status.holds(c.SUSPENDED):
        return draft
    return draft.look_again()


def _plan(draft: Draft) -> Plan:
    words = conditions.summary(draft.status)
    return Plan(
        status=draft.status,
        actions=draft.actions,
        events=draft.events,
        counted=draft.counted,
        decided=draft.decided,
        recovered=draft.recovered,
        reason=words.reason,
        message=words.message,
        requeue_after=draft.wake.total_seconds() if draft.wake is not None else None,
        decided_at=draft.now,
    )


def check_invariants(before: Status, after: Status) -> None:
    """What no plan may break."""
    if before.terminal and not (before.holds(c.COMPLETE), before.holds(c.FAILED)) == (
        after.holds(c.COMPLETE),
        after.holds(c.FAILED),
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
    pairs = [incident.pair for incident in after.incidents if incident.pair.attempt > 0]
    if len(set(pairs)) != len(pairs):
        raise AssertionError(f"an incident is recorded twice: {pairs}")
