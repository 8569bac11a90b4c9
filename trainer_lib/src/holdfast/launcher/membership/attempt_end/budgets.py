"""Restart budgets: decides when the job has failed because another attempt cannot help."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from holdfast.core.protocol import BAD_SAMPLES, Cause, ExitCode
from holdfast.launcher.membership.attempt_end.incidents import adopt_incident
from holdfast.launcher.membership.attempt_end.leaving import leave
from holdfast.launcher.membership.document import Budget
from holdfast.launcher.membership.events import Exit
from holdfast.launcher.membership.messages import Failure, GiveUp, Incident, Remedy
from holdfast.launcher.membership.restart_rules import FAIL_JOB
from holdfast.launcher.membership.state import Attempt
from holdfast.launcher.membership.transition import Transition


def speaks(turn: Transition, attempt: Attempt) -> bool:
    """Whether this launcher judges the budget for all: it has the lowest index of the ended world's live members."""
    alive = [m.pod_uid for m in attempt.world.members if turn.up(m.pod_uid)]
    return bool(alive) and alive[0] == turn.state.me


def give_up_if_due(turn: Transition, incident: Incident, *, again: bool) -> None:
    failure = incident.failure
    why = (
        _forbidden(turn, failure)
        or _guarded(turn, failure)
        or _spent(turn, failure.cause)
        or (_made_again(turn, failure) if again else "")
    )
    if why:
        message = f"{incident.failure.message}; {why}"
        incident = replace(incident, action=Remedy.FAIL)
        turn.broadcast(GiveUp(incident=incident, message=message))
        give_up(turn, incident, message)


def _forbidden(turn: Transition, failure: Failure) -> str:
    """Return why a restart rule of the job forbids another attempt; "" if none does."""
    rule = turn.rules.restart.match(failure)
    return f"rule {rule.name} has the action {FAIL_JOB}" if rule is not None and rule.action == FAIL_JOB else ""


_FINAL: Final = {
    str(Cause.NON_FINITE): "another attempt would meet the same numbers",
    BAD_SAMPLES: "another attempt would meet the same samples",
}
"""Why an error of the guards fails the job, by its reason."""


def _guarded(turn: Transition, failure: Failure) -> str:
    """Return why an error of the guards fails the job; "" if a rule, here or at the operator, may cover it."""
    return "" if _may_cover(turn, failure) else _FINAL.get(failure.reason, "")


def _may_cover(turn: Transition, failure: Failure) -> bool:
    restart = turn.rules.restart
    return restart.elsewhere or restart.match(failure) is not None


def _made_again(turn: Transition, failure: Failure) -> str:
    """Return why a repeated error fails the job; "" if a restart rule, here or at the operator, may cover it."""
    if _may_cover(turn, failure):
        return ""
    return "the previous attempt ended with the same error at the same line, with no step in between: fix the error"


def _spent(turn: Transition, cause: Cause) -> str:
    """Return which budget is exceeded; "" if the operator judges, because its rules may change the cause."""
    for budget in turn.rules.budgets if not turn.rules.restart.elsewhere else ():
        if budget.cause is cause and count(turn, budget) > budget.max_restarts:
            return f"more than {budget.max_restarts} incidents of cause {cause} within {budget.window:.0f} s"
    return ""


def count(turn: Transition, budget: Budget) -> int:
    """Return the incidents of a cause in its window: the local count or the operator's count, whichever is larger."""
    state, membership = turn.state, turn.membership
    own = sum(1 for _, cause, at in state.history if cause is budget.cause and at > turn.now - budget.window)
    counted = membership.restarts.get(budget.cause, 0) if membership else 0
    ignores = turn.rules.restart.ignores
    apart = (incident.failure for incident in state.incidents if incident.part_of is None)
    told = (failure for failure in apart if not ignores(failure))
    fresh = sum(1 for failure in told if failure.cause is budget.cause)
    return max(own, counted + fresh)


def give_up(turn: Transition, incident: Incident, message: str) -> None:
    """Fail the job permanently."""
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
