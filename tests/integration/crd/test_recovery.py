"""Recovery, interruptions, the preflight and the life cycle: what the schema accepts, and its messages."""

from __future__ import annotations

from typing import Any

import pytest

from .jobs import ALL_RULES, LADDER, RULES, Jobs, job, rule

BAD: list[tuple[str, list[tuple[str, Any]], str]] = [
    # -- recovery
    (
        "budget for an unknown cause",
        [("spec.recovery.budgets", [{"cause": "Cosmic", "maxRestarts": 1}])],
        'supported values: "Application", "Infrastructure", "Interruption", "NonFinite", "OOM"',
    ),
    (
        "two budgets for one cause",
        [("spec.recovery.budgets", [{"cause": "OOM", "maxRestarts": 1}, {"cause": "OOM", "maxRestarts": 2}])],
        'Duplicate value: {"cause":"OOM"}',
    ),
    ("budget without a number", [("spec.recovery.budgets", [{"cause": "OOM"}])], "maxRestarts: Required value"),
    (
        "negative budget",
        [("spec.recovery.budgets", [{"cause": "OOM", "maxRestarts": -1}])],
        "greater than or equal to 0",
    ),
    (
        "window too short",
        [("spec.recovery.budgets", [{"cause": "OOM", "maxRestarts": 1, "windowSeconds": 5}])],
        "greater than or equal to 60",
    ),
    (
        "first pause above the longest",
        [("spec.recovery.backoff", {"initialSeconds": 60, "maxSeconds": 30})],
        "initialSeconds is above maxSeconds",
    ),
    (
        "first pause above the longest by default",
        [("spec.recovery.backoff", {"initialSeconds": 600})],
        "lower it or raise maxSeconds",
    ),
    ("more jitter than pause", [("spec.recovery.backoff", {"jitterPercent": 101})], "less than or equal to 100"),
    # -- rules
    ("rule without a name", [(RULES, [{"action": "Ignore", "onHang": True}])], "rules[0].name: Required value"),
    ("rule without an action", [(RULES, [{"name": "a", "onHang": True}])], "rules[0].action: Required value"),
    (
        "rule that asks for nothing",
        [(RULES, [{"name": "a", "action": "Ignore"}])],
        "the rule has no condition: set at least one of",
    ),
    ("two rules of one name", [(RULES, [rule(onHang=True), rule(onOOM="Any")])], 'Duplicate value: {"name":"a"}'),
    ("unknown action", [(RULES, [rule(action="Pray", onHang=True)])], "rules[0].action: Unsupported value"),
    ("unknown cause of a rule", [(RULES, [rule(cause="Fate", onHang=True)])], "rules[0].cause: Unsupported value"),
    ("onHang: false", [(RULES, [rule(onHang=False)])], "rules[0].onHang: Unsupported value"),
    ("unknown signal", [(RULES, [rule(onSignals=["SIGNAL"])])], "onSignals[0]: Unsupported value"),
    ("unknown memory", [(RULES, [rule(onOOM="Node")])], "rules[0].onOOM: Unsupported value"),
    ("exit code 0", [(RULES, [rule(onExitCodes={"operator": "In", "values": [0]})])], "greater than or equal to 1"),
    (
        "exit code 256",
        [(RULES, [rule(onExitCodes={"operator": "In", "values": [256]})])],
        "less than or equal to 255",
    ),
    ("no exit code", [(RULES, [rule(onExitCodes={"operator": "In", "values": []})])], "at least 1 items"),
    ("exit codes alone", [(RULES, [rule(onExitCodes={"values": [1]})])], "onExitCodes.operator: Required value"),
    ("no GPU error", [(RULES, [rule(onGpuErrors={})])], "onGpuErrors is empty: set xids"),
    ("condition without a type", [(RULES, [rule(onPodConditions=[{}])])], "onPodConditions[0].type: Required value"),
    (
        "ladder that goes down",
        [("spec.recovery.escalation", {"actions": ["RestartGang", "InPlace"]})],
        "the actions must be in the order",
    ),
    (
        "a rung twice",
        [("spec.recovery.escalation", {"actions": ["InPlace", "InPlace"]})],
        "each at most once",
    ),
    ("one rung", [("spec.recovery.escalation", {"actions": ["InPlace"]})], "should have at least 2 items"),
    ("ladder without rungs", [("spec.recovery.escalation", {"failures": 2})], "actions: Required value"),
    ("too patient with nodes", [("spec.recovery.avoidRepeatOffenders", 11)], "less than or equal to 10"),
    # -- interruption
    ("unknown cloud", [("spec.interruption.providers", ["Acme"])], 'supported values: "AWS", "GCP", "Azure"'),
    ("a cloud twice", [("spec.interruption.providers", ["AWS", "AWS"])], 'Duplicate value: "AWS"'),
    ("no time to commit", [("spec.interruption.checkpointDeadlineSeconds", 4)], "greater than or equal to 5"),
    # -- preflight
    ("no check", [("spec.preflight.checks", [])], "should have at least 1 items"),
    (
        "an unknown check",
        [("spec.preflight.checks", ["Moon"])],
        '"GPU", "Storage", "ObjectStore", "Network", "Clock"',
    ),
    ("unknown answer", [("spec.preflight.onFailure", "Pray")], 'supported values: "AvoidNode", "Fail", "Ignore"'),
    ("no time to check", [("spec.preflight.timeoutSeconds", 4)], "greater than or equal to 5"),
    ("room in words", [("spec.preflight.storage.minFreeBytes", "much")], "should match"),
    ("no pace", [("spec.preflight.storage.minWriteBytesPerSecond", "0Mi")], "must be above 0, for example 100Mi"),
    ("a negative pace", [("spec.preflight.storage.minWriteBytesPerSecond", -1)], "must be above 0"),
    ("no skew at all", [("spec.preflight.clock.maxSkewSeconds", 0)], "greater than or equal to 1"),
    # -- life cycle
    ("suspended as a word", [("spec.suspend", "yes")], 'must be of type boolean: "string"'),
    ("no time to be active", [("spec.activeDeadlineSeconds", 0)], "greater than or equal to 1"),
    ("a life after the end below none", [("spec.ttlSecondsAfterFinished", -1)], "greater than or equal to 0"),
]

GOOD: list[tuple[str, list[tuple[str, Any]]]] = [
    ("sizes of all kinds", [("spec.preflight.storage", {"minFreeBytes": 4096, "minWriteBytesPerSecond": "1.5G"})]),
    ("no provider", [("spec.interruption.providers", [])]),
    ("no budget at all", [("spec.recovery.budgets", [])]),
    ("a preflight by its defaults", [("spec.preflight", {})]),
    ("a preflight of the store", [("spec.preflight", {"checks": ["ObjectStore"]})]),
    ("a preflight of the clock", [("spec.preflight", {"checks": ["Clock"], "clock": {"maxSkewSeconds": 60}})]),
    ("the whole ladder", [("spec.recovery.escalation", {"actions": list(LADDER)})]),
    ("rules of all kinds", [(RULES, ALL_RULES)]),
]


def test_the_table_is_long_enough_and_names_each_case_once() -> None:
    names = [name for name, _changes, _says in BAD]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize(("changes", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_job_is_refused_in_words_that_help(trial: Jobs, changes: list[tuple[str, Any]], says: str) -> None:
    assert says in trial.refusal(job(*changes))


@pytest.mark.parametrize("changes", [g[1] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_good_job_is_taken_as_it_is(trial: Jobs, changes: list[tuple[str, Any]]) -> None:
    wanted = job(*changes)
    made = trial.create(wanted, dry_run="All")
    assert made["spec"]["workers"]["template"] == wanted["spec"]["workers"]["template"]
