"""Decide when a generation is published, and with which members. Pure: no client, clock or environment.

Invariants, asserted on every result:
- A generation number is used once: it lies above the status, every report and every claim that is known.
- ``active`` never falls, and ``previous`` lists every generation from ``active`` up to, not including, the present
  one.
- No generation is published while more than half of an earlier one that may still train is neither in the new one nor
  proved gone (rule (c) of ``docs/reference/protocol.md``). The launchers check it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.api.status import Claim, Membership
from holdfast_operator.decision.membership.candidates import Candidate, MembershipInput, Publication, Wait
from holdfast_operator.decision.membership.generation import highest_started, next_generation, pruned
from holdfast_operator.decision.membership.generation_due import due
from holdfast_operator.decision.reporting import messages

KEPT_CLAIMS = 64


def decide(seen: MembershipInput, now: datetime) -> Publication | Wait:
    """Return the next membership, or why there is none. The same input gives the same answer."""
    before = seen.membership
    recorded = _record(seen)
    verdict = _publication(seen, recorded, now)
    if isinstance(verdict, Wait):
        if recorded == before:
            return verdict
        verdict = Publication(membership=recorded, reason=verdict.reason, message=verdict.message)
    after = replace(verdict, membership=replace(verdict.membership, revision=before.revision + 1))
    check_invariants(before, after.membership)
    return after


def check_invariants(before: Membership, after: Membership) -> None:
    """Raise ``AssertionError`` if the result breaks an invariant."""
    lowest = AttemptId(generation=0, attempt=0)
    if after.generation < before.generation or (before.active or lowest) > (after.active or lowest):
        raise AssertionError(f"a generation or active record fell: {before} -> {after}")
    first = after.active.generation if after.active else 1
    for entry in sorted(after.previous, key=lambda entry: entry.generation):
        if entry.generation <= first <= entry.last:
            first = entry.last + 1
    if first < after.generation:
        raise AssertionError(f"previous has a gap at {first}: {after}")
    if after.generation == before.generation and after.members != before.members:
        raise AssertionError(f"a generation changed its members: {before} -> {after}")


def _record(seen: MembershipInput) -> Membership:
    """Return the present generation with the additions from reports and proofs."""
    before = seen.membership
    active = highest_started(seen, before)
    if active is not None and active.generation > before.generation:
        active = before.active  # recorded together with the next generation
    recorded = replace(before, active=active, claims=_claims(seen), previous=pruned(before.previous, active))
    return recorded.with_gone(seen.proved_gone)


def _claims(seen: MembershipInput) -> tuple[Claim, ...]:
    """Return the known claims without the oldest. A launcher stops only for claims at or above its own generation."""
    found = set(seen.membership.claims)
    for report in seen.reports:
        found.update(report.foreign_claims)
        if report.highest_claim is not None:
            found.add(report.highest_claim)
    newest = sorted(found, key=lambda claim: claim.order)[-KEPT_CLAIMS:]
    own = [claim for claim in found if claim.job_uid == seen.job_uid]
    kept = {*newest, *sorted(own, key=lambda claim: claim.order)[:1]}
    return tuple(sorted(kept, key=lambda claim: claim.order))


def _publication(seen: MembershipInput, recorded: Membership, now: datetime) -> Publication | Wait:
    """Return the next generation if it is due, large enough and allowed by rule (c)."""
    chosen = _chosen(seen, recorded)
    verdict = due(seen, recorded, chosen, now)
    if isinstance(verdict, Wait):
        return verdict
    rules, size = seen.rules, len(chosen)
    world = rules.world_of(size)
    if world < max(rules.min_replicas, 1) or (world < size and not rules.may_shrink):
        message = messages.membership.too_few_ready(size, rules.min_replicas, rules.replica_step)
        return Wait(MembershipReason.WAITING_FOR_WORKERS, message)
    proposed = next_generation(seen, recorded, chosen)
    fence = _awaiting_fence(proposed, seen.names)
    return fence or Publication(membership=proposed, reason=verdict.reason, message=verdict.message)


def _chosen(seen: MembershipInput, recorded: Membership) -> Sequence[Candidate]:
    """Return the next generation's workers: those that train, those that trained last, newcomers that fit."""
    rules = seen.rules
    stays = _stays(seen, recorded)
    last = recorded.last_active()
    up = [worker for worker in seen.workers if worker.up]
    kept = [worker for worker in seen.workers if worker.uid in stays]
    kept += [worker for worker in up if worker.uid in last and worker not in kept]
    room = max(rules.replicas - len(kept), 0)
    known = {worker.uid for worker in kept}
    steady = sum(worker.on_demand for worker in kept) >= rules.on_demand
    newcomers = sorted(
        (w for w in up if w.uid not in known),
        key=lambda w: (not (w.on_demand or steady), w.ready_at.timestamp() if w.ready_at else 0.0, w.member.pod),
    )
    fitting = newcomers[:room]
    while fitting and (len(kept) + len(fitting)) % rules.replica_step:
        fitting.pop()
    return (*kept, *fitting)


def _stays(seen: MembershipInput, recorded: Membership) -> frozenset[str]:
    """Return the present members that report, or train with one that reports, and that do not leave."""
    train = frozenset(seen.running.members) if seen.running else frozenset()
    staying = {worker.uid for worker in seen.workers if not worker.leaving}
    present = {worker.uid for worker in seen.workers if worker.up}.intersection(recorded.member_uids())
    return frozenset((present | (train & staying)) - seen.proved_gone)


def _awaiting_fence(membership: Membership, names: Mapping[str, str]) -> Wait | None:
    """Apply rule (c) to one generation: return which members must first report or be proved gone, if any."""
    for entry in membership.previous:
        left = set(entry.members).difference(membership.member_uids(), membership.gone)
        if 2 * len(left) > len(entry.members):
            pods = sorted(names.get(uid, uid) for uid in left)
            return Wait(MembershipReason.AWAITING_FENCE, messages.membership.awaiting_fence(pods, entry.generation))
    return None
