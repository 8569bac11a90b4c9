"""Keep the number of wanted workers at the replicas plus spares.

Each missing worker gets a new incarnation; each surplus worker is ordered to leave. Names come from a counter in the
status and are never used twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import Cause, MembershipReason, RecoveryAction, WaitReason
from holdfast_operator.api.status import Phase, Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.backoff import start_retry
from holdfast_operator.decision.reporting import messages

_NO_PLACE = 1 << 30


def apply(draft: PlanDraft) -> PlanDraft:
    """Add workers to the roster, or order some of them to leave."""
    draft = _filled(draft)
    return draft.with_status(replicas=len(draft.needed))


def _filled(draft: PlanDraft) -> PlanDraft:
    surplus = len(draft.status.in_phase(Phase.WANTED)) + len(draft.finished) - _total(draft)
    waited_for = _waited_for(draft)
    missing = max(0, -surplus - len(waited_for))
    draft = _held_back(draft, missing)
    if surplus > 0 or len(_holders(draft)) > draft.target:
        return _fewer(draft, surplus)
    if surplus and not missing:
        return _waits(draft, waited_for[:-surplus])
    missing -= draft.status.held_back
    return _more(draft, missing) if missing else draft


def _held_back(draft: PlanDraft, missing: int) -> PlanDraft:
    """Limit the backoff to replacements of workers that may fail again at once. Others, and growth, do not wait."""
    until = draft.status.backoff_until
    if until is None or draft.now >= until:
        return draft.with_status(backoff_until=None, held_back=0)
    wanted = {worker.incarnation for worker in draft.seen.status.in_phase(Phase.WANTED)}
    gone = [w for w in draft.status.workers if w.phase is not Phase.WANTED and w.incarnation in wanted]
    together = any(worker.removal is RecoveryAction.RESTART_GANG for worker in gone)
    failed = len(gone) if together else sum(map(_failed, gone))
    held = min(missing, draft.status.held_back + failed)
    draft = draft.with_status(held_back=held)
    return draft.requeue_at(until) if held else draft


def _failed(worker: Worker) -> bool:
    """Return whether the worker failed by itself, or is recreated by a decision."""
    if worker.ordered:
        return worker.removal is not None
    at_startup = worker.cause == Cause.INFRASTRUCTURE and worker.attempt_id is None
    return at_startup or worker.cause not in (Cause.INTERRUPTION, Cause.INFRASTRUCTURE)


def _total(draft: PlanDraft) -> int:
    """Return the number of workers and spares to request. Spares come last, and not at once after one failed."""
    there = draft.status.in_phase(Phase.WANTED)
    most = draft.target + (draft.spec.spares if draft.target else 0)
    placed = sum(bool(worker.node) and not worker.gated for worker in there)
    if placed < draft.target or _spare_failed(draft):
        return min(most, max(draft.target, len(there)))
    return most


def _spare_failed(draft: PlanDraft) -> bool:
    """Return whether a spare failed by itself so recently that the next one may fail as fast."""
    failed = (worker for worker in draft.status.in_phase(Phase.ENDED) if worker.spare and worker.attempt_id is None)
    return any(
        worker.since is not None and draft.now - worker.since < start_retry(draft)
        for worker in failed
        if not worker.ordered and worker.cause != Cause.INTERRUPTION
    )


def _waited_for(draft: PlanDraft) -> tuple[Worker, ...]:
    """Return the lost workers that keep their place until they return or are proved gone (``onFailure: Wait``)."""
    if draft.spec.on_failure != c.WAIT:
        return ()
    return tuple(w for w in draft.status.in_phase(Phase.LOST, Phase.LEAVING) if w.known and not w.ordered)


def _waits(draft: PlanDraft, workers: tuple[Worker, ...]) -> PlanDraft:
    message = messages.workers.waiting_for_lost_worker(
        [pod_name(draft.seen.job.name, w.incarnation) for w in workers]
    )
    return draft.waiting_for(WaitReason.WAITING_FOR_LOST_WORKER, message)


def _more(draft: PlanDraft, count: int) -> PlanDraft:
    """Request workers as one batch. A batch waits behind gates if no worker of the job has a node yet."""
    new = planned(draft, count)
    incarnations = draft.status.incarnations + count
    status = replace(draft.status, workers=(*draft.status.workers, *new), incarnations=incarnations)
    if any(worker.gated for worker in new):
        gang = status.gang
        status = replace(status, gang=replace(gang, since=gang.since or draft.now, lifted_at=None))
    return replace(draft, status=status)


def planned(draft: PlanDraft, count: int) -> tuple[Worker, ...]:
    """Return the next workers as they would be requested now; first those that must stay off spot capacity."""
    first = draft.status.incarnations
    wanted = draft.status.in_phase(Phase.WANTED)
    gated = draft.spec.scheduling.gang and not any(worker.node for worker in wanted)
    domain = _domain(draft, wanted)
    avoid, last_resort = _to_avoid(draft, required=True), _to_avoid(draft, required=False)
    steady = sum(worker.on_demand for worker in (*wanted, *_waited_for(draft)))
    lack = min(draft.spec.scheduling.on_demand, draft.target) - steady
    host = _host(draft, wanted) if draft.spec.rendezvous == c.C10D else None
    return tuple(
        Worker(
            incarnation=number,
            batch=first,
            gated=gated,
            avoid=avoid,
            last_resort=last_resort,
            spare=len(wanted) + number - first >= draft.target,
            on_demand=number - first < lack,
            domain=domain,
            host=host,
            since=draft.now,
        )
        for number in range(first, first + count)
    )


def unplaced(draft: PlanDraft) -> tuple[Worker, ...]:
    """Return the workers without a node, and those that are still to be requested."""
    wanted = draft.status.in_phase(Phase.WANTED)
    total = draft.target + draft.spec.spares if draft.target else 0
    lacking = max(0, total - len(wanted) - len(draft.finished))
    return (*(worker for worker in wanted if not worker.node), *planned(draft, lacking))


def _host(draft: PlanDraft, wanted: tuple[Worker, ...]) -> int:
    """Return the incarnation of the present host, or else that of the first new worker."""
    found = (worker.incarnation for worker in wanted if worker.hosts)
    return max(found, default=draft.status.incarnations)


def _domain(draft: PlanDraft, wanted: tuple[Worker, ...]) -> str:
    """Return the domain of most workers of a packed job, or the one that they are bound for; else empty."""
    key = draft.spec.scheduling.packed_by
    if not key:
        return ""
    nodes = [draft.node(worker) for worker in wanted]
    found = Counter(str(node.labels[key]) for node in nodes if node is not None and key in node.labels)
    found = found or Counter(worker.domain for worker in wanted if worker.domain)
    return max(sorted(found), key=lambda domain: found[domain], default="")


def _to_avoid(draft: PlanDraft, *, required: bool) -> tuple[str, ...]:
    """Return the nodes that are avoided for longest. The limit keeps the status small with many workers."""
    entries = (entry for entry in draft.status.avoided if entry.required is required)
    longest = sorted(entries, key=lambda entry: entry.until, reverse=True)
    nodes = dict.fromkeys(entry.node for entry in longest)
    return tuple(sorted(list(nodes)[: c.AVOIDED_BY_A_WORKER]))


def _fewer(draft: PlanDraft, surplus: int) -> PlanDraft:
    """Order surplus workers away: first those without an index, newest first, then the highest indices.

    Workers off spot capacity leave last. Spares stay if the job has too many workers with an index.
    """
    holders = _holders(draft)
    others = [worker for worker in _dispensable(draft) if worker not in holders]
    from_holders = max(surplus - len(others), len(holders) - draft.target, 0)
    for worker in (*others[: max(surplus - from_holders, 0)], *holders[:from_holders]):
        draft = order_away(draft, worker, MembershipReason.SCALED_DOWN, messages.workers.surplus())
    return draft


def _holders(draft: PlanDraft) -> list[Worker]:
    """Return workers that train, or have a reserved index off spot capacity, in the order in which they may leave."""
    members, steady = _places(draft), _steady(draft)
    return [w for w in _dispensable(draft) if w.pod_uid in members or (w in steady and not w.spare)]


def _dispensable(draft: PlanDraft) -> list[Worker]:
    places, steady = _places(draft), _steady(draft)
    return sorted(
        draft.status.in_phase(Phase.WANTED),
        key=lambda worker: (
            not worker.hosts,
            worker not in steady,
            places.get(worker.pod_uid, _NO_PLACE),
            worker.incarnation,
        ),
        reverse=True,
    )


def _steady(draft: PlanDraft) -> list[Worker]:
    """Return as many workers off spot capacity as the spec requests."""
    places = _places(draft)
    found = (worker for worker in draft.status.in_phase(Phase.WANTED) if worker.on_demand)
    ordered = sorted(found, key=lambda worker: (places.get(worker.pod_uid, _NO_PLACE), worker.incarnation))
    return ordered[: draft.spec.scheduling.on_demand]


def _places(draft: PlanDraft) -> dict[str, int]:
    return {member.pod_uid: member.index for member in draft.status.membership.members}


def order_away(draft: PlanDraft, worker: Worker, reason: str, message: str) -> PlanDraft:
    """Order the worker to leave, which is no incident."""
    leaving = replace(
        worker, phase=Phase.LEAVING, since=draft.now, ordered=True, cause=None, reason=reason, message=message
    )
    if not worker.known:
        # Its pod may still be created, so the name stays taken until it is seen or certainly was never created.
        return draft.with_worker(replace(leaving, absent_since=draft.now))
    return draft.with_worker(leaving)
