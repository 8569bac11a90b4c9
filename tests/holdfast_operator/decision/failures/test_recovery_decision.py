"""What each action of a rule does to a job, what it escalates to, and that each incident counts once."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from failing_jobs import decided, fail, gpu_error, rule, told, training
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recoveries import RECOVERIES
from sim import Make, Sim

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import CAUSES, RecoveryAction
from holdfast_operator.api.status import Incident
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.decision.failures.record_incident import record

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


EXIT_2 = {"operator": "In", "values": [2]}


def test_without_a_rule_a_failed_process_restarts_in_its_pod(make_sim: Make) -> None:
    sim = training(make_sim)
    fail(sim)
    sim.run(10)
    assert decided(sim) == ["InPlaceByDefault"]
    assert told(sim, "InPlaceByDefault") == [sim.status.incidents[0].why]
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]


def test_without_a_rule_a_pod_that_is_gone_is_replaced(make_sim: Make) -> None:
    sim = training(make_sim)
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert decided(sim) == ["RecreatePodByDefault"]
    assert "gpt-w1" in told(sim, "RecreatePodByDefault")[0]


def test_fail_job_ends_it_with_the_rule_and_the_scripts_words(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("FailJob", name="bug", onExitCodes=EXIT_2)])
    fail(sim, code=3)
    sim.run(12)
    assert not sim.status.terminal, "another code is another matter"
    fail(sim, code=2)
    sim.run(20, until=lambda: sim.status.holds("Failed"))
    failed = sim.status.condition("Failed")
    assert failed.reason == "FailJobByRule" == sim.status.summary
    assert "rule bug matches exit code 2" in failed.message
    assert "rank 0 failed with 2" in failed.message
    sim.run(10)
    assert not sim.running()
    assert len(sim.created_names) == 3, "nothing is made for a job that ends"


def test_fail_job_waits_for_the_launchers_traceback(make_sim: Make, final_exit: str) -> None:
    sim = training(make_sim, rules=[rule("FailJob", onExitCodes={"operator": "In", "values": [1]})])
    fail(sim)
    assert not sim.status.terminal
    for name in ("gpt-w0", "gpt-w1", "gpt-w2"):
        sim.end(name, 1, message=final_exit)
    sim.tick()
    assert sim.status.condition("Failed").reason == "FailJobByRule"
    assert "Traceback" in sim.status.condition("Failed").message or "Error" in sim.status.condition("Failed").message
    sim.run(5)
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"], "their logs are kept"


def test_fail_job_names_its_rule_while_other_launchers_live(make_sim: Make, final_exit: str) -> None:
    sim = training(make_sim, rules=[rule("FailJob", name="bug", onExitCodes={"operator": "In", "values": [1]})])
    fail(sim)
    sim.end("gpt-w0", 1, message=final_exit)
    sim.run(3, until=lambda: sim.status.terminal)
    failed = sim.status.condition("Failed")
    assert failed.reason == "FailJobByRule"
    assert failed.message.startswith("FailJob: rule bug matches exit code 1")
    assert "Traceback" in failed.message or "Error" in failed.message


GPU = {"xids": [79]}


@pytest.mark.parametrize(("cause", "reason"), [("NonFinite", "NonFinite"), ("Application", "BadSamples")])
@pytest.mark.parametrize("rules", [[], [rule("RecreatePod", name="gpu", onGpuErrors=GPU)]])
def test_error_of_the_guards_fails_the_job_if_no_rule_matches(
    make_sim: Make, cause: str, reason: str, rules: list[dict[str, Any]]
) -> None:
    sim = training(make_sim, rules=rules)
    fail(sim, cause=cause, reason=reason)
    sim.run(20, until=lambda: sim.status.terminal)
    assert decided(sim) == ["FailJobByDefault"]
    failed = sim.status.condition("Failed")
    assert failed.reason == reason
    assert failed.message.startswith(f"FailJob: no rule matches; another attempt would end with {reason} too. rank 0")


@pytest.mark.parametrize(("cause", "reason"), [("NonFinite", "NonFinite"), ("Application", "BadSamples")])
def test_rule_about_a_gpu_covers_an_error_of_the_guards(make_sim: Make, cause: str, reason: str) -> None:
    sim = training(make_sim, rules=[rule("RecreatePod", name="gpu", onGpuErrors=GPU)])
    sim.pods["uid-gpt-w0"]["gpu"] = [gpu_error(at=sim.stamp())]
    fail(sim, cause=cause, reason=reason, pod="gpt-w0")
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert "gpt-w3" in sim.world_names()
    assert set(decided(sim)) == {"RecreatePodByRule"}


def test_ignore_counts_in_no_budget_here_and_at_the_launchers(make_sim: Make) -> None:
    budgets = [{"cause": "Application", "maxRestarts": 0}]
    sim = training(make_sim, budgets=budgets, rules=[rule("Ignore", onExitCodes={"operator": "In", "values": [42]})])
    for _ in range(5):
        fail(sim, code=42)
        sim.run(15, until=lambda: len(sim.world_names()) == 3)
    sim.run(15)
    assert not sim.status.terminal
    assert sim.status.incident_count == 0
    assert sim.counted == []
    assert sim.document["restarts"] == {}
    assert [incident.action for incident in sim.status.incidents] == ["Ignore"] * 5
    assert sim.status.backoff_until is None or sim.status.backoff_until <= sim.now + timedelta(seconds=300)


def test_recreate_pod_replaces_the_pod_and_counts_once(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("RecreatePod", onSignals=["SIGSEGV"], cause="Infrastructure")])
    fail(sim, code=139, pod="gpt-w1")
    assert sim.document["directives"]["drain"] == ["uid-gpt-w1"]
    sim.run(120, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    sim.run(60)
    assert sim.counted == ["Infrastructure"]
    assert decided(sim) == ["RecreatePodByRule"]


def test_replace_node_takes_all_of_the_jobs_workers_away_from_it(make_sim: Make) -> None:
    sim = training(make_sim, nodes=2, rules=[rule("ReplaceNode", onHang=True)])
    bad = sim.node_of("gpt-w0")
    there = [name for name in sim.world_names() if sim.node_of(name) == bad]
    assert len(there) == 2
    sim.nodes["node-9"] = {**sim.nodes["node-1"], "metadata": {"name": "node-9", "labels": {}}}
    sim.leases["node-9"] = sim.now
    fail(sim, code=None, cause="Infrastructure", reason="Hung", pod="gpt-w0")
    sim.run(200, until=lambda: len(sim.world_names()) == 3 and not set(there) & set(sim.world_names()))
    assert bad not in {sim.node_of(name) for name in sim.world_names()}
    assert [(entry.node, entry.reason) for entry in sim.status.avoided] == [(bad, "ReplaceNodeByRule")]
    assert sim.status.incident_count == 1


def test_restart_gang_starts_all_workers_anew_together(make_sim: Make) -> None:
    sim = training(make_sim, nodes=6, rules=[rule("RestartGang", onExitCodes=EXIT_2)])
    fail(sim, code=2)
    sim.run(300, until=lambda: sim.world_names() == ["gpt-w3", "gpt-w4", "gpt-w5"])
    sim.run(60)
    assert sim.status.incident_count == 1
    assert decided(sim) == ["RestartGangByRule"]
    assert (sim.status.ready_workers, sim.status.wanted_workers) == (3, 3)


def test_a_rule_moves_an_incident_to_another_budget(make_sim: Make) -> None:
    rules = [rule("InPlace", onExitCodes=EXIT_2, cause="Infrastructure")]
    sim = training(make_sim, budgets=[{"cause": "Application", "maxRestarts": 0}], rules=rules)
    fail(sim, code=2)
    sim.run(20)
    assert not sim.status.terminal
    assert [(count.cause, count.total) for count in sim.status.incidents_by_cause] == [("Infrastructure", 1)]


def test_the_containers_end_is_waited_for_when_peers_tell_first(make_sim: Make) -> None:
    """Survivors see a launcher vanish in milliseconds; that its memory ran out, the kubelet says a second later."""
    sim = training(make_sim, rules=[rule("RecreatePod", name="leak", onOOM="Container")])
    sim.pods["uid-gpt-w1"]["dead"] = True
    sim.tick()
    assert len(sim.world_names()) == 2
    assert not sim.status.incidents
    sim.end("gpt-w1", 137, reason="OOMKilled")
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    (incident,) = sim.status.incidents
    assert (incident.cause, incident.decision) == ("OOM", "RecreatePodByRule")
    assert sim.counted == ["OOM"]


@pytest.mark.parametrize("asked", [{"operator": "NotIn", "values": [1]}, {"operator": "In", "values": [255]}])
def test_no_rule_matches_a_container_lost_with_its_node(make_sim: Make, asked: dict[str, Any]) -> None:
    sim = training(make_sim, rules=[rule("FailJob", onExitCodes=asked)])
    node = sim.node_of("gpt-w1")
    sim.kill_node(node)
    sim.tick()
    sim.heal_node(node, rebooted=True)
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert sim.counted == ["Infrastructure"]


def test_a_launcher_lost_on_a_pod_that_stays_is_counted(make_sim: Make) -> None:
    sim = training(make_sim)
    sim.pods["uid-gpt-w1"]["dead"] = True
    sim.run(10)
    assert [incident.reason for incident in sim.status.incidents] == ["MemberLost"]


@pytest.mark.parametrize("when", ["while its pod is deleted", "after that"])
def test_a_cut_off_worker_that_returns_is_one_loss(make_sim: Make, when: str) -> None:
    sim = training(make_sim)
    node = sim.node_of("gpt-w1")
    sim.kill_node(node)
    sim.run(60, until=lambda: "deletionTimestamp" in sim.pods["uid-gpt-w1"]["metadata"])
    if when == "after that":
        sim.heal_node(node, rebooted=False)
        sim.run(2)
    (first,) = sim.incidents.values()
    sim.incidents[first["generation"], 9] = {**first, "attempt": 9}
    sim.run(2)
    sim.heal_node(node, rebooted=False)
    sim.run(30)
    assert sim.status.incident_count == 1
    assert [incident.pod for incident in sim.status.incidents] == ["gpt-w1"]
    again = {"generation": first["generation"], "attempt": 9}
    assert again in sim.document["acknowledged"], "launchers need not tell it again"


def test_another_loss_of_a_pod_that_went_on_counts_again(make_sim: Make) -> None:
    sim = training(make_sim)
    fail(sim, cause="Infrastructure", reason="ProcessKilled", pod="gpt-w1")
    sim.run(15, until=lambda: len(sim.world_names()) == 3)
    sim.kill_node(sim.node_of("gpt-w1"))
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert sim.status.incident_count == 2


def test_a_pod_that_keeps_failing_climbs_the_ladder(make_sim: Make) -> None:
    ladder = {"actions": ["InPlace", "RecreatePod", "FailJob"], "failures": 2}
    sim = training(make_sim, nodes=6, escalation=ladder, budgets=[], backoff={"initialSeconds": 0})
    for _ in range(9):
        if sim.status.terminal or sim.status.summary == "FailJobEscalated":
            break
        fail(sim, pod=sim.world_names()[-1])
        sim.run(150, until=lambda: len(sim.world_names()) == 3 or sim.status.terminal)
        sim.run(20)
    assert decided(sim) == [
        *("InPlaceByDefault", "InPlaceByDefault", "RecreatePodEscalated"),
        *("InPlaceByDefault", "InPlaceByDefault", "RecreatePodEscalated"),
        *("InPlaceByDefault", "InPlaceByDefault", "FailJobEscalated"),
    ]
    assert sim.status.condition("Failed").reason == "FailJobEscalated"
    assert "RecreatePod was tried 2 times for the job" in sim.status.condition("Failed").message


def test_what_is_long_ago_climbs_nothing(make_sim: Make) -> None:
    ladder = {"actions": ["InPlace", "FailJob"], "failures": 1, "windowSeconds": 60}
    sim = training(make_sim, escalation=ladder, budgets=[])
    for _ in range(3):
        fail(sim)
        sim.run(90)
    assert decided(sim) == ["InPlaceByDefault"] * 3


def test_interruptions_climb_nothing(make_sim: Make) -> None:
    sim = training(make_sim, escalation={"actions": ["RecreatePod", "FailJob"], "failures": 1})
    for _ in range(3):
        sim.delete(sim.uid(sim.running()[0]))
        sim.run(60, until=lambda: len(sim.world_names()) == 3)
        sim.run(20)
    assert not sim.status.terminal
    assert set(decided(sim)) == {"RecreatePodByDefault"}


def _incident(number: int, cause: str) -> Incident:
    return Incident(
        number=0,
        attempt_id=AttemptId(generation=1, attempt=number),
        cause=cause,
        action="InPlace",
        reason="ExitCode",
        message="m",
        pod=f"gpt-w{number % 3}",
        rank=None,
        node=f"node-{number % 4 + 1}",
        detected=NOW,
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(RECOVERIES, st.lists(st.tuples(st.sampled_from(CAUSES), st.none() | st.integers(1, 255)), max_size=14))
def test_each_incident_is_decided_and_counted_at_most_once(
    trained: Sim, recovery: dict[str, Any], failures: list[tuple[str, int | None]]
) -> None:
    trained.body["spec"]["recovery"] = recovery
    seen = trained.observe()
    draft = PlanDraft(seen=seen, now=NOW, status=seen.status)
    for number, (cause, code) in enumerate(failures, start=1):
        worker = draft.status.workers[number % 3]
        draft = replace(draft, now=NOW + timedelta(minutes=number))
        draft = record(draft, _incident(number, cause), FailureEvidence(exit_code=code), worker)
    ignored = sum(1 for word in draft.decided if word.action == RecoveryAction.IGNORE)
    about_failures = [word for word in draft.decided if word.action != "AvoidNode"]
    assert len(about_failures) == len(failures)
    assert (
        len(draft.counted) == len(failures) - ignored == sum(count.total for count in draft.status.incidents_by_cause)
    )
    assert draft.status.incident_count == len(draft.counted)
    assert all(incident.decision and incident.why for incident in draft.status.incidents)
    assert len(draft.status.tallies) <= c.TALLIES_KEPT
    told = {event.reason for event in draft.events}
    assert {word.reason for word in draft.decided} <= told, "metric and event say the same"


@pytest.mark.thorough
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(RECOVERIES, st.lists(st.sampled_from((1, 2, 42, 137, 139)), min_size=1, max_size=3))
def test_no_policy_that_passes_the_schema_stops_a_pass(
    make_sim: Make, recovery: dict[str, Any], codes: list[int]
) -> None:
    sim = make_sim(recovery=recovery)
    sim.run(30)
    for code in codes:
        if sim.world is None or sim.status.terminal:
            break
        fail(sim, code=code)
        sim.run(20, step=2.0)
    sim.run(60, step=4.0)
    assert sim.status.incident_count == len(sim.counted)
    assert sim.plan().reason
