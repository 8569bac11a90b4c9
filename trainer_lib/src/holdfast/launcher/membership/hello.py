"""The reports of this launcher about itself: its `Hello` to peers, and its phase in the status."""

from __future__ import annotations

from holdfast.launcher.membership.attempt_end import drain, root_cause
from holdfast.launcher.membership.events import Note
from holdfast.launcher.membership.formation import acceptance
from holdfast.launcher.membership.messages import Hello
from holdfast.launcher.membership.state import Phase
from holdfast.launcher.membership.transition import Transition


def send_hello(turn: Transition) -> None:
    """Send the complete state to all peers: on every change, and once per second."""
    hello = _present(turn)
    if hello == turn.state.hello and turn.now < turn.state.hello_at + turn.rules.resend:
        return
    turn.set(hello=hello, hello_at=turn.now)
    turn.broadcast(hello)


def _present(turn: Transition) -> Hello:
    state, attempt = turn.state, turn.attempt
    failed, failure = state.failed, state.failure
    drained = root_cause.drain_incident(turn)
    if drained is not None:
        failed, failure = drained
    elif attempt is not None and attempt.failures:
        failed, failure = attempt.world.attempt_id, root_cause.root_cause(turn, attempt)
    return Hello(
        generation=state.membership.generation if state.membership else 0,
        revision=state.membership.revision if state.membership else 0,
        publication=state.membership.publication if state.membership else "",
        accepted=state.accepted,
        started=state.started,
        world=attempt.world if attempt is not None and not attempt.failures else None,
        left=state.last,
        ready=state.ready and state.leaving is None,
        prepared=state.prepared,
        draining=state.drain is not None,
        stays=drain.could_postpone(turn),
        notice=drain.notice(turn),
        done=attempt is not None and attempt.done,
        failed=failed,
        failure=failure,
        foreign=state.foreign,
        stalls=state.stalls,
        held=state.held,
    )


def describe(turn: Transition, waiting: acceptance.Waiting) -> None:
    """Update phase and message, and log a new phase."""
    phase, message = _phase(turn, waiting)
    if (phase, message) == (turn.state.phase, turn.state.message):
        return
    if phase != turn.state.phase:
        turn.do(Note(phase=phase, message=message))
    turn.set(phase=phase, message=message)


def _phase(turn: Transition, waiting: acceptance.Waiting) -> acceptance.Waiting:
    state = turn.state
    if state.leaving is not None:
        if state.leaving.code == 0:
            return Phase.COMPLETE, state.leaving.message
        return (Phase.FAILED if state.leaving.final else Phase.DRAINING), state.leaving.message
    if state.drain is not None:
        return Phase.DRAINING, f"writes a checkpoint and leaves: {state.drain.reason}"
    if state.pending is not None:
        return Phase.FORMING, f"changes to {state.pending.world.attempt_id}"
    if state.attempt is None and state.postponed is not None:
        return waiting[0], f"{waiting[1]}; then writes a checkpoint and leaves: {state.postponed.reason}"
    if state.attempt is None:
        return waiting
    if state.attempt.done:
        return Phase.RUNNING, "finished; waits for the others"
    size = len(state.membership.members) if state.membership else len(state.attempt.world.members)
    return Phase.RUNNING, f"training with {len(state.attempt.world.members)} of {size} workers"
