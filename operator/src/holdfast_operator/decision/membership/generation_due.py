"""Decide whether the next generation is due."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.api.status import Membership
from holdfast_operator.decision.membership.candidates import Candidate, Due, MembershipInput, Wait
from holdfast_operator.decision.membership.generation import highest_reported
from holdfast_operator.decision.reporting import messages

GATHER = timedelta(seconds=5)


def due(seen: MembershipInput, recorded: Membership, chosen: Sequence[Candidate], now: datetime) -> Due | Wait:
    """Return whether a generation of the chosen workers is due, and why."""
    if recorded.generation == 0:
        return _first_gang(seen, chosen, now)
    above = _above(seen, recorded)
    if above is not None:
        return above
    uids = frozenset(worker.uid for worker in chosen)
    members = frozenset(recorded.member_uids())
    if uids - members:
        return _joined(seen, recorded, chosen, uids - members, now)
    return _without_newcomers(seen, recorded, uids, members - uids, now)


def _waits(message: str) -> Wait:
    return Wait(MembershipReason.WAITING_FOR_WORKERS, message)


# The first generation


def _first_gang(seen: MembershipInput, chosen: Sequence[Candidate], now: datetime) -> Due | Wait:
    if len(chosen) >= seen.rules.replicas:
        return Due(MembershipReason.FIRST_GANG, messages.membership.ready(len(chosen), len(chosen)))
    return _partial_gang(seen, chosen, now)


def _partial_gang(seen: MembershipInput, chosen: Sequence[Candidate], now: datetime) -> Due | Wait:
    """Start with fewer workers after a wait for the others that start. Workers without a node are not waited for."""
    rules, size = seen.rules, len(chosen)
    if rules.may_shrink and size >= rules.min_replicas:
        if _others_find_no_node(seen, chosen):
            return Due(MembershipReason.FIRST_GANG, messages.membership.ready_without_others(size, rules.replicas))
        if now - min((w.ready_at for w in chosen if w.ready_at), default=now) >= rules.first_wait:
            seconds = rules.first_wait.total_seconds()
            return Due(MembershipReason.FIRST_GANG, messages.membership.ready_in_time(size, rules.replicas, seconds))
    return _waits(messages.membership.ready(size, rules.replicas))


def _others_find_no_node(seen: MembershipInput, chosen: Sequence[Candidate]) -> bool:
    staying = [worker for worker in seen.workers if not worker.leaving]
    return len(staying) >= seen.rules.replicas and all(w in chosen or w.unplaced for w in staying)


# Unpublished generations and foreign claims at or above the present generation


def _above(seen: MembershipInput, recorded: Membership) -> Due | None:
    foreign = [claim for report in seen.reports for claim in report.foreign_claims]
    others = [claim for claim in foreign if claim.attempt_id.generation >= recorded.generation]
    if others:
        top = max(others, key=lambda claim: claim.order)
        message = messages.membership.foreign_claim(top.job_uid, top.publication, top.attempt_id.generation)
        return Due(MembershipReason.FOREIGN_CLAIMS, message)
    highest = highest_reported(seen)
    if highest > recorded.generation:
        return Due(
            MembershipReason.GENERATION_CONFLICT, messages.membership.newer_generation(highest, recorded.generation)
        )
    return _other_publication(seen, recorded)


def _other_publication(seen: MembershipInput, recorded: Membership) -> Due | None:
    generation = recorded.generation
    pods = [w.member.pod for w in seen.workers if w.report and w.report.conflict >= generation]
    if pods:
        return Due(MembershipReason.GENERATION_CONFLICT, messages.membership.known_twice(sorted(pods), generation))
    for worker in seen.workers:
        world = worker.report.world if worker.report else None
        if world and world.attempt_id.generation == generation and world.publication != recorded.publication:
            message = messages.membership.other_publication(
                worker.member.pod, generation, world.publication, recorded.publication
            )
            return Due(MembershipReason.GENERATION_CONFLICT, message)
    return None


# Workers that join


def _joined(
    seen: MembershipInput, recorded: Membership, chosen: Sequence[Candidate], joined: frozenset[str], now: datetime
) -> Due | Wait:
    rules = seen.rules
    names = ", ".join(sorted(worker.member.pod for worker in chosen if worker.uid in joined))
    if joined & recorded.last_active():
        return Due(MembershipReason.WORKERS_RETURNED, messages.membership.pods_returned(names))
    if _in_checkpoint(seen):
        return _waits(messages.membership.waiting_for_checkpoint(names))
    fewest = min(len(recorded.members), rules.replicas)
    if not rules.may_shrink and len(chosen) < fewest:
        return _waits(messages.membership.waiting_for_all(len(chosen), fewest))
    if all(worker.uid in joined for worker in chosen) and len(chosen) < rules.replicas:
        return _partial_gang(seen, chosen, now)
    if _replacement_may_come(seen, len(chosen), now):
        return _for_replacement(seen)
    if _more_to_come(seen, chosen, joined, now):
        return _waits(messages.membership.waiting_for_starting(names))
    return Due(MembershipReason.WORKER_JOINED, messages.membership.pods_ready(names))


def _replacement_may_come(seen: MembershipInput, size: int, now: datetime) -> bool:
    """Return whether no world runs and it is too early to continue with fewer workers."""
    until = (seen.stalled_since or now) + seen.rules.shrink_after
    return size < seen.rules.replicas and now < until and seen.running is None


def _for_replacement(seen: MembershipInput) -> Wait:
    return _waits(messages.membership.waiting_for_replacement(seen.rules.shrink_after.total_seconds()))


def _in_checkpoint(seen: MembershipInput) -> bool:
    """Return whether a rank of the running world writes a checkpoint. The launchers bound its duration."""
    members = seen.running.members if seen.running else ()
    return any(w.report.checkpointing for w in seen.workers if w.report and w.up and w.uid in members)


def _more_to_come(seen: MembershipInput, chosen: Sequence[Candidate], joined: frozenset[str], now: datetime) -> bool:
    """Return whether more workers will be ready soon. Each growth interrupts training, so they join together."""
    starting = any(worker.report is None and not worker.leaving for worker in seen.workers)
    ready = min((w.ready_at for w in chosen if w.uid in joined and w.ready_at), default=now)
    room = seen.rules.replicas > len(chosen)
    return room and starting and seen.running is not None and now < ready + GATHER


# Fewer workers


def _without_newcomers(
    seen: MembershipInput, recorded: Membership, uids: frozenset[str], absent: frozenset[str], now: datetime
) -> Due | Wait:
    """Shrink to the remaining workers, if the launchers cannot do so themselves or the shrink was requested."""
    rules, before = seen.rules, len(recorded.members)
    if not absent:
        return Wait(MembershipReason.UP_TO_DATE, messages.membership.up_to_date(recorded.generation))
    ended = seen.proved_gone | {worker.uid for worker in seen.workers if worker.ended}
    if uids and absent <= ended and before > rules.replicas:
        return Due(MembershipReason.SCALED_DOWN, messages.membership.scaled_down(before, len(uids)))
    if not uids:
        return _waits(messages.membership.none_reports())
    if 2 * rules.world_of(len(uids)) > before or not rules.may_shrink:
        return _waits(messages.membership.workers_missing(len(absent)))
    if not _agree_on_loss(seen, uids, absent):
        return _waits(messages.membership.loss_not_agreed())
    if _replacement_may_come(seen, len(uids), now):
        return _for_replacement(seen)
    return Due(MembershipReason.SURVIVORS_CONTINUE, messages.membership.survivors_continue(len(uids), before))


def _agree_on_loss(seen: MembershipInput, uids: frozenset[str], absent: frozenset[str]) -> bool:
    """Return whether no survivor trains with a missing member, and each missing one is proved gone or lost to all."""
    reports = [w.report for w in seen.workers if w.uid in uids and w.report]
    if any(report.world and absent.intersection(report.world.members) for report in reports):
        return False
    return all(uid in seen.proved_gone or all(uid in report.lost_members for report in reports) for uid in absent)
