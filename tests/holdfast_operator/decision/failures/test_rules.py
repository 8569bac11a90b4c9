"""Which rule decides: the first of those that match, whatever else is written or seen."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recoveries import ASKED, RECOVERIES, RULES

from holdfast_operator.api.spec.recovery import parse_escalation, parse_rules
from holdfast_operator.api.spec.spec import parse_spec
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.decision.failures.rules import first_match
from holdfast_operator.errors import UnreadableError
from holdfast_operator.manifests.membership_document import settings as told_to_launchers
from holdfast_operator.views import GpuError

XID_79 = GpuError(gpu="GPU-1", kind="Xid", xid=79)
ECC = GpuError(gpu="GPU-1", kind="DoubleBitEcc")
DISRUPTED = (("DisruptionTarget", "True", "EvictionByEvictionAPI"),)


def rule(name: str = "a", action: str = "Ignore", **asked: Any) -> dict[str, Any]:
    return {"name": name, "action": action, **asked}


def matches(asked: dict[str, Any], facts: FailureEvidence) -> str:
    """In which words the rule holds; empty if it does not."""
    found = first_match(parse_rules({"rules": [rule(**asked)]}), facts)
    return found.why if found else ""


@pytest.mark.parametrize(
    ("asked", "facts", "why"),
    [
        ({"onExitCodes": {"operator": "In", "values": [2, 3]}}, FailureEvidence(exit_code=3), "exit code 3"),
        ({"onExitCodes": {"operator": "In", "values": [2]}}, FailureEvidence(exit_code=3), ""),
        ({"onExitCodes": {"operator": "In", "values": [2]}}, FailureEvidence(), ""),
        ({"onExitCodes": {"operator": "NotIn", "values": [2]}}, FailureEvidence(exit_code=3), "exit code 3"),
        ({"onExitCodes": {"operator": "NotIn", "values": [2]}}, FailureEvidence(exit_code=2), ""),
        ({"onExitCodes": {"operator": "NotIn", "values": [2]}}, FailureEvidence(), ""),
        ({"onSignals": ["SIGSEGV"]}, FailureEvidence(exit_code=128 + 11), "signal SIGSEGV"),
        ({"onSignals": ["SIGSEGV"]}, FailureEvidence(exit_code=11), ""),
        ({"onSignals": ["SIGBUS", "SIGKILL"]}, FailureEvidence(exit_code=137), "signal SIGKILL"),
        ({"onOOM": "Process"}, FailureEvidence(oom="Process"), "out of memory (process)"),
        ({"onOOM": "Process"}, FailureEvidence(oom="Container"), ""),
        ({"onOOM": "Any"}, FailureEvidence(oom="Container"), "out of memory (container)"),
        ({"onOOM": "Any"}, FailureEvidence(exit_code=137), ""),
        (
            {"onPodConditions": [{"type": "DisruptionTarget"}]},
            FailureEvidence(conditions=DISRUPTED),
            "pod condition DisruptionTarget True (EvictionByEvictionAPI)",
        ),
        (
            {"onPodConditions": [{"type": "DisruptionTarget", "reason": "Other"}]},
            FailureEvidence(conditions=DISRUPTED),
            "",
        ),
        (
            {"onPodConditions": [{"type": "DisruptionTarget", "status": "False"}]},
            FailureEvidence(conditions=DISRUPTED),
            "",
        ),
        ({"onGpuErrors": {"xids": [48, 79]}}, FailureEvidence(gpu_errors=(ECC, XID_79)), "GPU error Xid 79"),
        (
            {"onGpuErrors": {"kinds": ["DoubleBitEcc"]}},
            FailureEvidence(gpu_errors=(ECC, XID_79)),
            "GPU error DoubleBitEcc",
        ),
        ({"onGpuErrors": {"xids": [13]}}, FailureEvidence(gpu_errors=(ECC, XID_79)), ""),
        ({"onHang": True}, FailureEvidence(hung=True), "a hang"),
        ({"onHang": True}, FailureEvidence(), ""),
        ({"onHang": True, "onOOM": "Any"}, FailureEvidence(hung=True), ""),
        (
            {"onSignals": ["SIGKILL"], "onOOM": "Any"},
            FailureEvidence(exit_code=137, oom="Process"),
            "signal SIGKILL and out of memory (process)",
        ),
        ({}, FailureEvidence(exit_code=1, hung=True, oom="Process"), ""),
    ],
)
def test_a_rule_matches_when_all_that_it_asks_for_is_so(
    asked: dict[str, Any], facts: FailureEvidence, why: str
) -> None:
    assert matches(asked, facts) == why


FACTS = st.builds(
    FailureEvidence,
    exit_code=st.none() | st.integers(1, 255),
    oom=st.sampled_from(("", "Process", "Container")),
    hung=st.booleans(),
    conditions=st.sampled_from(((), DISRUPTED, (("Ready", "False", "None"), *DISRUPTED))),
    gpu_errors=st.sampled_from(((), (XID_79,), (ECC, XID_79))),
)


@given(RULES, FACTS)
def test_the_first_match_wins(written: list[dict[str, Any]], facts: FailureEvidence) -> None:
    rules = parse_rules({"rules": written})
    alone = [known for known in rules if first_match([known], facts)]
    found = first_match(rules, facts)
    assert (found.rule if found else None) == (alone[0] if alone else None)
    assert found is None or found.why


@given(RULES, FACTS, st.randoms(use_true_random=False))
def test_rules_after_the_match_have_no_say(written: list[dict[str, Any]], facts: FailureEvidence, dice: Any) -> None:
    rules = list(parse_rules({"rules": written}))
    found = first_match(rules, facts)
    if found is None:
        return
    place = rules.index(found.rule) + 1
    rest = rules[place:]
    dice.shuffle(rest)
    assert first_match([*rules[:place], *rest], facts) == found


@given(RECOVERIES)
def test_what_passes_the_schema_is_read_and_told_to_launchers(recovery: dict[str, Any]) -> None:
    containers = [{"name": "trainer", "image": "x"}]
    spec = parse_spec(
        {"workers": {"replicas": 1, "template": {"spec": {"containers": containers}}}, "recovery": recovery}
    )
    sent = told_to_launchers(spec)
    known = sent.get("rules", [])
    assert [rule["name"] for rule in known] == [rule.name for rule in spec.rules[: len(known)]]
    assert sent.get("rulesElsewhere", False) == (len(known) < len(spec.rules))
    assert all(rule.for_launchers for rule in spec.rules[: len(known)])


@pytest.mark.parametrize(
    ("recovery", "says"),
    [
        ({"rules": {}}, "spec.recovery.rules"),
        ({"rules": [None]}, "spec.recovery.rules"),
        ({"rules": [rule(action="Pray")]}, "action must be one of InPlace"),
        ({"rules": [rule(cause="Fate")]}, "cause must be one of"),
        ({"rules": [rule(onSignals=["SIGNAL"])]}, "no signal 'SIGNAL'"),
        ({"rules": [rule(onSignals=[["x"]])]}, "onSignals"),
        ({"rules": [rule(onExitCodes={"operator": "In"})]}, "onExitCodes.values"),
        ({"rules": [rule(onExitCodes={"operator": "In", "values": ["2"]})]}, "must be integers"),
        ({"rules": [rule(onExitCodes={"operator": "Like", "values": [2]})]}, "operator must be one of In, NotIn"),
        ({"rules": [rule(onGpuErrors=79)]}, "onGpuErrors"),
        ({"rules": [rule(onPodConditions=["DisruptionTarget"])]}, "onPodConditions"),
        ({"escalation": {"actions": []}}, "escalation.actions is empty"),
        ({"escalation": {"actions": ["Ignore", "FailJob"]}}, "escalation.actions must be some of"),
        ({"escalation": {"actions": ["InPlace"], "failures": 0}}, "failures must be an integer"),
    ],
)
def test_what_cannot_be_read_is_named(recovery: dict[str, Any], says: str) -> None:
    containers = [{"name": "trainer", "image": "x"}]
    workers = {"replicas": 1, "template": {"spec": {"containers": containers}}}
    with pytest.raises(UnreadableError) as caught:
        parse_spec({"workers": workers, "recovery": recovery})
    assert says in str(caught.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(("In", "FailJob", "SIGKILL")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*ASKED, "action", "name")), inner),
    max_leaves=8,
)


def refusal(recovery: dict[str, Any]) -> str:
    try:
        parse_rules(recovery)
        parse_escalation(recovery)
    except UnreadableError as error:
        return str(error)
    return ""


@settings(max_examples=200)
@given(JUNK)
def test_rubbish_is_refused_by_name_or_read(junk: Any) -> None:
    for name, value in (("rules", [junk]), ("rules", junk), ("escalation", junk)):
        said = refusal({name: value})
        assert not said or f"spec.recovery.{name}" in said


def test_signals_are_those_of_linux() -> None:
    (known,) = parse_rules({"rules": [rule(onSignals=["SIGKILL", "SIGSYS"])]})
    assert known.signals == (signal.SIGKILL, signal.SIGSYS)
    assert replace(known, name="b") != known
