"""Decides which proposals are accepted. Pure; rules 1, 3, 4 and 7 of the protocol.

Invariants:

- An acceptance is sent only when no local rank of a lower attempt is left.
- The accepted attempt ID never decreases.
- A launcher that trains in a healthy attempt leaves it only for a world that keeps all members that stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.attempt import AttemptId, highest
from holdfast.launcher.membership import quorum as rules
from holdfast.launcher.membership.attempt_end.drain import attempt_ended_remotely
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident, close_attempt
from holdfast.launcher.membership.document import Member
from holdfast.launcher.membership.events import QuiesceRanks
from holdfast.launcher.membership.formation.proposal_answers import accepted_by, withdraw
from holdfast.launcher.membership.messages import Accept, Propose, World
from holdfast.launcher.membership.state import Attempt, Pending, Phase, Quiesce
from holdfast.launcher.membership.transition import Transition

Waiting = tuple[Phase, str]


def held(turn: Transition) -> Waiting | None:
    """Return why this launcher proposes and accepts no world at all, or None."""
    state, membership = turn.state, turn.membership
    if not state.ready:
        return Phase.STARTING, "the control channel is not open yet"
    if membership is None:
        return Phase.WAITING, "waits for the first membership"
    if state.conflict == membership.generation:
        return Phase.WAITING, f"generation {membership.generation} was published twice; waits for a higher one"
    if state.foreign:
        claim = max(state.foreign)
        return Phase.WAITING, (
            f"claim {claim.attempt_id} of job {claim.job_uid}, publication {claim.publication}, is on the checkpoint"
            " folder; waits for a generation above it"
        )
    gap = rules.missing_generation(membership, turn.started())
    if gap is not None:
        return Phase.WAITING, f"the membership does not list generation {gap}, which may still hold a world"
    top = highest_accepted(turn)
    if top is not None and top.generation > membership.generation:
        return Phase.WAITING, f"{top} is accepted; waits for the membership of generation {top.generation}"
    if membership.member(state.me) is None:
        return Phase.WAITING, f"on standby: not a member of generation {membership.generation}"
    return None


def known_to_have_failed(turn: Transition, attempt_id: AttemptId) -> bool:
    """Whether this attempt or a later one has failed, here or as live peers report."""
    own = turn.state.failed
    return (own is not None and own >= attempt_id) or any(
        hello.failed is not None and hello.failed >= attempt_id and not hello.draining
        for uid in turn.state.peers
        if (hello := turn.hello(uid))
    )


def highest_accepted(turn: Transition) -> AttemptId | None:
    """Return the highest attempt that was accepted, refused for a higher one, or started, here or at a peer."""
    peers = [hello.accepted for uid in turn.state.peers if (hello := turn.hello(uid))]
    return highest(turn.state.accepted, turn.state.refused, turn.started(), *peers)


def consider(turn: Transition, sender: str, proposal: Propose) -> None:
    """Process a proposal: refuse it, or begin to accept it."""
    world, state = proposal.world, turn.state
    if state.accepted == world.attempt_id and state.accepted_world == world:
        if state.pending is None:
            _answer(turn, world)
        return
    if state.pending is not None and state.pending.world == world:
        return
    attempt_ended_remotely(turn, proposal.incident)
    reason = _objection(turn, proposal)
    if reason is not None:
        turn.refuse(sender, world.attempt_id, reason)
        if sender == state.me:
            withdraw(turn, turn.rules.resend)
        return
    turn.set(pending=Pending(world=world, incident=proposal.incident))
    if _must_finish(turn, proposal):
        _quiesce(turn, f"grow-{world.attempt_id}", "a worker joins")
    else:
        _promise(turn)


def _objection(turn: Transition, proposal: Propose) -> str | None:
    """Return why this proposal is not accepted, or None."""
    state, world, membership = turn.state, proposal.world, turn.membership
    if state.drain is not None or state.leaving is not None:
        return "leaving"
    if _confirmed_to_live_coordinator(turn):
        return "all workers are finished; the job completes"
    if membership is None or membership.generation < world.attempt_id.generation:
        return f"generation {world.attempt_id.generation} is not known to this worker"
    if membership.generation > world.attempt_id.generation:
        return f"generation {membership.generation} is published"
    if membership.publication != world.publication:
        turn.set(conflict=membership.generation)
    if (waiting := held(turn)) is not None:
        return waiting[1]
    if state.me not in world.uids:
        return "not a member of that world"
    if state.accepted is not None and world.attempt_id <= state.accepted:
        return f"{state.accepted} is accepted"
    verdict = rules.may_be(membership, world.uids, highest(turn.started(), proposal.started), turn.weakened)
    return verdict.reason if not verdict.ok else _still_training(turn, proposal)


def _confirmed_to_live_coordinator(turn: Transition) -> bool:
    attempt = turn.attempt
    if turn.state.confirmed is None or attempt is None:
        return False
    return turn.up(attempt.world.coordinator)


def _healthy(turn: Transition, proposal: Propose) -> bool:
    """Whether this launcher's attempt continues: neither this launcher nor the proposal reports a failure."""
    attempt = turn.attempt
    if attempt is None or attempt.failures:
        return False
    return proposal.incident is None or proposal.incident.attempt_id < attempt.world.attempt_id


def _still_training(turn: Transition, proposal: Propose) -> str | None:
    attempt = turn.attempt
    if attempt is None or not _healthy(turn, proposal):
        return None
    if attempt.done:
        return f"{attempt.world.attempt_id} is finished on this worker"
    if turn.state.saving and proposal.world.coordinator not in attempt.world.uids:  # a non-member proposes
        return f"{attempt.world.attempt_id} is writing a checkpoint"
    left_out = [uid for uid in attempt.world.uids - proposal.world.uids if not turn.on_its_way_out(uid)]
    if not left_out:
        return None
    return f"{attempt.world.attempt_id} is training, and the proposal excludes {', '.join(sorted(left_out))}"


def _must_finish(turn: Transition, proposal: Propose) -> bool:
    """Whether steps could be lost: some were made, and no agreed end followed."""
    attempt = turn.attempt
    if attempt is None or not _healthy(turn, proposal):
        return False
    return attempt.step is not None and attempt.quiesced_at is None


def _quiesce(turn: Transition, request: str, reason: str) -> None:
    attempt = turn.attempt
    if attempt is not None and attempt.quiesce is None:
        until = turn.now + turn.rules.checkpoint_deadline
        turn.set_attempt(quiesce=Quiesce(id=request, reason=reason, until=until))
        turn.do(QuiesceRanks(attempt_id=attempt.world.attempt_id, id=request, reason=reason, commit=False))


def accept(turn: Transition) -> None:
    """Continue a pending acceptance: wait for the agreed end or its deadline, end the old ranks, send the answer."""
    pending, attempt = turn.state.pending, turn.attempt
    if pending is None:
        return
    if not pending.promised and not _waits_for_commit(turn, attempt):
        _promise(turn)
        pending = turn.state.pending
    if pending is not None and pending.promised and turn.state.ranks is None:
        turn.set(pending=None)
        _answer(turn, pending.world)


def _waits_for_commit(turn: Transition, attempt: Attempt | None) -> bool:
    if attempt is None or attempt.failures or attempt.quiesced_at is not None or attempt.quiesce is None:
        return False
    return turn.now < attempt.quiesce.until


def _promise(turn: Transition) -> None:
    """Rule 1: from here on, this launcher has left all lower attempts permanently."""
    pending = turn.state.pending
    if pending is None:
        return
    if pending.incident is not None:
        adopt_incident(turn, pending.incident)
    close_attempt(turn, f"{pending.world.attempt_id} follows")
    turn.set(
        accepted=pending.world.attempt_id,
        accepted_world=pending.world,
        pending=replace(pending, promised=True),
        confirmed=None,
        idle_since=turn.now,
    )


def _answer(turn: Transition, world: World) -> None:
    if world.coordinator == turn.state.me:
        accepted_by(turn, turn.state.me, world)
    else:
        turn.send(world.coordinator, Accept(world=world))


def uids_of(members: Iterable[Member]) -> frozenset[str]:
    return frozenset(member.pod_uid for member in members)
