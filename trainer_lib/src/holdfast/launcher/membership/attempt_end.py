"""How attempts end: failures and their root, budgets, drains, foreign claims, completion. Pure; rules 8 and 9.

Invariants: an attempt ends once; one incident stands for one ended pair; `complete` is announced only by the
coordinator, when every member has confirmed that it is done and still in the attempt; a launcher exits only when
none of its ranks is left.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause, ExitCode
from holdfast.launcher.membership.document import Budget, Member
from holdfast.launcher.membership.events import DrainAsked, Exit, How, Note, QuiesceRanks, StepMade
from holdfast.launcher.membership.messages import (
    Complete,
    Confirm,
    Confirmed,
    Failure,
    GiveUp,
    Hello,
    Incident,
    Leaving,
    Notice,
    Priority,
    Remedy,
    World,
)
from holdfast.launcher.membership.oom_incidents import better, noted
from holdfast.launcher.membership.restart_rules import FAIL_JOB
from holdfast.launcher.membership.state import Attempt, Drain, Quiesce
from holdfast.launcher.membership.transition import DRAINED, Transition

LINGER = 2.0
REMEMBERED = 1000
MOVED_ON = "MemberMovedOn"
FOREIGN = "there are claims that the membership does not know"
_AGREED = "all ranks agreed to end the attempt"
_SENT_AWAY = "a worker of the attempt was told to leave"


# Failures


def settle_failures(turn: Transition) -> None:
    """End the attempt when its root cause is plain, or the others had time to say what they saw."""
    attempt = turn.attempt
    if attempt is None:
        return
    if not attempt.entered and attempt.step is None and turn.now >= attempt.since + turn.rules.startup_deadline:
        turn.fail(_not_entered(turn))
        attempt = turn.attempt or attempt
    if attempt.failed_at is None:
        return
    plain = any(failure.priority <= Priority.KILLED for failure in attempt.failures)
    if not plain and turn.now < attempt.failed_at + turn.rules.settle:
        return
    root = root_cause(turn, attempt)
    if root.priority is Priority.PEER_LOST and sent_away(turn, attempt.world):
        close_attempt(turn, _SENT_AWAY)
    elif _overtaken(attempt, root):
        _back_off(turn, attempt, root)
        close_attempt(turn, root.message)
    else:
        _end(turn, attempt, turn.rules.restart.judged(root))


def _overtaken(attempt: Attempt, root: Failure) -> bool:
    """Whether a member accepted a higher world before this one made a step: nobody failed, and nothing is lost."""
    moved_on = any(failure.reason == MOVED_ON for failure in attempt.failures)
    return moved_on and attempt.step is None and root.priority is Priority.PEER_LOST


def _not_entered(turn: Transition) -> Failure:
    return Failure(
        cause=Cause.INFRASTRUCTURE,
        reason="EntryDeadline",
        message=f"the local ranks did not enter the attempt within {turn.rules.startup_deadline:.0f} s",
        priority=Priority.DEADLINE,
        at=turn.now,
    )


def root_cause(turn: Transition, attempt: Attempt) -> Failure:
    """The attempt's failure with the lowest priority number, the earliest of equals."""
    root = min(attempt.failures, key=lambda failure: failure.rank_of_root)
    drained = _drain_failure(turn, attempt)
    if root.priority is Priority.PEER_LOST and drained is not None:
        root = drained
    elif root.priority is Priority.PEER_LOST and _someone_done(turn, attempt):
        root = replace(
            root,
            cause=Cause.APPLICATION,
            reason="EndedEarly",
            message=f"a rank ended normally while others still had steps to make ({root.message})",
        )
    steps = [step for step in (root.step, attempt.step) if step is not None]
    return replace(root, step=max(steps, default=None))


def _someone_done(turn: Transition, attempt: Attempt) -> bool:
    pair = attempt.world.pair
    said = [hello for uid in attempt.world.uids if (hello := turn.hello(uid))]
    return attempt.done or any(hello.done and hello.world and hello.world.pair == pair for hello in said)


def _end(turn: Transition, attempt: Attempt, root: Failure) -> None:
    pair = attempt.world.pair
    again = attempt.step is None and _is_same_mistake(turn.state.failure, root)
    turn.set(failed=pair, failure=root)
    _back_off(turn, attempt, root)
    incident = Incident(pair=pair, failure=root, action=Remedy.WAIT, detected=root.at or turn.now)
    adopt_incident(turn, incident)
    close_attempt(turn, root.message)
    if _speaks(turn, attempt):
        _give_up_if_due(turn, incident, again=again)


def _is_same_mistake(before: Failure | None, root: Failure) -> bool:
    return before is not None and bool(root.mistake) and before.mistake == root.mistake


def _back_off(turn: Transition, attempt: Attempt, root: Failure) -> None:
    fruitless = turn.state.fruitless + 1 if attempt.step is None else 0
    blamed = root.cause in (Cause.APPLICATION, Cause.OOM)
    doublings = fruitless if blamed else fruitless - 1
    pause = min(turn.rules.backoff_initial * 2.0 ** min(doublings, 30), turn.rules.backoff_max)
    turn.set(fruitless=fruitless, not_before=turn.now + (pause if blamed or fruitless else 0.0))


def close_attempt(turn: Transition, reason: str) -> None:
    """The attempt is over here, for whatever reason: its ranks must leave it."""
    if turn.attempt is not None:
        world = turn.attempt.world
        turn.set(attempt=None, last=world.pair, last_world=world, ended_at=turn.now)
        turn.set(confirmed=None, confirmations=frozenset())
    turn.stop_ranks(reason)


def adopt_incident(turn: Transition, incident: Incident) -> None:
    """Record an incident under its pair; the proposer's word replaces our own first view, unless that knew better.

    What is one more end of an exhaustion of memory is told as part of it, and counts nothing by itself.
    """
    before = next((known for known in turn.state.incidents if known.pair == incident.pair), None)
    incident = replace(incident, failure=better(before.failure if before else None, incident.failure))
    exhausted = noted(turn.state.exhausted, incident)
    turn.set(exhausted=exhausted)
    incident = replace(incident, part_of=exhausted.whole(incident.pair) if exhausted is not None else None)
    _count(turn, incident)
    if turn.state.failed is None or incident.pair >= turn.state.failed:
        turn.set(failed=incident.pair, failure=incident.failure)
    if turn.membership is not None and incident.pair in turn.membership.acknowledged:
        return
    if before is not None:
        incident = replace(
            incident, resumed=before.resumed, lost_steps=before.lost_steps, restored_from=before.restored_from
        )
    others = tuple(known for known in turn.state.incidents if known.pair != incident.pair)
    turn.set(incidents=(*others, incident))


def _count(turn: Transition, incident: Incident) -> None:
    """Once, under the cause that is known best."""
    state, pair, cause = turn.state, incident.pair, incident.failure.cause
    if pair in state.counted:
        turn.set(history=tuple((known, cause if known == pair else c, at) for known, c, at in state.history))
        return
    counts = incident.part_of is None and not turn.rules.restart.ignores(incident.failure)
    new = ((pair, cause, turn.now),) if counts else ()
    turn.set(counted=state.counted | {pair}, history=(*state.history, *new)[-REMEMBERED:])


def know_better(turn: Transition, pair: AttemptId, failure: Failure) -> None:
    """Why the last attempt ended was not known when it ended: memory was exhausted, and those who miss a peer spoke
    first."""
    state = turn.state
    blind = state.failure is not None and state.failure.priority is Priority.PEER_LOST
    if state.failed != pair or not blind or failure.priority is not Priority.OOM:
        return
    known = next((incident for incident in state.incidents if incident.pair == pair), None)
    if known is not None:
        judged = turn.rules.restart.judged(failure)
        adopt_incident(turn, replace(known, failure=replace(judged, step=known.failure.step)))


def resumed(turn: Transition, event: StepMade) -> None:
    """The first step of an attempt closes the incidents before it."""
    attempt = turn.attempt
    if attempt is None or attempt.world.pair != event.pair:
        return
    first = attempt.step is None
    turn.set_attempt(step=event.step, restored=event.restored, origin=event.origin, entered=True)
    if not first:
        return
    incidents = turn.state.incidents
    closed = tuple(_closed(incident, incidents, event, turn.now) for incident in incidents)
    turn.set(incidents=closed, fruitless=0)


def _closed(incident: Incident, incidents: tuple[Incident, ...], event: StepMade, now: float) -> Incident:
    if incident.resumed is not None or incident.pair >= event.pair:
        return incident
    lost_steps = _lost_steps(incident, incidents, event.restored)
    return replace(incident, resumed=now, lost_steps=lost_steps, restored_from=event.origin or None)


def _lost_steps(incident: Incident, incidents: tuple[Incident, ...], restored: int) -> int | None:
    """Of an attempt that made no step, what is lost was made before it: by one whose incident says so and is as open,
    or by one that ended without an incident, of which nothing is known here."""
    if incident.failure.step is not None:
        return max(incident.failure.step - restored, 0)
    before = (known for known in incidents if known.resumed is None and known.pair < incident.pair)
    return 0 if any(known.failure.step is not None for known in before) else None


# Budgets


def _speaks(turn: Transition, attempt: Attempt) -> bool:
    """The lowest live member of the ended world judges its budget, for all."""
    alive = [m.pod_uid for m in attempt.world.members if turn.up(m.pod_uid)]
    return bool(alive) and alive[0] == turn.state.me


def _give_up_if_due(turn: Transition, incident: Incident, *, again: bool) -> None:
    failure = incident.failure
    why = _forbidden(turn, failure) or _spent(turn, failure.cause) or (_made_again(turn, failure) if again else "")
    if why:
        message = f"{incident.failure.message}; {why}"
        incident = replace(incident, action=Remedy.FAIL)
        turn.broadcast(GiveUp(incident=incident, message=message))
        give_up(turn, incident, message)


def _forbidden(turn: Transition, failure: Failure) -> str:
    """What a rule of the job says against another try."""
    rule = turn.rules.restart.match(failure)
    return f"rule {rule.name} says {FAIL_JOB}" if rule is not None and rule.action == FAIL_JOB else ""


def _made_again(turn: Transition, failure: Failure) -> str:
    """Why another try is no use, unless a rule of the job says what to do about this failure, here or elsewhere."""
    restart = turn.rules.restart
    if restart.elsewhere or restart.match(failure) is not None:
        return ""
    return "the attempt before ended with the same error at the same place, and no step was made since: correct it"


def _spent(turn: Transition, cause: Cause) -> str:
    """Which budget is spent. Where a rule may change the cause that only the operator can judge, it judges."""
    for budget in turn.rules.budgets if not turn.rules.restart.elsewhere else ():
        if budget.cause is cause and count(turn, budget) > budget.max_restarts:
            return f"more than {budget.max_restarts} incidents of cause {cause} within {budget.window:.0f} s"
    return ""


def count(turn: Transition, budget: Budget) -> int:
    """Incidents of a cause in its window: as seen here, or as the operator counts, whichever is more."""
    state, membership = turn.state, turn.membership
    own = sum(1 for _, cause, at in state.history if cause is budget.cause and at > turn.now - budget.window)
    counted = membership.restarts.get(budget.cause, 0) if membership else 0
    ignores = turn.rules.restart.ignores
    apart = (incident.failure for incident in state.incidents if incident.part_of is None)
    told = (failure for failure in apart if not ignores(failure))
    fresh = sum(1 for failure in told if failure.cause is budget.cause)
    return max(own, counted + fresh)


def give_up(turn: Transition, incident: Incident, message: str) -> None:
    """The job has failed for good."""
    adopt_incident(turn, incident)
    failure = incident.failure
    leave(
        turn,
        Exit(
            code=failure.exit_code or int(ExitCode.LAUNCHER_FAULT),
            cause=failure.cause,
            reason=failure.reason,
            message=message,
            traceback=failure.traceback,
            final=True,
        ),
    )


# Foreign claims


def stop_for(turn: Transition, claims: tuple[Claim, ...]) -> None:
    """Claims that the membership does not know: no attempt goes on beside them."""
    foreign = _unknown(turn, (*turn.state.foreign, *claims))
    turn.set(foreign=foreign)
    if foreign and turn.attempt is not None:
        close_attempt(turn, FOREIGN)


def _unknown(turn: Transition, claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    membership = turn.membership
    if membership is None:
        return tuple(sorted(set(claims)))
    known = frozenset(membership.claims)
    return tuple(sorted({c for c in claims if c not in known and c.pair.generation >= membership.generation}))


# Drain


def begin_drain(turn: Transition, event: DrainAsked) -> None:
    """This launcher must leave: an agreed commit first if there is something to lose."""
    until = event.until if event.until is not None else turn.now + turn.rules.checkpoint_deadline
    known, postponed = turn.state.drain, turn.state.postponed
    if known is not None:
        turn.set(drain=replace(known, until=min(known.until, until), node=known.node or event.node))
    elif postponed is not None and event.cause is not None:
        turn.set(postponed=replace(postponed, until=min(postponed.until, until), node=postponed.node or event.node))
    elif turn.state.leaving is None:
        _drain(turn, Drain(id=event.id, reason=event.reason, until=until, cause=event.cause, node=event.node))


def _drain(turn: Transition, drain: Drain) -> None:
    turn.set(drain=drain, postponed=None)
    attempt = turn.attempt
    if attempt is not None and _has_something_to_lose(attempt) and attempt.quiesce is None:
        turn.set_attempt(quiesce=Quiesce(id=drain.id, reason=drain.reason, until=drain.until))
        turn.do(QuiesceRanks(pair=attempt.world.pair, id=drain.id, reason=drain.reason, commit=True))


def postpone_drain(turn: Transition) -> None:
    """Another's failure ended the attempt before its agreed commit, and there is time for the next: be a member of it
    like any other, from the moment in which the failure is known, so that the others form it with us at once."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or attempt is None or not (attempt.failures and would_stay(turn)):
        return
    root = min(attempt.failures, key=lambda failure: failure.rank_of_root)
    me = attempt.world.member(turn.state.me)
    if root.priority is not Priority.PEER_LOST and root.pod and root.pod != me.pod:
        turn.set(drain=None, postponed=drain)
        left = drain.until - turn.now
        message = f"stays for the next attempt, at most {left:.0f} s, and commits there: {root.message}"
        turn.do(Note(phase=turn.state.phase, message=message))


def would_stay(turn: Transition) -> bool:
    """Whether a failure of the attempt puts the drain off: then the others may form the next world with us."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or attempt is None or drain.cause is None or turn.state.leaving is not None:
        return False
    unfinished = attempt.step is not None and attempt.quiesced_at is None and not attempt.done
    return unfinished and turn.now + turn.rules.accept_deadline <= drain.until


def hear_of_the_end(turn: Transition, incident: Incident | None) -> None:
    """A proposal may come before its sender's word that the attempt failed."""
    attempt = turn.attempt
    if turn.state.drain is not None and attempt is not None and incident and incident.pair == attempt.world.pair:
        turn.fail(incident.failure)
        postpone_drain(turn)


def heed_postponed(turn: Transition) -> None:
    """Ask the next attempt for its agreed commit once it made a step; leave if there is none for us, or no time."""
    drain, attempt = turn.state.postponed, turn.attempt
    if drain is None or turn.state.leaving is not None:
        return
    if attempt is None:
        due = _trains_without_us(turn)
    else:
        due = attempt.done or attempt.quiesced_at is not None or _has_something_to_lose(attempt)
    if due or turn.now >= drain.until:
        _drain(turn, drain)


def _trains_without_us(turn: Transition) -> bool:
    """Whether there is no next attempt to stay for: it was published, or it trains, without this worker."""
    me, membership, last = turn.state.me, turn.membership, turn.state.last
    if membership is not None and membership.member(me) is None:
        return True
    worlds = [hello.world for uid in turn.state.peers if (hello := turn.hello(uid)) and hello.world]
    return any(me not in world.uids and (last is None or world.pair > last) for world in worlds)


def _has_something_to_lose(attempt: Attempt) -> bool:
    return attempt.step is not None and not attempt.failures and attempt.quiesced_at is None and not attempt.done


def notice(turn: Transition) -> Notice | None:
    """What the other workers on this node must know: it goes as a whole."""
    drain = turn.state.drain
    if drain is None or not drain.node:
        return None
    return Notice(node=drain.node, id=drain.id, reason=drain.reason, until=drain.until)


def join_drain(turn: Transition, sender: str, hello: Hello) -> None:
    """A worker of our attempt leaves because its node goes: if it is our node too, we leave with it."""
    attempt, told = turn.attempt, hello.notice
    if attempt is None or told is None or not told.node or sender not in attempt.world.uids:
        return
    if attempt.world.member(turn.state.me).node == told.node:
        begin_drain(turn, DrainAsked(id=told.id, reason=told.reason, until=told.until, node=told.node))


def drain_incident(turn: Transition) -> tuple[AttemptId, Failure] | None:
    """What a draining launcher says of its attempt: nothing if the operator wanted it so."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or drain.cause is None or attempt is None:
        return None
    leaving = _leaving(attempt.world, attempt.world.member(turn.state.me), drain)
    names = ", ".join(member.pod or member.pod_uid for member in leaving)
    return attempt.world.pair, Failure(
        cause=drain.cause,
        reason=DRAINED,
        message=f"{names} {'leaves' if len(leaving) == 1 else 'leave'}: {drain.reason}",
        priority=Priority.MEMBER_LOST,
        pod=leaving[0].pod,
        node=leaving[0].node,
    )


def _leaving(world: World, me: Member, drain: Drain) -> tuple[Member, ...]:
    """Who leaves by this drain: each of them says the same, whoever heard of it first."""
    return tuple(member for member in world.members if drain.node and member.node == drain.node) or (me,)


def _drain_failure(turn: Transition, attempt: Attempt) -> Failure | None:
    """The drain that ends this attempt, ours or a member's, if it is an incident."""
    own = drain_incident(turn)
    if own is not None:
        return own[1]
    for uid in sorted(attempt.world.uids):
        peer = turn.state.peers.get(uid)
        said = peer.hello if peer else None
        if said and said.draining and said.failed == attempt.world.pair:
            return said.failure
    return None


def sent_away(turn: Transition, world: World) -> bool:
    """Whether a member leaves because the operator wants it so: that its ranks go, one sooner than the other, is no
    incident of those who have not heard yet that they leave too."""
    said = [peer.hello for uid in world.uids if (peer := turn.state.peers.get(uid)) and peer.hello]
    return any(hello.draining and not hello.ready and hello.failed != world.pair for hello in said)


def drains(turn: Transition, attempt: Attempt) -> bool:
    """Whether somebody is on the way out of this attempt."""
    said = [peer.hello for uid in attempt.world.uids if (peer := turn.state.peers.get(uid))]
    return turn.state.drain is not None or any(hello is not None and hello.draining for hello in said)


def settle_quiesced(turn: Transition) -> None:
    """An agreed commit ended the attempt: the drained leave, the others wait a moment for the next proposal."""
    attempt = turn.attempt
    if attempt is None or attempt.quiesced_at is None or turn.state.pending is not None:
        return
    if drains(turn, attempt):
        drained = _drain_failure(turn, attempt)
        if drained is not None:
            adopt_incident(turn, _drained(attempt, replace(drained, step=attempt.step), turn.now))
        close_attempt(turn, _AGREED)
    elif turn.now >= attempt.quiesced_at + turn.rules.accept_deadline:
        close_attempt(turn, _AGREED)


def _drained(attempt: Attempt, failure: Failure, now: float) -> Incident:
    return Incident(pair=attempt.world.pair, failure=failure, action=Remedy.SHRINK, detected=failure.at or now)


def settle_drain(turn: Transition) -> None:
    """A draining launcher leaves when its attempt is over, has nothing to lose, or the time is up."""
    drain, attempt = turn.state.drain, turn.attempt
    if drain is None or turn.state.leaving is not None:
        return
    waits = attempt is not None and (_has_something_to_lose(attempt) or attempt.done) and turn.now < drain.until
    # Who only misses a peer hears first, for the moment of the settle, whether that one failed.
    unsettled = attempt is not None and would_stay(turn) and _blind(attempt)
    if not waits and not unsettled:
        _break_off(turn)
        cause = drain.cause
        message = f"left on request: {drain.reason}"
        leave(turn, Exit(code=int(ExitCode.LEFT_ON_REQUEST), cause=cause, reason=DRAINED, message=message))


def _blind(attempt: Attempt) -> bool:
    failures = attempt.failures
    return bool(failures) and all(failure.priority is Priority.PEER_LOST for failure in failures)


def _break_off(turn: Transition) -> None:
    """No agreed commit ended the attempt in time: what was made since the last one is lost, and is counted."""
    attempt, drained = turn.attempt, drain_incident(turn)
    if attempt is None or attempt.done or drained is None:
        return
    failure = root_cause(turn, attempt) if attempt.failures else replace(drained[1], step=attempt.step)
    adopt_incident(turn, _drained(attempt, failure, turn.now))


# Completion


def complete(turn: Transition) -> None:
    """Coordinator: when all are done, ask all once more, and only then announce it."""
    attempt = turn.attempt
    if attempt is None or attempt.world.coordinator != turn.state.me or turn.state.leaving is not None:
        return
    if not attempt.done or not all(_done(turn, attempt, uid) for uid in attempt.world.uids - {turn.state.me}):
        return
    if turn.state.confirmed is None:
        turn.set(confirmed=attempt.world.pair)
    waiting = attempt.world.uids - turn.state.confirmations - {turn.state.me}
    if not waiting:
        _announce(turn, attempt)
    elif turn.now >= turn.state.confirm_sent + turn.rules.resend:
        turn.set(confirm_sent=turn.now)
        for uid in sorted(waiting):
            turn.send(uid, Confirm(pair=attempt.world.pair))


def _done(turn: Transition, attempt: Attempt, uid: str) -> bool:
    hello = turn.hello(uid)
    return hello is not None and hello.done and hello.world is not None and hello.world.pair == attempt.world.pair


def _announce(turn: Transition, attempt: Attempt) -> None:
    pair = attempt.world.pair
    turn.set(complete=pair)
    turn.broadcast(Complete(pair=pair))
    leave(turn, _completed(), linger=LINGER)


def _completed() -> Exit:
    return Exit(code=int(ExitCode.COMPLETE), reason="Complete", message="the job is complete", final=True)


def confirm(turn: Transition, sender: str, pair: AttemptId) -> None:
    """Member: still in the attempt, done, and on no way out of it."""
    attempt = turn.attempt
    if attempt is None or attempt.world.pair != pair or attempt.world.coordinator != sender:
        return
    if attempt.done and not attempt.failures and turn.state.pending is None and turn.state.accepted == pair:
        turn.set(confirmed=pair)
        turn.send(sender, Confirmed(pair=pair))


def confirmed_by(turn: Transition, sender: str, pair: AttemptId) -> None:
    """Coordinator: one more member confirmed."""
    if turn.attempt is not None and turn.attempt.world.pair == pair and sender in turn.attempt.world.uids:
        turn.set(confirmations=turn.state.confirmations | {sender})


def completed(turn: Transition, pair: AttemptId) -> None:
    """The job is complete, says its coordinator."""
    turn.set(complete=pair)
    leave(turn, _completed())


# Leaving


def leave(turn: Transition, exit_: Exit, linger: float = 0.0) -> None:
    """Exit as soon as no local rank is left and the linger is over."""
    if turn.state.leaving is None:
        turn.set(leaving=exit_, leave_at=turn.now + linger, proposal=None, pending=None)


def settle_leaving(turn: Transition) -> None:
    """Say goodbye and go."""
    leaving, leave_at = turn.state.leaving, turn.state.leave_at
    if leaving is None or turn.state.exit is not None or leave_at is None:
        return
    if turn.attempt is not None and (leaving.code != ExitCode.COMPLETE):
        close_attempt(turn, leaving.message)
    turn.stop_ranks(leaving.message)
    if turn.state.ranks is None and (turn.now >= leave_at or not any(turn.up(uid) for uid in turn.state.peers)):
        turn.broadcast(Leaving(code=leaving.code))
        turn.do(leaving)
        turn.set(exit=leaving)


def left(turn: Transition, sender: str, code: int) -> None:
    """A peer says goodbye; its channel is as good as closed."""
    peer = turn.state.peers.get(sender)
    if peer is None:
        return
    if code == ExitCode.COMPLETE and turn.attempt is not None and sender in turn.attempt.world.uids:
        completed(turn, turn.attempt.world.pair)
    turn.set_peer(sender, replace(peer, up=False, since=turn.now, how=How.LEFT))
