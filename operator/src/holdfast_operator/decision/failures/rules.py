"""Match ``spec.recovery.rules``: the first rule whose conditions all hold decides.

Invariant: no later rule has any effect.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast_operator.api.spec.recovery import Rule
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.views import GpuError


@dataclass(frozen=True, kw_only=True)
class Match:
    """A rule, and the explanation why it matches."""

    rule: Rule
    why: str


def first_match(rules: Sequence[Rule], facts: FailureEvidence) -> Match | None:
    """Return the first rule that matches, if any."""
    found = ((rule, _why(rule, facts)) for rule in rules)
    return next((Match(rule=rule, why=why) for rule, why in found if why), None)


def _why(rule: Rule, facts: FailureEvidence) -> str:
    """Return why the rule matches; empty if any of its conditions does not hold."""
    told = [ask(rule, facts) for asked, ask in _ASKS if asked(rule)]
    return " and ".join(told) if all(told) else ""


def _exit_code(rule: Rule, facts: FailureEvidence) -> str:
    code, asked = facts.exit_code, rule.exit_codes
    return f"exit code {code}" if code is not None and asked is not None and asked.hold(code) else ""


def _signal(rule: Rule, facts: FailureEvidence) -> str:
    number = facts.signal
    return f"signal {signal.Signals(number).name}" if number is not None and number in rule.signals else ""


def _oom(rule: Rule, facts: FailureEvidence) -> str:
    fits = bool(facts.oom) and rule.oom in {"Any", facts.oom}
    return f"out of memory ({facts.oom.lower()})" if fits else ""


def _condition(rule: Rule, facts: FailureEvidence) -> str:
    for asked in rule.pod_conditions:
        found = next((condition for condition in facts.conditions if asked.holds(condition)), None)
        if found is not None:
            return f"pod condition {found[0]} {found[1]}" + (f" ({found[2]})" if found[2] else "")
    return ""


def _gpu_error(rule: Rule, facts: FailureEvidence) -> str:
    error = gpu_error(rule, facts)
    if error is None:
        return ""
    return f"GPU error {error.kind}" + (f" {error.xid}" if error.xid is not None else "")


def gpu_error(rule: Rule, facts: FailureEvidence) -> GpuError | None:
    """Return the first GPU error that the rule matches."""
    asked = rule.gpu_errors
    if asked is None:
        return None
    return next((error for error in facts.gpu_errors if asked.mean(error.kind, error.xid)), None)


def _hang(_rule: Rule, facts: FailureEvidence) -> str:
    return "a hang" if facts.hung else ""


_ASKS: tuple[tuple[Callable[[Rule], bool], Callable[[Rule, FailureEvidence], str]], ...] = (
    (lambda rule: rule.exit_codes is not None, _exit_code),
    (lambda rule: bool(rule.signals), _signal),
    (lambda rule: bool(rule.oom), _oom),
    (lambda rule: bool(rule.pod_conditions), _condition),
    (lambda rule: rule.gpu_errors is not None, _gpu_error),
    (lambda rule: rule.hang, _hang),
)
