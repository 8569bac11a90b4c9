"""Restart budgets: when another attempt is no use, and the job has failed."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.protocol import Cause, ExitCode
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident
from holdfast.launcher.membership.attempt_end.leaving import leave
from holdfast.launcher.membership.document import Budget
from holdfast.launcher.membership.events import Exit
from holdfast.launcher.membership.messages import Failure, GiveUp, Incident, Remedy
from holdfast.launcher.membership.restart_rules import FAIL_JOB
from holdfast.launcher.membership.state import Attempt
from holdfast.launcher.membership.transition import Transition


def speaks(turn: Transition, attempt: Attempt) -> bool:
    """The lowest live member of the ended world judges its budget, for all."""
    alive = [m.pod_uid for m in attempt.world.members if turn.up(m.pod_uid)]
    return bool(alive) and alive[0] == turn.state.me


def give_up_if_due(turn: Transition, incident: Incident, *, again: bool) -> None:
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
