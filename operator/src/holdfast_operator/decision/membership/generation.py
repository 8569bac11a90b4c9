"""Construct the next generation: its number, its members, and the earlier generations that may still be alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.status import EarlierGeneration, Member, Membership
from holdfast_operator.decision.membership.candidates import Candidate, MembershipInput


def next_generation(seen: MembershipInput, recorded: Membership, chosen: Sequence[Candidate]) -> Membership:
    """Return a generation of the chosen workers with a number above all known ones."""
    claimed = max((claim.attempt_id.generation for claim in recorded.claims), default=0)
    floor = max(recorded.generation, highest_reported(seen), claimed)
    active = highest_started(seen, recorded)
    proposed = replace(
        recorded,
        generation=floor + 1,
        publication=seen.publication,
        active=active,
        previous=pruned(_with_skipped(seen, recorded, floor), active),
        members=_members(recorded, chosen, seen.rules.on_demand),
    )
    return proposed.with_gone(seen.proved_gone)


def highest_started(seen: MembershipInput, recorded: Membership) -> AttemptId | None:
    """Return the highest attempt ID that is known to have started."""
    attempt_ids = [recorded.active, *(report.highest_attempt_id for report in seen.reports)]
    return max(filter(None, attempt_ids), default=None)


def highest_reported(seen: MembershipInput) -> int:
    """Return the highest generation that a launcher has accepted or started."""
    attempt_ids = [
        attempt_id
        for report in seen.reports
        for attempt_id in (report.highest_attempt_id, report.accepted)
        if attempt_id
    ]
    return max((attempt_id.generation for attempt_id in attempt_ids), default=0)


def pruned(previous: Iterable[EarlierGeneration], active: AttemptId | None) -> tuple[EarlierGeneration, ...]:
    """Return the generations from the active one on."""
    first = 1 if active is None else active.generation
    return tuple(entry for entry in previous if entry.last >= first)


def _with_skipped(seen: MembershipInput, recorded: Membership, floor: int) -> list[EarlierGeneration]:
    """Return the earlier generations, the present one, and those above it that this operator never published.

    The members of an unpublished generation come from reports. If no report mentions a number, it was skipped or
    belongs to another job's world. Only its claim fences such a world, and rule (c) counts no members for it.
    """
    entries = list(recorded.previous)
    if recorded.generation:
        uids = tuple(member.pod_uid for member in recorded.members)
        entries.append(
            EarlierGeneration(generation=recorded.generation, publication=recorded.publication, members=uids)
        )
    worlds = {report.world.attempt_id.generation: report.world for report in seen.reports if report.world}
    begin = recorded.generation + 1
    for generation in sorted(number for number in worlds if begin <= number <= floor):
        world = worlds[generation]
        entries.extend(_skipped(begin, generation - 1))
        members = tuple(sorted(world.members))
        entries.append(EarlierGeneration(generation=generation, publication=world.publication, members=members))
        begin = generation + 1
    return [*entries, *_skipped(begin, floor)]


def _skipped(first: int, last: int) -> list[EarlierGeneration]:
    """Return one entry for the whole range, because a foreign claim may be a billion generations above ours."""
    if first > last:
        return []
    return [EarlierGeneration(generation=first, publication="", members=(), through=last)]


def _members(recorded: Membership, chosen: Iterable[Candidate], on_demand: int) -> tuple[Member, ...]:
    """Return the members. Survivors keep their index, and newcomers get the lowest free one.

    The first ``on_demand`` indices are reserved for workers off spot capacity.
    """
    workers = {worker.uid: worker for worker in chosen}
    places = {member.pod_uid: member.index for member in recorded.members if member.pod_uid in workers}
    newcomers = (worker for worker in workers.values() if worker.uid not in places)
    for worker in sorted(newcomers, key=lambda w: (not w.on_demand, w.member.index, w.member.pod)):
        taken = set(places.values())
        first = 0 if worker.on_demand else on_demand
        places[worker.uid] = next(index for index in count(first) if index not in taken)
    members = (replace(workers[uid].member, index=index) for uid, index in places.items())
    return tuple(sorted(members, key=lambda member: member.index))
