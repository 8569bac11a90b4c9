"""Launchers judge restart rules like the operator, with the same messages and results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Simulation

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.membership.document import Budget
from holdfast.launcher.membership.messages import Failure, Priority
from holdfast.launcher.membership.restart_rules import Restart, Rule, first_match
from holdfast_operator.api.spec.recovery import parse_rules
from holdfast_operator.decision.failures import rules as operators
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.manifests.membership_document import rules_for_launchers


def failure(reason: str = "ExitCode", code: int | None = None, cause: Cause = Cause.APPLICATION) -> Failure:
    return Failure(cause=cause, reason=reason, message="m", priority=Priority.EXCEPTION, exit_code=code)


def restart(*rules: dict[str, Any]) -> Restart:
    """Return the settings that an operator sends to launchers for these rules."""
    return Restart.from_settings(rules_for_launchers(parse_rules({"rules": list(rules)})))


def rule(action: str = "FailJob", name: str = "mine", **asked: Any) -> dict[str, Any]:
    return {"name": name, "action": action, **asked}


CODE_2 = {"onExitCodes": {"operator": "In", "values": [2]}}


def test_no_word_of_rules_is_as_before() -> None:
    assert Restart.from_settings({}) == Restart()
    assert Restart().judged(failure(code=2)) == failure(code=2)
    assert not Restart().ignores(failure(code=2))


def test_operator_only_rule_ends_the_list_the_launchers_know() -> None:
    known = restart(rule(**CODE_2), rule(name="gpu", onGpuErrors={"xids": [79]}), rule(name="hang", onHang=True))
    assert [rule.name for rule in known.rules] == ["mine"]
    assert known.elsewhere
    assert not restart(rule(**CODE_2)).elsewhere


@pytest.mark.parametrize("reason", ["PeerLost", "MemberLost"])
def test_a_victims_exit_code_is_nobodys_fault(reason: str) -> None:
    known = restart(rule(onExitCodes={"operator": "NotIn", "values": [2]}))
    assert known.match(failure(code=1)) is not None
    assert known.match(failure(reason, 1)) is None


def test_the_cause_is_changed_once_and_for_all() -> None:
    known = restart(rule("InPlace", cause="Infrastructure", **CODE_2))
    changed = known.judged(failure(code=2))
    assert changed == replace(failure(code=2), cause=Cause.INFRASTRUCTURE)
    assert known.judged(changed) == changed


def test_a_cause_of_a_later_version_is_passed_by() -> None:
    read = Rule.from_json({"name": "a", "action": "Ignore", "cause": "Fate", "hang": True})
    assert read.cause is None
    assert read.matches(failure("Hung"))


ASKED = {
    "onExitCodes": st.fixed_dictionaries(
        {
            "operator": st.sampled_from(("In", "NotIn")),
            "values": st.lists(st.sampled_from((1, 2, 137, 139)), min_size=1, unique=True),
        }
    ),
    "onSignals": st.lists(st.sampled_from(("SIGKILL", "SIGSEGV")), min_size=1, unique=True),
    "onOOM": st.sampled_from(("Process", "Container", "Any")),
    "onHang": st.just(True),
}
RULES = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.from_regex("[a-z]{1,5}", fullmatch=True),
            "action": st.sampled_from(("FailJob", "Ignore", "InPlace")),
        },
        optional=ASKED,
    ),
    max_size=5,
)


@given(RULES, st.sampled_from(("ExitCode", "OutOfMemory", "Hung", "Signal")), st.sampled_from((None, 1, 2, 137, 139)))
def test_launchers_and_operator_find_the_same_rule(
    written: list[dict[str, Any]], reason: str, code: int | None
) -> None:
    known = parse_rules({"rules": written})
    here = first_match(restart(*written).rules, failure(reason, code))
    facts = FailureEvidence(exit_code=code, hung=reason == "Hung", oom="Process" if reason == "OutOfMemory" else "")
    there = operators.first_match(known, facts)
    assert (here.name if here else None) == (there.rule.name if there else None)


# In a job


def training(*rules: dict[str, Any], budgets: tuple[Budget, ...] = ()) -> Simulation:
    sim = Simulation(3, budgets=budgets, replace_lost=False)
    sim.rules = replace(sim.rules, restart=restart(*rules))
    assert sim.run(20, lambda: sim.trains_with("w0", "w1", "w2") and sim.committed() >= 2)
    return sim


def fail(sim: Simulation, attempt: int, cause: Cause = Cause.APPLICATION, reason: str = "RankEnded") -> bool:
    """End a rank of w1. Return whether the next attempt trains."""
    sim.kill_rank("w1", cause, Priority.EXCEPTION, reason=reason)
    return sim.run(
        20, lambda: (t := sim.training_now()) is not None and t.world.attempt_id == AttemptId(1, attempt + 1)
    )


RANKS_CODE = 1  # of a rank that ends in the simulation
NEVER = Budget(cause=Cause.APPLICATION, max_restarts=0, window=3600.0)


def test_fail_job_costs_no_second_try() -> None:
    sim = training(rule(name="bug", onExitCodes={"operator": "In", "values": [RANKS_CODE]}))
    assert not fail(sim, 1)
    assert all(pod.exit_code == RANKS_CODE for pod in sim.pods.values())


def test_roll_backs_have_another_attempt_each_and_spend_only_their_own_budget() -> None:
    sim = training(budgets=(NEVER, replace(NEVER, cause=Cause.NON_FINITE, max_restarts=1)))
    assert fail(sim, 1, Cause.NON_FINITE, "RolledBack")
    assert not fail(sim, 2, Cause.NON_FINITE, "RolledBack")


def test_step_that_is_repeated_with_more_memory_spends_no_budget_and_waits_for_nothing() -> None:
    sim = training(budgets=(replace(NEVER, cause=Cause.OOM),))
    for attempt in range(1, 4):
        assert fail(sim, attempt, Cause.OOM, "OutOfMemoryRetried")
    assert sim.pods["w1"].state.not_before == 0.0
    assert not fail(sim, 4, Cause.OOM, "OutOfMemory")


@pytest.mark.parametrize(("cause", "reason"), [(Cause.NON_FINITE, "NonFinite"), (Cause.APPLICATION, "BadSamples")])
def test_error_of_the_guards_ends_the_job_unless_a_rule_covers_it(cause: Cause, reason: str) -> None:
    assert not fail(training(), 1, cause, reason)
    asked = {"onExitCodes": {"operator": "In", "values": [RANKS_CODE]}}
    assert fail(training(rule("InPlace", **asked)), 1, cause, reason)
    assert fail(training(rule(name="gpu", onGpuErrors={"xids": [79]})), 1, cause, reason), "the operator decides"


def test_ignored_failures_spend_no_budget() -> None:
    asked = {"onExitCodes": {"operator": "In", "values": [RANKS_CODE]}}
    sim = training(rule("Ignore", **asked), budgets=(NEVER,))
    for attempt in range(1, 4):
        assert fail(sim, attempt)


def test_a_cause_that_a_rule_changes_spends_the_other_budget() -> None:
    asked = {"onExitCodes": {"operator": "In", "values": [RANKS_CODE]}}
    assert fail(training(rule("InPlace", cause="Infrastructure", **asked), budgets=(NEVER,)), 1)
    assert not fail(training(rule("InPlace", cause="Application", **asked), budgets=(NEVER,)), 1)


def test_budgets_are_the_operators_for_operator_only_causes() -> None:
    assert fail(training(rule(name="gpu", onGpuErrors={"xids": [79]}), budgets=(NEVER,)), 1)
