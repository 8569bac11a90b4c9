"""Decides which world is proposed, and when. Pure; rules 2 to 4, 6 and 7 of the protocol."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership import quorum as rules
from holdfast.launcher.membership.attempt_end.root_cause import sent_away
from holdfast.launcher.membership.document import Member, Membership
from holdfast.launcher.membership.events import OpenStore
from holdfast.launcher.membership.formation.acceptance import (
    Waiting,
    consider,
    held,
    highest_accepted,
    known_to_have_failed,
    uids_of,
)
from holdfast.launcher.membership.formation.proposal_answers import send_proposal
from holdfast.launcher.membership.messages import Incident, Priority, Propose, Remedy, World
from holdfast.launcher.membership.state import Phase, Proposal
from holdfast.launcher.membership.transition import Transition


def propose(turn: Transition) -> Waiting:
    """Propose a world if one is due and this launcher is the proposer; otherwise return the reason for the wait."""
    membership = turn.membership
    waiting = held(turn)
    if membership is None or waiting is not None:
        return waiting or (Phase.WAITING, "waits for the first membership")
    if turn.state.proposal is not None:
        return Phase.FORMING, f"proposed {turn.state.proposal.world.attempt_id}"
    if turn.attempt is not None and turn.attempt.failures:  # its budget and back-off are judged first
        return Phase.FORMING, f"{turn.attempt.world.attempt_id} failed; collects the reports of the other workers"
    running = _running(turn)
    if running is not None:
        return _grow(turn, membership, running)
    return _form(turn, membership)


def _running(turn: Transition) -> World | None:
    """Return the world that trains, here or as a live peer reports."""
    state = turn.state
    worlds = [hello.world for uid in state.peers if (hello := turn.hello(uid)) and hello.world]
    if state.attempt is not None:
        worlds.append(state.attempt.world)
    newest = max(worlds, key=lambda world: world.attempt_id, default=None)
    return newest if newest is not None and not known_to_have_failed(turn, newest.attempt_id) else None


def _grow(turn: Transition, membership: Membership, running: World) -> Waiting:
    """Propose to add ready members to the running world. All its members stay."""
    message = _trains(running, membership)
    waiting = (Phase.RUNNING, message) if turn.attempt else (Phase.WAITING, f"waits to join; others are {message}")
    if any(turn.hello(uid) and turn.on_its_way_out(uid) for uid in running.uids):
        return waiting
    usable = turn.usable_members()
    keep = [member for member in usable if member.pod_uid in running.uids]
    if {m.pod_uid for m in keep} != running.uids or not _is_proposer(turn, membership, usable):
        return waiting
    newcomers = [member for member in usable if member.pod_uid not in running.uids and _settled(turn, member)]
    newcomers = [member for member in newcomers if _prepared(turn, member)]
    joined = tuple(member for member in usable if member in keep or member in newcomers)
    if not newcomers or turn.now < turn.state.retry_at or _should_wait(turn, membership, joined):
        return waiting
    if turn.state.saving:  # a rank may not leave before its deadline while it writes, and would lose its state
        return waiting
    chosen = _in_steps(membership, keep, newcomers)
    if len(chosen) <= len(keep) or not all(_has_report_of(turn, membership, member) for member in chosen):
        return waiting
    refused = _try(turn, membership, chosen, None, turn.rules.checkpoint_deadline)
    return refused or (Phase.FORMING, f"grows from {len(keep)} to {len(chosen)} workers")


def _form(turn: Transition, membership: Membership) -> Waiting:
    """Propose the largest world of the live members while no world trains."""
    usable = turn.usable_members()
    if _may_start(turn, membership):
        return Phase.FORMING, f"waits for the start of {turn.state.accepted}"
    if turn.now < turn.state.not_before:
        return Phase.FORMING, f"backs off for {turn.state.not_before - turn.now:.0f} s after {turn.state.failed}"
    chosen = _largest(turn, membership, usable)
    order = tuple(sorted(usable, key=lambda member: member not in chosen))  # the proposer is in that world
    verdict = rules.may_be(membership, uids_of(chosen), turn.started(), turn.weakened)
    if not verdict.ok:
        return (Phase.AWAITING_FENCE if verdict.fence else Phase.WAITING), verdict.reason
    if _first_attempt(turn, membership) and _should_wait(turn, membership, usable):
        return Phase.FORMING, f"{len(usable)} of {len(membership.members)} workers are ready; waits for the others"
    if _replacement_may_come(turn, membership, chosen):
        wait = membership.rules.shrink_after
        return Phase.FORMING, f"{len(chosen)} workers wait up to {wait:.0f} s for a replacement (shrinkAfterSeconds)"
    if turn.now < turn.state.retry_at or not _is_proposer(turn, membership, order):
        return Phase.FORMING, f"waits for a proposal of {order[0].pod or order[0].pod_uid}"
    refused = _try(turn, membership, chosen, _cause_of_end(turn), 0.0)
    return refused or (Phase.FORMING, f"proposes a world of {len(chosen)}")


def _largest(turn: Transition, membership: Membership, usable: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the largest world, with every shard of a sharded model if possible. No world waits for a shard."""
    said = {member.pod_uid: turn.held(member.pod_uid) for member in usable}
    shards = {uid: one for uid, one in said.items() if one is not None}
    with_all_shards = rules.largest_world(membership.rules, usable, shards)
    if rules.may_be(membership, uids_of(with_all_shards), turn.started(), turn.weakened).ok:
        return with_all_shards
    return rules.largest_world(membership.rules, usable)


def _may_start(turn: Transition, membership: Membership) -> bool:
    """Whether another proposer's accepted world may start at any time, or has started.

    A rival world would break it up, and cause a failure without a failed worker.
    """
    state, world = turn.state, turn.state.accepted_world
    if world is None or world.coordinator == state.me or turn.on_its_way_out(world.coordinator):
        return False
    if world.attempt_id != highest_accepted(turn) or known_to_have_failed(turn, world.attempt_id):
        return False
    return state.idle_since is not None and turn.now < state.idle_since + membership.rules.accept_deadline


def _is_proposer(turn: Transition, membership: Membership, usable: tuple[Member, ...]) -> bool:
    """Whether this launcher proposes: the lowest live index, or a later one after a long time without a proposal."""
    order = [member.pod_uid for member in usable]
    if turn.state.me not in order:
        return False
    place = order.index(turn.state.me)
    idle = 0.0 if turn.state.idle_since is None else turn.now - turn.state.idle_since
    wait_seconds = membership.rules.shrink_after + place * membership.rules.never_accepted_wait
    return place == 0 or (turn.attempt is None and idle > wait_seconds)


def _replacement_may_come(turn: Transition, membership: Membership, chosen: tuple[Member, ...]) -> bool:
    """Whether shrinking waits for a replacement.

    Only the proposer waits, so the delay never affects safety. Failed proposals do not extend the wait.
    """
    rules, last, since = membership.rules, turn.state.last_world, turn.state.ended_at
    if last is None or last.uids <= uids_of(chosen) or len(chosen) >= rules.replicas:
        return False
    return since is not None and turn.now < since + rules.shrink_after


def _first_attempt(turn: Transition, membership: Membership) -> bool:
    top = highest_accepted(turn)
    return top is None or top.generation < membership.generation


def _should_wait(turn: Transition, membership: Membership, usable: tuple[Member, ...]) -> bool:
    """Whether a member may still arrive: it is not proved gone, and was not connected and lost."""
    if turn.now >= turn.state.seen_at + membership.rules.first_attempt_wait:
        return False
    absent = membership.uids - uids_of(usable) - membership.gone
    return any(not _seen_and_lost(turn, uid) for uid in absent)


def _seen_and_lost(turn: Transition, uid: str) -> bool:
    peer = turn.state.peers.get(uid)
    return peer is not None and ((peer.met and not peer.up) or peer.muted_until > turn.now)


def _has_report_of(turn: Transition, membership: Membership, member: Member) -> bool:
    """Whether a member has the generation. Otherwise it would refuse the world after the others have stopped."""
    hello = turn.hello(member.pod_uid)
    return member.pod_uid == turn.state.me or (
        hello is not None and (hello.generation, hello.publication) == (membership.generation, membership.publication)
    )


def _settled(turn: Transition, member: Member) -> bool:
    """Whether a new member's channel has been open for `dead_after`: an unstable link must not stop others."""
    peer = turn.state.peers.get(member.pod_uid)
    return peer is None or turn.now >= peer.since + turn.rules.dead_after


def _prepared(turn: Transition, member: Member) -> bool:
    """Whether a new member's ranks are ready, or the startup deadline for them has passed."""
    if member.pod_uid == turn.state.me:
        return turn.state.prepared or turn.now >= turn.state.seen_at + turn.rules.startup_deadline
    peer, hello = turn.state.peers.get(member.pod_uid), turn.hello(member.pod_uid)
    if peer is None or hello is None:
        return False
    return hello.prepared or turn.now >= peer.since + turn.rules.startup_deadline


def _in_steps(membership: Membership, keep: list[Member], newcomers: list[Member]) -> tuple[Member, ...]:
    size = len(keep) + len(newcomers)
    capacity = size - size % membership.rules.replica_step - len(keep)
    return tuple(sorted([*keep, *newcomers[: max(capacity, 0)]]))


def _cause_of_end(turn: Transition) -> Incident | None:
    """Return the incident that ended the last started world; None if that world ended by agreement."""
    last = turn.started()
    own = next((incident for incident in turn.state.incidents if incident.attempt_id == last), None)
    if own is not None or last is None or turn.state.failed == last:
        return own
    failures = [
        hello.failure
        for uid in turn.state.peers
        if (hello := turn.hello(uid)) and hello.failed == last and hello.failure
    ]
    if turn.state.last_world is not None and sent_away(turn, turn.state.last_world):
        failures = [failure for failure in failures if failure.priority is not Priority.PEER_LOST]
    if not failures:
        return None
    root = min(failures, key=lambda failure: failure.rank_of_root)
    return Incident(attempt_id=last, failure=root, action=Remedy.WAIT, detected=root.at or turn.now)


def _try(
    turn: Transition,
    membership: Membership,
    chosen: tuple[Member, ...],
    incident: Incident | None,
    wait_seconds: float,
) -> Waiting | None:
    """Propose this world, and return None. If a rule forbids it, return the reason."""
    verdict = rules.may_be(membership, uids_of(chosen), turn.started(), turn.weakened)
    if not verdict.ok:
        return (Phase.AWAITING_FENCE if verdict.fence else Phase.WAITING), verdict.reason
    top = highest_accepted(turn)
    attempt = top.attempt + 1 if top is not None and top.generation == membership.generation else 1
    world = World(
        attempt_id=AttemptId(membership.generation, attempt),
        publication=membership.publication,
        members=chosen,
        coordinator=turn.state.me,
    )
    if incident is not None:
        remedy = Remedy.IN_PLACE if uids_of(chosen) >= _world_of(turn, incident.attempt_id) else Remedy.SHRINK
        incident = replace(incident, action=remedy)
    turn.set(
        proposal=Proposal(
            world=world,
            incident=incident,
            since=turn.now,
            sent=turn.now,
            until=turn.now + membership.rules.accept_deadline + wait_seconds,
        )
    )
    turn.do(
        OpenStore(
            attempt_id=world.attempt_id, beside=turn.attempt.world.attempt_id if turn.attempt is not None else None
        )
    )
    send_proposal(turn, world.uids)
    consider(turn, turn.state.me, Propose(world=world, started=turn.started(), incident=incident))
    return None


def _world_of(turn: Transition, attempt_id: AttemptId) -> frozenset[str]:
    known = (turn.state.accepted_world, turn.state.last_world)
    return next((world.uids for world in known if world is not None and world.attempt_id == attempt_id), frozenset())


def _trains(world: World, membership: Membership) -> str:
    return f"training with {len(world.members)} of {len(membership.members)} workers"
