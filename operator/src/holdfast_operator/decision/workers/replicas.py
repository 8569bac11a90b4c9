"""As many wanted workers as replicas, and spares: a new incarnation for each that is missing, an order to leave for
each surplus.

Names come from a counter in the status and are never used twice.
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
    """Add or remove workers from the roster."""
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
    """The pause is for those that may fail as fast again: no other replacement waits for it, nor a larger job."""
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
    """By itself, or so that it was decided to make it anew."""
    if worker.ordered:
        return worker.removal is not None
    at_startup = worker.cause == Cause.INFRASTRUCTURE and worker.pair is None
    return at_startup or worker.cause not in (Cause.INTERRUPTION, Cause.INFRASTRUCTURE)


def _total(draft: PlanDraft) -> int:
    """Workers and spares. These are asked for once all others have their places, and not at once after one failed."""
    there = draft.status.in_phase(Phase.WANTED)
    most = draft.target + (draft.spec.spares if draft.target else 0)
    placed = sum(bool(worker.node) and not worker.gated for worker in there)
    if placed < draft.target or _spare_failed(draft):
        return min(most, max(draft.target, len(there)))
    return most


def _spare_failed(draft: PlanDraft) -> bool:
    """By itself, a moment ago: the next one may do so as fast."""
    failed = (worker for worker in draft.status.in_phase(Phase.ENDED) if worker.spare and worker.pair is None)
    return any(
        worker.since is not None and draft.now - worker.since < start_retry(draft)
        for worker in failed
        if not worker.ordered and worker.cause != Cause.INTERRUPTION
    )


def _waited_for(draft: PlanDraft) -> tuple[Worker, ...]:
    """With ``onFailure: Wait``, a lost worker keeps its place until it is back or proved gone."""
    if draft.spec.on_failure != c.WAIT:
        return ()
    return tuple(w for w in draft.status.in_phase(Phase.LOST, Phase.LEAVING) if w.known and not w.ordered)


def _waits(draft: PlanDraft, workers: tuple[Worker, ...]) -> PlanDraft:
    message = messages.workers.waiting_for_lost_worker(
        [pod_name(draft.seen.job.name, w.incarnation) for w in workers]
    )
    return draft.waiting_for(WaitReason.WAITING_FOR_LOST_WORKER, message)


def _more(draft: PlanDraft, count: int) -> PlanDraft:
    """All that are made together share a batch; a batch waits behind gates if nothing of the job has a place yet."""
    new = planned(draft, count)
    incarnations = draft.status.incarnations + count
    status = replace(draft.status, workers=(*draft.status.workers, *new), incarnations=incarnations)
    if any(worker.gated for worker in new):
        gang = status.gang
        status = replace(status, gang=replace(gang, since=gang.since or draft.now, lifted_at=None))
    return replace(draft, status=status)


def planned(draft: PlanDraft, count: int) -> tuple[Worker, ...]:
    """The next workers, as they would be asked for now: first those that stay off spot capacity, where some lack."""
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
    """Who has no node yet, and who is still to be asked for."""
    wanted = draft.status.in_phase(Phase.WANTED)
    total = draft.target + draft.spec.spares if draft.target else 0
    lacking = max(0, total - len(wanted) - len(draft.finished))
    return (*(worker for worker in wanted if not worker.node), *planned(draft, lacking))


def _host(draft: PlanDraft, wanted: tuple[Worker, ...]) -> int:
    """Theirs that are there, else the first of the new ones."""
    found = (worker.incarnation for worker in wanted if worker.hosts)
    return max(found, default=draft.status.incarnations)


def _domain(draft: PlanDraft, wanted: tuple[Worker, ...]) -> str:
    """Where most of a packed job is, or is bound for; empty if nothing of it is."""
    key = draft.spec.scheduling.packed_by
    if not key:
        return ""
    nodes = [draft.node(worker) for worker in wanted]
    found = Counter(str(node.labels[key]) for node in nodes if node is not None and key in node.labels)
    found = found or Counter(worker.domain for worker in wanted if worker.domain)
    return max(sorted(found), key=lambda domain: found[domain], default="")


def _to_avoid(draft: PlanDraft, *, required: bool) -> tuple[str, ...]:
    """The nodes that stay bad for longest; the status could not hold all of them for each of many workers."""
    entries = (entry for entry in draft.status.avoided if entry.required is required)
    longest = sorted(entries, key=lambda entry: entry.until, reverse=True)
    nodes = dict.fromkeys(entry.node for entry in longest)
    return tuple(sorted(list(nodes)[: c.AVOIDED_BY_A_WORKER]))


def _fewer(draft: PlanDraft, surplus: int) -> PlanDraft:
    """Those without a place in the generation first, the youngest of them first; then the highest places.

    Those that stay off spot capacity are the last, and spares stay where it is those with places that are too many.
    """
    holders = _holders(draft)
    others = [worker for worker in _dispensable(draft) if worker not in holders]
    from_holders = max(surplus - len(others), len(holders) - draft.target, 0)
    for worker in (*others[: max(surplus - from_holders, 0)], *holders[:from_holders]):
        draft = order_away(draft, worker, MembershipReason.SCALED_DOWN, messages.workers.surplus())
    return draft


def _holders(draft: PlanDraft) -> list[Worker]:
    """Who trains, or comes to a place that is kept for those off spot capacity; first who may leave first."""
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
    """As many of those off spot capacity as there are to be."""
    places = _places(draft)
    found = (worker for worker in draft.status.in_phase(Phase.WANTED) if worker.on_demand)
    ordered = sorted(found, key=lambda worker: (places.get(worker.pod_uid, _NO_PLACE), worker.incarnation))
    return ordered[: draft.spec.scheduling.on_demand]


def _places(draft: PlanDraft) -> dict[str, int]:
    return {member.pod_uid: member.index for member in draft.status.membership.members}


def order_away(draft: PlanDraft, worker: Worker, reason: str, message: str) -> PlanDraft:
    """The worker leaves because we say so: no incident."""
    leaving = replace(
        worker, phase=Phase.LEAVING, since=draft.now, ordered=True, cause=None, reason=reason, message=message
    )
    if not worker.known:
        # Its pod may be on its way, so the name stays taken until that is seen or surely never was.
        return draft.with_worker(replace(leaving, absent_since=draft.now))
    return draft.with_worker(leaving)
