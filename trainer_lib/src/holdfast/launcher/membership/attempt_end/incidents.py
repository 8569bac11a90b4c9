"""Incidents of ended attempts. Each is open until a later attempt makes its first step. Rules 8 and 9."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.attempt import AttemptId
from holdfast.launcher.membership.events import StepMade
from holdfast.launcher.membership.messages import Failure, Incident, Priority
from holdfast.launcher.membership.oom_incidents import better, noted
from holdfast.launcher.membership.transition import Transition

REMEMBERED = 1000


def close_attempt(turn: Transition, reason: str) -> None:
    """End the attempt on this launcher. Its ranks must leave the attempt."""
    if turn.attempt is not None:
        world = turn.attempt.world
        turn.set(attempt=None, last=world.attempt_id, last_world=world, ended_at=turn.now)
        turn.set(confirmed=None, confirmations=frozenset())
    turn.stop_ranks(reason)


def adopt_incident(turn: Transition, incident: Incident) -> None:
    """Record an incident under its attempt ID.

    It replaces the local incident of this attempt, unless that one names a better cause. A further end that one
    exhaustion of memory causes is recorded as part of that exhaustion, and is not counted.
    """
    before = next((known for known in turn.state.incidents if known.attempt_id == incident.attempt_id), None)
    incident = replace(incident, failure=better(before.failure if before else None, incident.failure))
    exhausted = noted(turn.state.exhausted, incident)
    turn.set(exhausted=exhausted)
    incident = replace(
        incident, part_of=exhausted.counted_with(incident.attempt_id) if exhausted is not None else None
    )
    _count(turn, incident)
    if turn.state.failed is None or incident.attempt_id >= turn.state.failed:
        turn.set(failed=incident.attempt_id, failure=incident.failure)
    if turn.membership is not None and incident.attempt_id in turn.membership.acknowledged:
        return
    if before is not None:
        incident = replace(
            incident, resumed=before.resumed, lost_steps=before.lost_steps, restored_from=before.restored_from
        )
    others = tuple(known for known in turn.state.incidents if known.attempt_id != incident.attempt_id)
    turn.set(incidents=(*others, incident))


def _count(turn: Transition, incident: Incident) -> None:
    """Count an incident once, under the best known cause."""
    state, attempt_id, cause = turn.state, incident.attempt_id, incident.failure.cause
    if attempt_id in state.counted:
        turn.set(history=tuple((known, cause if known == attempt_id else c, at) for known, c, at in state.history))
        return
    counts = incident.part_of is None and not turn.rules.restart.ignores(incident.failure)
    new = ((attempt_id, cause, turn.now),) if counts else ()
    turn.set(counted=state.counted | {attempt_id}, history=(*state.history, *new)[-REMEMBERED:])


def revise_incident(turn: Transition, attempt_id: AttemptId, failure: Failure) -> None:
    """Correct the cause of the last attempt's end: memory was exhausted, but launchers that lost a peer reported
    first."""
    state = turn.state
    peer_lost_over_oom = state.failure is not None and state.failure.priority is Priority.PEER_LOST
    if state.failed != attempt_id or not peer_lost_over_oom or failure.priority is not Priority.OOM:
        return
    known = next((incident for incident in state.incidents if incident.attempt_id == attempt_id), None)
    if known is not None:
        judged = turn.rules.restart.judged(failure)
        adopt_incident(turn, replace(known, failure=replace(judged, step=known.failure.step)))


def resumed(turn: Transition, event: StepMade) -> None:
    """Process a step. The first step of an attempt closes the earlier incidents."""
    attempt = turn.attempt
    if attempt is None or attempt.world.attempt_id != event.attempt_id:
        return
    first = attempt.step is None
    turn.set_attempt(step=event.step, restored=event.restored, origin=event.origin, entered=True)
    if not first:
        return
    incidents = turn.state.incidents
    closed = tuple(_closed(incident, incidents, event, turn.now) for incident in incidents)
    turn.set(incidents=closed, fruitless=0)


def _closed(incident: Incident, incidents: tuple[Incident, ...], event: StepMade, now: float) -> Incident:
    if incident.resumed is not None or incident.attempt_id >= event.attempt_id:
        return incident
    lost_steps = _lost_steps(incident, incidents, event.restored)
    return replace(incident, resumed=now, lost_steps=lost_steps, restored_from=event.origin or None)


def _lost_steps(incident: Incident, incidents: tuple[Incident, ...], restored: int) -> int | None:
    """Return the number of lost steps; None if it is unknown.

    An attempt without a step loses the steps of an earlier attempt. If an open incident of that attempt has a step,
    its own count includes them. If that attempt has no incident, the count is unknown.
    """
    if incident.failure.step is not None:
        return max(incident.failure.step - restored, 0)
    before = (known for known in incidents if known.resumed is None and known.attempt_id < incident.attempt_id)
    return 0 if any(known.failure.step is not None for known in before) else None
