"""As many wanted workers as replicas: a new incarnation for each that is missing, an order to leave for each surplus.

Names come from a counter in the status and are never used twice.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator import constants as c
from holdfast_operator.api import pod_name
from holdfast_operator.policies.draft import Draft
from holdfast_operator.policies.words import Words
from holdfast_operator.status import Phase, Worker


def apply(draft: Draft) -> Draft:
    """Add or remove workers from the roster."""
    draft = _filled(draft)
    return draft.but(replicas=len(draft.status.in_phase(Phase.WANTED)))


def _filled(draft: Draft) -> Draft:
    surplus = len(draft.status.in_phase(Phase.WANTED)) - draft.target
    if surplus > 0:
        return _fewer(draft, surplus)
    waited_for = _waited_for(draft)
    if surplus + len(waited_for) >= 0:
        return _waits(draft, waited_for[: -surplus or None]) if surplus else draft
    surplus += len(waited_for)
    if draft.status.backoff_until is not None:
        if draft.now < draft.status.backoff_until:
            return draft.wake_at(draft.status.backoff_until)
        draft = draft.but(backoff_until=None)
    return _more(draft, -surplus)


def _waited_for(draft: Draft) -> tuple[Worker, ...]:
    """With ``onFailure: Wait``, a lost worker keeps its place until it is back or proved gone."""
    if draft.spec.on_failure != c.WAIT:
        return ()
    return tuple(w for w in draft.status.in_phase(Phase.LOST, Phase.LEAVING) if w.known and not w.ordered)


def _waits(draft: Draft, workers: tuple[Worker, ...]) -> Draft:
    names = ", ".join(pod_name(draft.seen.job.name, worker.incarnation) for worker in workers)
    message = f"waits for {names}, which is to come back or be proved gone before it is replaced (onFailure: Wait)"
    return replace(draft, hold=Words(reason="WaitingForLost", message=message))


def _more(draft: Draft, count: int) -> Draft:
    """All that are made together share a batch; a batch waits behind gates if nothing of the job has a place yet."""
    first = draft.status.incarnations
    placed = any(worker.node for worker in draft.status.in_phase(Phase.WANTED))
    avoid = _to_avoid(draft)
    new = tuple(
        Worker(incarnation=number, batch=first, gated=not placed, avoid=avoid, since=draft.now)
        for number in range(first, first + count)
    )
    status = replace(draft.status, workers=(*draft.status.workers, *new), incarnations=first + count)
    if not placed:
        gang = status.gang
        status = replace(status, gang=replace(gang, since=gang.since or draft.now, lifted_at=None))
    return replace(draft, status=status)


def _to_avoid(draft: Draft) -> tuple[str, ...]:
    """The nodes that stay bad for longest; the status could not hold all of them for each of many workers."""
    longest = sorted(draft.status.avoided, key=lambda entry: entry.until, reverse=True)[: c.AVOIDED_BY_A_WORKER]
    return tuple(sorted(entry.node for entry in longest))


def _fewer(draft: Draft, surplus: int) -> Draft:
    """Those without a place in the generation first, the youngest of them first; then the highest places."""
    places = {member.pod_uid: member.index for member in draft.status.membership.members}
    wanted = sorted(
        draft.status.in_phase(Phase.WANTED),
        key=lambda worker: (places.get(worker.pod_uid, len(places) + 1), worker.incarnation),
        reverse=True,
    )
    for worker in wanted[:surplus]:
        draft = order_away(draft, worker, "Surplus", "more workers than replicas")
    return draft


def order_away(draft: Draft, worker: Worker, reason: str, message: str) -> Draft:
    """The worker leaves because we say so: no incident."""
    leaving = replace(
        worker, phase=Phase.LEAVING, since=draft.now, ordered=True, cause="", reason=reason, message=message
    )
    if not worker.known:
        # Its pod may be on its way, so the name stays taken until that is seen or surely never was.
        return draft.with_worker(replace(leaving, absent_since=draft.now))
    return draft.with_worker(leaving)
