"""When a generation is published, and with whom. Pure: no client, clock or environment.

Invariants, asserted on every result:
- A generation number is used once: it lies above the status, every report and every claim that is known.
- `active` never falls, and `previous` lists every generation from `active` up to, not including, the present one.
- No generation is published while more than half of an earlier one that may still train is neither in the new
  one nor proved gone (rule (c) of `docs/reference/protocol.md`). The launchers check it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from holdfast_operator.api.reasons import MembershipReason
from holdfast_operator.decision.reporting import messages

KEPT_CLAIMS = 64
GATHER_SECONDS = 5.0


@dataclass(frozen=True, order=True)
class Pair:
    """(generation, attempt)."""

    generation: int
    attempt: int


@dataclass(frozen=True, kw_only=True, order=True)
class Claim:
    """An attempt's right to commit, as reported."""

    pair: Pair
    job_uid: str
    publication: str
    from_step: int
    from_pair: Pair | None = None


@dataclass(frozen=True, kw_only=True, order=True)
class Member:
    """A worker's place in a generation."""

    index: int
    pod_uid: str
    pod: str
    ip: str
    store_port: int
    control_port: int
    node: str


@dataclass(frozen=True, kw_only=True)
class Previous:
    """An earlier generation that may still hold a world; with `through`, a run of numbers that nobody published."""

    generation: int
    publication: str
    members: tuple[str, ...]
    through: int | None = None

    @property
    def last(self) -> int:
        """The highest number that this entry speaks for."""
        return self.generation if self.through is None else self.through


@dataclass(frozen=True, kw_only=True)
class Membership:
    """`status.membership`. Who changes anything else in the served document raises `revision` too."""

    revision: int = 0
    generation: int = 0
    publication: str = ""
    active: Pair | None = None
    previous: tuple[Previous, ...] = ()
    gone: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    members: tuple[Member, ...] = ()

    @property
    def uids(self) -> frozenset[str]:
        """The pods of this generation."""
        return frozenset(member.pod_uid for member in self.members)


@dataclass(frozen=True, kw_only=True)
class World:
    """A world that a launcher says it runs."""

    pair: Pair
    publication: str
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A worker's latest report; what of it concerns membership."""

    ready: bool
    fresh: bool = True
    accepted: Pair | None = None
    started: Pair | None = None
    world: World | None = None
    lost: frozenset[str] = frozenset()
    conflict: int = 0
    highest_claim: Claim | None = None
    foreign_claims: tuple[Claim, ...] = ()
    checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A pod of the job that exists. `leaving`: deleting, terminal, or told to drain. `unplaced`: finds no node."""

    pod_uid: str
    pod: str
    ip: str = ""
    node: str = ""
    store_port: int = 29400
    control_port: int = 29401
    index: int | None = None
    on_demand: bool = False
    terminal: bool = False
    leaving: bool = False
    unplaced: bool = False
    ready_since: float | None = None
    report: Report | None = None

    @property
    def up(self) -> bool:
        """Whether its launcher lately reported ready, and it stays."""
        report = self.report
        return report is not None and report.ready and report.fresh and not self.leaving and not self.terminal


@dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """From the spec: what a generation must look like."""

    replicas: int
    min_replicas: int
    replica_step: int = 1
    may_shrink: bool = True
    first_wait: float = 30.0
    shrink_after: float = 0.0
    on_demand: int = 0


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Write this membership to the status, then serve it. A higher generation is a new one, else a record."""

    membership: Membership
    reason: MembershipReason
    message: str


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Write nothing, and why."""

    reason: MembershipReason
    message: str


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the policy looks at. `proved_gone`: pods that cannot run again, as the fence policy proves it.

    `publication` is a fresh random id, used if a generation is published. `stalled_since`: nothing trains since then.
    `names`: what messages call a pod, by its UID.
    """

    membership: Membership | None
    workers: tuple[Worker, ...]
    proved_gone: frozenset[str]
    rules: MembershipRules
    publication: str
    job_uid: str
    stalled_since: float | None = None
    names: Mapping[str, str] = field(default_factory=dict, hash=False)


def decide(observed: Observed, now: float) -> Publication | Hold:
    """The next membership, or why there is none. The same input gives the same answer."""
    before = observed.membership or Membership()
    recorded = _record(observed, before)
    verdict = _next_generation(observed, recorded, now)
    if isinstance(verdict, Publication):
        after = verdict
    elif recorded != before:
        after = Publication(membership=recorded, reason=verdict.reason, message=verdict.message)
    else:
        return verdict
    after = replace(after, membership=replace(after.membership, revision=before.revision + 1))
    check_invariants(before, after.membership)
    return after


def check_invariants(before: Membership, after: Membership) -> None:
    """What no result may break."""
    if after.generation < before.generation or (before.active or Pair(0, 0)) > (after.active or Pair(0, 0)):
        raise AssertionError(f"a generation or active record fell: {before} -> {after}")
    first = after.active.generation if after.active else 1
    for entry in sorted(after.previous, key=lambda entry: entry.generation):
        if entry.generation <= first <= entry.last:
            first = entry.last + 1
    if first < after.generation:
        raise AssertionError(f"previous has a gap at {first}: {after}")
    if after.generation == before.generation and after.members != before.members:
        raise AssertionError(f"a generation changed its members: {before} -> {after}")


# What reports and proofs add to the record of the present generation


def _record(observed: Observed, before: Membership) -> Membership:
    reports = [worker.report for worker in observed.workers if worker.report is not None]
    active = max(_pairs([before.active, *_started(reports)]), default=None)
    if active is not None and active.generation > before.generation:
        active = before.active  # recorded with the generation that goes above it
    claims = _claims(before.claims, reports, observed.job_uid)
    recorded = replace(before, active=active, claims=claims)
    recorded = replace(recorded, previous=_pruned(recorded.previous, active))
    named = recorded.uids.union(*(previous.members for previous in recorded.previous))
    gone = (set(before.gone) | observed.proved_gone) & named
    return replace(recorded, gone=tuple(sorted(gone)))


def _started(reports: Sequence[Report]) -> list[Pair | None]:
    return [*(report.started for report in reports), *(report.world.pair for report in reports if report.world)]


def _pairs(pairs: Iterable[Pair | None]) -> list[Pair]:
    return [pair for pair in pairs if pair is not None]


def _claims(known: Sequence[Claim], reports: Iterable[Report], job_uid: str) -> tuple[Claim, ...]:
    """All claims known, less the oldest: a launcher stops only for what is not below its own generation."""
    found = set(known)
    for report in reports:
        found.update(report.foreign_claims)
        if report.highest_claim is not None:
            found.add(report.highest_claim)
    newest = sorted(found, key=lambda claim: claim.pair)[-KEPT_CLAIMS:]
    own = [claim for claim in found if claim.job_uid == job_uid]
    return tuple(sorted({*newest, *(sorted(own)[:1])}))


def _pruned(previous: Iterable[Previous], active: Pair | None) -> tuple[Previous, ...]:
    first = 1 if active is None else active.generation
    return tuple(entry for entry in previous if entry.last >= first)


# Whether the next generation is due


def _next_generation(observed: Observed, recorded: Membership, now: float) -> Publication | Hold:
    chosen = _chosen(observed, recorded)
    due = _due(observed, recorded, chosen, now)
    if isinstance(due, Hold):
        return due
    size = _right_size(observed.rules, chosen)
    if size is not None:
        return size
    proposed = _publish(observed, recorded, chosen)
    fence = awaiting_fence(proposed, observed.names)
    if fence is not None:
        return fence
    return Publication(membership=proposed, reason=due[0], message=due[1])


def _chosen(observed: Observed, recorded: Membership) -> tuple[Worker, ...]:
    """Who the next generation would list: those who train, those who trained last, then newcomers that fit."""
    rules = observed.rules
    stays = _stays(observed, recorded)
    last = _last_active(observed, recorded)
    up = [worker for worker in observed.workers if worker.up]
    kept = [worker for worker in observed.workers if worker.pod_uid in stays]
    kept += [worker for worker in up if worker.pod_uid in last and worker not in kept]
    room = max(rules.replicas - len(kept), 0)
    known = {worker.pod_uid for worker in kept}
    steady = sum(worker.on_demand for worker in kept) >= rules.on_demand
    newcomers = sorted(
        (w for w in up if w.pod_uid not in known),
        key=lambda w: (not (w.on_demand or steady), w.ready_since or 0.0, w.pod),
    )
    fitting = newcomers[:room]
    while fitting and (len(kept) + len(fitting)) % rules.replica_step:
        fitting.pop()
    return (*kept, *fitting)


def _stays(observed: Observed, recorded: Membership) -> frozenset[str]:
    """Present members that report, or that train with one that reports, and are not on their way out."""
    running = _running(observed)
    train = frozenset(running.members) if running else frozenset()
    staying = {w.pod_uid for w in observed.workers if not w.leaving and not w.terminal}
    present = {w.pod_uid for w in observed.workers if w.up} & recorded.uids
    return frozenset((present | (train & staying)) - observed.proved_gone)


def _last_active(observed: Observed, recorded: Membership) -> frozenset[str]:
    """Members of the last generation that is known to have trained."""
    if recorded.active is None or recorded.active.generation == recorded.generation:
        return recorded.uids
    for entry in recorded.previous:
        if entry.generation == recorded.active.generation:
            return frozenset(entry.members)
    return recorded.uids


def _running(observed: Observed) -> World | None:
    worlds = [w.report.world for w in observed.workers if w.up and w.report and w.report.world]
    return max(worlds, key=lambda world: world.pair, default=None)


def _due(
    observed: Observed, recorded: Membership, chosen: tuple[Worker, ...], now: float
) -> tuple[MembershipReason, str] | Hold:
    if recorded.generation == 0:
        return _first_gang(observed, chosen, now)
    above = _above(observed, recorded)
    if above is not None:
        return above
    uids = frozenset(worker.pod_uid for worker in chosen)
    joined = uids - recorded.uids
    if joined:
        return _joined(observed, recorded, chosen, joined, now)
    return _without_newcomers(observed, recorded, uids, now)


def _first_gang(observed: Observed, chosen: tuple[Worker, ...], now: float) -> tuple[MembershipReason, str] | Hold:
    rules = observed.rules
    if len(chosen) >= rules.replicas:
        return MembershipReason.FIRST_GANG, messages.ready(len(chosen), len(chosen))
    return _partial_gang(observed, chosen, now)


def _partial_gang(observed: Observed, chosen: tuple[Worker, ...], now: float) -> tuple[MembershipReason, str] | Hold:
    """Fewer than all may begin once they have waited for the others that start, not for those without a node."""
    rules = observed.rules
    waited = now - min((w.ready_since for w in chosen if w.ready_since is not None), default=now)
    size, wanted = len(chosen), rules.replicas
    if rules.may_shrink and len(chosen) >= rules.min_replicas and _others_find_no_node(observed, chosen):
        return MembershipReason.FIRST_GANG, messages.ready_without_others(size, wanted)
    if rules.may_shrink and len(chosen) >= rules.min_replicas and waited >= rules.first_wait:
        return MembershipReason.FIRST_GANG, messages.ready_in_time(size, wanted, rules.first_wait)
    return Hold(reason=MembershipReason.WAITING_FOR_WORKERS, message=messages.ready(size, wanted))


def _others_find_no_node(observed: Observed, chosen: tuple[Worker, ...]) -> bool:
    staying = [w for w in observed.workers if not w.leaving and not w.terminal]
    known = {worker.pod_uid for worker in chosen}
    return len(staying) >= observed.rules.replicas and all(w.pod_uid in known or w.unplaced for w in staying)


def _above(observed: Observed, recorded: Membership) -> tuple[MembershipReason, str] | None:
    """Something stands at or above our generation that we did not make."""
    others = [c for c in _reported_foreign(observed) if c.pair.generation >= recorded.generation]
    if others:
        top = max(others)
        return MembershipReason.FOREIGN_CLAIMS, messages.foreign_claim(
            top.job_uid, top.publication, top.pair.generation
        )
    highest = _highest_reported(observed)
    if highest > recorded.generation:
        return MembershipReason.GENERATION_CONFLICT, messages.newer_generation(highest, recorded.generation)
    return _other_publication(observed, recorded)


def _other_publication(observed: Observed, recorded: Membership) -> tuple[MembershipReason, str] | None:
    told = [w.pod for w in observed.workers if w.report and w.report.conflict >= recorded.generation]
    if told:
        return (
            MembershipReason.GENERATION_CONFLICT,
            messages.known_twice(sorted(told), recorded.generation),
        )
    for worker in observed.workers:
        world = worker.report.world if worker.report else None
        if world and world.pair.generation == recorded.generation and world.publication != recorded.publication:
            return MembershipReason.GENERATION_CONFLICT, messages.other_publication(
                worker.pod, recorded.generation, world.publication, recorded.publication
            )
    return None


def _reported_foreign(observed: Observed) -> list[Claim]:
    return [claim for w in observed.workers if w.report for claim in w.report.foreign_claims]


def _highest_reported(observed: Observed) -> int:
    reports = [worker.report for worker in observed.workers if worker.report is not None]
    pairs = _pairs([*_started(reports), *(report.accepted for report in reports)])
    return max((pair.generation for pair in pairs), default=0)


def _joined(
    observed: Observed, recorded: Membership, chosen: tuple[Worker, ...], joined: frozenset[str], now: float
) -> tuple[MembershipReason, str] | Hold:
    names = ", ".join(sorted(worker.pod for worker in chosen if worker.pod_uid in joined))
    last = _last_active(observed, recorded)
    if joined & last:
        return MembershipReason.WORKERS_RETURNED, messages.pods_returned(names)
    if _in_checkpoint(observed):
        return Hold(
            reason=MembershipReason.WAITING_FOR_WORKERS,
            message=messages.waiting_for_checkpoint(names),
        )
    fewest = min(len(recorded.members), observed.rules.replicas)
    if not observed.rules.may_shrink and len(chosen) < fewest:
        return Hold(
            reason=MembershipReason.WAITING_FOR_WORKERS,
            message=messages.waiting_for_all(len(chosen), fewest),
        )
    trains = {worker.pod_uid for worker in chosen} & recorded.uids
    if not trains and len(chosen) < observed.rules.replicas:
        return _partial_gang(observed, chosen, now)
    waits = _replacement_may_come(observed, len(chosen), now)
    if waits is not None:
        return waits
    if _more_to_come(observed, chosen, joined, now):
        return Hold(
            reason=MembershipReason.WAITING_FOR_WORKERS,
            message=messages.waiting_for_starting(names),
        )
    return MembershipReason.WORKER_JOINED, messages.pods_ready(names)


def _replacement_may_come(observed: Observed, size: int, now: float) -> Hold | None:
    """Nobody trains, and it is too early to go on with fewer."""
    wait = observed.rules.shrink_after
    since = now if observed.stalled_since is None else observed.stalled_since
    if size >= observed.rules.replicas or now >= since + wait or _running(observed) is not None:
        return None
    return Hold(
        reason=MembershipReason.WAITING_FOR_WORKERS,
        message=messages.waiting_for_replacement(wait),
    )


def _in_checkpoint(observed: Observed) -> bool:
    """A rank of the running world writes one; its end is bounded by the launchers."""
    running = _running(observed)
    reports = [w.report for w in observed.workers if running and w.up and w.pod_uid in running.members]
    return any(report is not None and report.checkpointing for report in reports)


def _more_to_come(observed: Observed, chosen: tuple[Worker, ...], joined: frozenset[str], now: float) -> bool:
    """Each growth interrupts those who train: take in together what comes together."""
    starting = [w for w in observed.workers if w.report is None and not (w.leaving or w.terminal)]
    ready = min((w.ready_since for w in chosen if w.pod_uid in joined and w.ready_since is not None), default=now)
    room = observed.rules.replicas > len(chosen)
    return room and bool(starting) and _running(observed) is not None and now < ready + GATHER_SECONDS


def _without_newcomers(
    observed: Observed, recorded: Membership, uids: frozenset[str], now: float
) -> tuple[MembershipReason, str] | Hold:
    """A generation of fewer: only where the launchers cannot make the shrink themselves, or it was ordered."""
    absent = recorded.uids - uids
    if not absent:
        return Hold(reason=MembershipReason.UP_TO_DATE, message=messages.up_to_date(recorded.generation))
    ended = absent & (observed.proved_gone | {w.pod_uid for w in observed.workers if w.terminal})
    if uids and ended == absent and len(recorded.members) > observed.rules.replicas:
        return MembershipReason.SCALED_DOWN, messages.scaled_down(len(recorded.members), len(uids))
    if not uids:
        return Hold(reason=MembershipReason.WAITING_FOR_WORKERS, message=messages.none_reports())
    if 2 * _world_of(observed.rules, len(uids)) > len(recorded.members) or not observed.rules.may_shrink:
        return Hold(reason=MembershipReason.WAITING_FOR_WORKERS, message=messages.workers_missing(len(absent)))
    if not _agree_on_loss(observed, uids, absent):
        return Hold(reason=MembershipReason.WAITING_FOR_WORKERS, message=messages.loss_not_agreed())
    waits = _replacement_may_come(observed, len(uids), now)
    if waits is not None:
        return waits
    return MembershipReason.SURVIVORS_CONTINUE, messages.survivors_continue(len(uids), len(recorded.members))


def _agree_on_loss(observed: Observed, uids: frozenset[str], absent: frozenset[str]) -> bool:
    """No survivor trains with a missing one; each missing one is proved gone or lost to all survivors."""
    reports = [w.report for w in observed.workers if w.pod_uid in uids and w.report]
    if any(report.world and set(report.world.members) & absent for report in reports):
        return False
    return all(uid in observed.proved_gone or all(uid in report.lost for report in reports) for uid in absent)


def _right_size(rules: MembershipRules, chosen: tuple[Worker, ...]) -> Hold | None:
    size, world = len(chosen), _world_of(rules, len(chosen))
    if world < max(rules.min_replicas, 1) or (world < size and not rules.may_shrink):
        message = messages.too_few_ready(size, rules.min_replicas, rules.replica_step)
        return Hold(reason=MembershipReason.WAITING_FOR_WORKERS, message=message)
    return None


def _world_of(rules: MembershipRules, size: int) -> int:
    """How many of so many train. The rest of a step stands by; being fewer than a step, they are no majority."""
    return size - size % rules.replica_step


# The next generation itself


def _publish(observed: Observed, recorded: Membership, chosen: tuple[Worker, ...]) -> Membership:
    floor = max(
        recorded.generation,
        _highest_reported(observed),
        max((claim.pair.generation for claim in recorded.claims), default=0),
    )
    reports = [worker.report for worker in observed.workers if worker.report is not None]
    active = max(_pairs([recorded.active, *_started(reports)]), default=None)
    previous = _pruned(_with_skipped(recorded, reports, floor), active)
    proposed = Membership(
        revision=recorded.revision,
        generation=floor + 1,
        publication=observed.publication,
        active=active,
        previous=previous,
        claims=recorded.claims,
        members=_members(recorded, chosen, observed.rules.on_demand),
    )
    named = proposed.uids.union(*(entry.members for entry in previous))
    gone = (set(recorded.gone) | observed.proved_gone) & named
    return replace(proposed, gone=tuple(sorted(gone)))


def _with_skipped(recorded: Membership, reports: Iterable[Report], floor: int) -> list[Previous]:
    """The present generation and those above it that we never made, with what members of them report.

    A number that nobody reports was skipped, or its world is another's: then only its claim fences it, and it
    has no members for rule (c) to count.
    """
    entries = list(recorded.previous)
    if recorded.generation:
        uids = tuple(member.pod_uid for member in recorded.members)
        entries.append(Previous(generation=recorded.generation, publication=recorded.publication, members=uids))
    worlds = {report.world.pair.generation: report.world for report in reports if report.world}
    begin = recorded.generation + 1
    for generation in sorted(number for number in worlds if begin <= number <= floor):
        world = worlds[generation]
        entries.extend(_skipped(begin, generation - 1))
        members = tuple(sorted(world.members))
        entries.append(Previous(generation=generation, publication=world.publication, members=members))
        begin = generation + 1
    return [*entries, *_skipped(begin, floor)]


def _skipped(first: int, last: int) -> list[Previous]:
    """One entry for the whole run: a foreign claim may stand a billion generations above ours."""
    return [Previous(generation=first, publication="", members=(), through=last)] if first <= last else []


def _members(recorded: Membership, chosen: Iterable[Worker], on_demand: int) -> tuple[Member, ...]:
    """Survivors keep their index, a newcomer gets the lowest free one; the first are for those off spot capacity."""
    workers = {worker.pod_uid: worker for worker in chosen}
    places = {member.pod_uid: member.index for member in recorded.members if member.pod_uid in workers}
    newcomers = sorted(workers.keys() - places.keys(), key=lambda uid: _wish(workers[uid]))
    for uid in newcomers:
        taken = set(places.values())
        first = 0 if workers[uid].on_demand else on_demand
        places[uid] = next(index for index in count(first) if index not in taken)
    return tuple(sorted(_member(workers[uid], index) for uid, index in places.items()))


def _wish(worker: Worker) -> tuple[bool, int, str]:
    return (not worker.on_demand, worker.index if worker.index is not None else 1 << 30, worker.pod)


def _member(worker: Worker, index: int) -> Member:
    return Member(
        index=index,
        pod_uid=worker.pod_uid,
        pod=worker.pod,
        ip=worker.ip,
        store_port=worker.store_port,
        control_port=worker.control_port,
        node=worker.node,
    )


def awaiting_fence(membership: Membership, pods: Mapping[str, str]) -> Hold | None:
    """Rule (c) for the whole of a generation: who must report or be proved gone first, if anyone.

    `pods` names pods by UID; one that it does not know is named by its UID.
    """
    for entry in membership.previous:
        left = set(entry.members) - membership.uids - set(membership.gone)
        if 2 * len(left) > len(entry.members):
            names = sorted(pods.get(uid, uid) for uid in left)
            return Hold(
                reason=MembershipReason.AWAITING_FENCE,
                message=messages.awaiting_fence(names, entry.generation),
            )
    return None
