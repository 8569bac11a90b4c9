"""What rules, escalation, pauses and bad nodes do to a job, from the failure to the story that is told of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recoveries import RECOVERIES

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.reasons import CAUSES, RecoveryAction
from holdfast_operator.api.spec.recovery import Backoff
from holdfast_operator.api.status import Incident, RestartCount, Status
from holdfast_operator.api.status.failure_history import NodeFailures
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import repeat_offenders
from holdfast_operator.decision.failures.backoff import pause, share
from holdfast_operator.decision.failures.evidence import FailureEvidence
from holdfast_operator.decision.failures.record_incident import record

Make = Callable[..., Any]
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
EXIT_2 = {"operator": "In", "values": [2]}


def training(make_sim: Make, *, replicas: int = 3, nodes: int = 5, **recovery: Any) -> Any:
    """A job with this recovery, all of whose workers train."""
    sim = make_sim(replicas=replicas, nodes=nodes, recovery=recovery)
    sim.obeys = True
    sim.run(60, until=lambda: sim.status.status == "Training")
    return sim


def rule(action: str, name: str = "mine", **asked: Any) -> dict[str, Any]:
    return {"name": name, "action": action, **asked}


def fail(
    sim: Any, *, code: int | None = 1, cause: str = "Application", reason: str = "ExitCode", pod: str = ""
) -> None:
    """A process of a worker fails, and its launcher starts it again in place: the next world of the same members."""
    world = sim.world
    name = pod or sim.world_names()[0]
    pair = (world["generation"], world["attempt"])
    sim.incidents[pair] = {
        "generation": pair[0],
        "attempt": pair[1],
        "cause": cause,
        "action": "InPlace",
        "reason": reason,
        "message": f"rank 0 failed with {code}",
        "pod": name,
        "rank": 0,
        "exitCode": code,
        "node": sim.node_of(name),
        "detectedTime": sim.stamp(),
        "resumedTime": None,
        "lostSteps": None,
    }
    sim.world = None
    sim.tick()


def told(sim: Any, reason: str) -> list[str]:
    return [message for word, message in sim.events if word == reason]


def decided(sim: Any) -> list[str]:
    return [incident.decision for incident in sim.status.incidents]


# What each action does


def test_without_a_rule_a_failed_process_goes_on_in_its_pod_and_that_is_said(make_sim: Make) -> None:
    sim = training(make_sim)
    fail(sim)
    sim.run(10)
    assert decided(sim) == ["InPlaceByDefault"]
    assert told(sim, "InPlaceByDefault") == [sim.status.incidents[0].why]
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]


def test_without_a_rule_a_pod_that_is_gone_is_replaced_and_that_is_said(make_sim: Make) -> None:
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
    assert failed.reason == "FailJobByRule" == sim.status.status
    assert "rule bug matches exit code 2" in failed.message
    assert "rank 0 failed with 2" in failed.message
    sim.run(10)
    assert not sim.running()
    assert len(sim.created_names) == 3, "nothing is made for a job that ends"


def test_fail_job_waits_for_the_traceback_of_launchers_that_end_by_themselves(
    make_sim: Make, final_exit: str
) -> None:
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


def test_fail_job_is_told_by_its_rule_though_other_launchers_live_as_the_traceback_comes(
    make_sim: Make, final_exit: str
) -> None:
    sim = training(make_sim, rules=[rule("FailJob", name="bug", onExitCodes={"operator": "In", "values": [1]})])
    fail(sim)
    sim.end("gpt-w0", 1, message=final_exit)
    sim.run(3, until=lambda: sim.status.terminal)
    failed = sim.status.condition("Failed")
    assert failed.reason == "FailJobByRule"
    assert failed.message.startswith("FailJob: rule bug matches exit code 1")
    assert "Traceback" in failed.message or "Error" in failed.message


def test_ignore_counts_in_no_budget_here_and_at_the_launchers(make_sim: Make) -> None:
    budgets = [{"cause": "Application", "maxRestarts": 0}]
    sim = training(make_sim, budgets=budgets, rules=[rule("Ignore", onExitCodes={"operator": "In", "values": [42]})])
    for _ in range(5):
        fail(sim, code=42)
        sim.run(15, until=lambda: len(sim.world_names()) == 3)
    sim.run(15)
    assert not sim.status.terminal
    assert sim.status.restart_count == 0
    assert sim.counted == []
    assert sim.document["restarts"] == {}
    assert [incident.action for incident in sim.status.incidents] == ["Ignore"] * 5
    assert sim.status.backoff_until is None or sim.status.backoff_until <= sim.now + timedelta(seconds=300)


def test_recreate_pod_gives_the_worker_another_pod_and_counts_it_once(make_sim: Make) -> None:
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
    assert sim.status.restart_count == 1


def test_restart_gang_starts_all_workers_anew_together(make_sim: Make) -> None:
    sim = training(make_sim, nodes=6, rules=[rule("RestartGang", onExitCodes=EXIT_2)])
    fail(sim, code=2)
    sim.run(300, until=lambda: sim.world_names() == ["gpt-w3", "gpt-w4", "gpt-w5"])
    sim.run(60)
    assert sim.status.restart_count == 1
    assert decided(sim) == ["RestartGangByRule"]
    assert sim.status.ready == "3/3"


def test_a_rule_moves_an_incident_to_another_budget(make_sim: Make) -> None:
    rules = [rule("InPlace", onExitCodes=EXIT_2, cause="Infrastructure")]
    sim = training(make_sim, budgets=[{"cause": "Application", "maxRestarts": 0}], rules=rules)
    fail(sim, code=2)
    sim.run(20)
    assert not sim.status.terminal
    assert [(count.cause, count.total) for count in sim.status.restarts] == [("Infrastructure", 1)]


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
def test_a_container_that_went_with_its_node_has_no_exit_code_that_a_rule_could_blame(
    make_sim: Make, asked: dict[str, Any]
) -> None:
    sim = training(make_sim, rules=[rule("FailJob", onExitCodes=asked)])
    node = sim.node_of("gpt-w1")
    sim.kill_node(node)
    sim.tick()
    sim.heal_node(node, rebooted=True)
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert sim.counted == ["Infrastructure"]


def test_a_launcher_that_is_lost_on_a_pod_that_stays_is_counted_all_the_same(make_sim: Make) -> None:
    sim = training(make_sim)
    sim.pods["uid-gpt-w1"]["dead"] = True
    sim.run(10)
    assert [incident.reason for incident in sim.status.incidents] == ["MemberLost"]


@pytest.mark.parametrize("when", ["while its pod is deleted", "after that"])
def test_a_worker_that_was_cut_off_given_up_and_came_back_before_it_was_deleted_is_one_loss(
    make_sim: Make, when: str
) -> None:
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
    assert sim.status.restart_count == 1
    assert [incident.pod for incident in sim.status.incidents] == ["gpt-w1"]
    again = {"generation": first["generation"], "attempt": 9}
    assert again in sim.document["acknowledged"], "launchers need not tell it again"


def test_another_loss_of_a_pod_that_went_on_counts_again(make_sim: Make) -> None:
    sim = training(make_sim)
    fail(sim, cause="Infrastructure", reason="ProcessKilled", pod="gpt-w1")
    sim.run(15, until=lambda: len(sim.world_names()) == 3)
    sim.kill_node(sim.node_of("gpt-w1"))
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert sim.status.restart_count == 2


# What shows before anything fails


def gpu_error(xid: int = 79, *, action: str = "", at: str = "") -> dict[str, Any]:
    return {
        "gpu": "GPU-1",
        "index": 0,
        "kind": "Xid",
        "xid": xid,
        "count": 1,
        "cause": "Infrastructure",
        "action": action,
        "message": f"GPU 0: XID {xid}",
        "firstTime": at,
        "lastTime": at,
    }


def test_a_gpu_error_that_a_rule_names_moves_the_worker_off_its_node_once(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("ReplaceNode", name="bus", onGpuErrors={"xids": [79]})])
    bad = sim.node_of("gpt-w1")
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(at=sim.stamp())]
    sim.run(200, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    sim.run(60)
    assert bad not in {sim.node_of(name) for name in sim.world_names()}
    assert sim.counted == ["Infrastructure"]
    assert "rule bus matches GPU error Xid 79" in told(sim, "ReplaceNodeByRule")[0]


def test_what_shows_while_training_goes_on_loses_no_step_of_the_world_that_goes_on(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("Ignore", cause="Infrastructure", onGpuErrors={"xids": [79]})])
    sim.restored = {"step": 0, "from": "nothing"}
    sim.run(60, until=lambda: sim.step > 20)
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(at=sim.stamp())]
    sim.run(60, until=lambda: bool(sim.status.incidents) and sim.status.incidents[0].resumed is not None)
    (incident,) = sim.status.incidents
    assert (incident.reason, incident.lost_steps, incident.restored_from) == ("GpuError", None, None)


def test_two_workers_of_a_node_that_show_the_same_leave_together_as_one_incident(make_sim: Make) -> None:
    sim = training(make_sim, nodes=2, rules=[rule("ReplaceNode", onGpuErrors={"xids": [79]})])
    bad = sim.node_of("gpt-w0")
    for name in (there := [name for name in sim.world_names() if sim.node_of(name) == bad]):
        sim.pods[sim.uid(name)]["gpu"] = [gpu_error(at=sim.stamp())]
    sim.tick()
    assert sim.document["directives"]["drain"] == sorted(sim.uid(name) for name in there)
    assert len(there) == 2
    assert sim.counted == ["Infrastructure"]


@pytest.mark.parametrize("crashed", [None, "gpt-w0", "gpt-w1"])
def test_one_fault_on_the_gpus_of_several_pods_counts_once_and_all_do_what_the_rule_says(
    make_sim: Make, crashed: str | None
) -> None:
    """As a kernel's bad address shows on every rank, before or after the crash that it leads to is told."""
    sim = training(make_sim, budgets=[], rules=[rule("RecreatePod", onGpuErrors={"xids": [31]})])
    first, *others = sim.world_names()
    sim.pods[sim.uid(first)]["gpu"] = [gpu_error(31, at=sim.stamp())]
    sim.tick()
    for name in others:
        error = gpu_error(31, at=sim.stamp())
        sim.pods[sim.uid(name)]["gpu"] = [error, {**error, "gpu": "GPU-2"}]
    if crashed is not None:
        fail(sim, pod=crashed)
    sim.run(200, until=lambda: sim.world_names() == ["gpt-w3", "gpt-w4", "gpt-w5"])
    sim.run(30)
    assert sim.counted == ["Infrastructure"]
    assert [incident.decision for incident in sim.status.incidents] == ["RecreatePodByRule"]
    assert sum("counted with gpt-w0" in words for words in told(sim, "RecreatePodByRule")) == 2


def test_a_fault_that_shows_on_the_pods_that_come_next_counts_again(make_sim: Make) -> None:
    sim = training(make_sim, budgets=[], rules=[rule("RestartGang", onGpuErrors={"xids": [31]})])
    for times in (1, 2):
        for name in sim.world_names():
            sim.pods[sim.uid(name)]["gpu"] = [gpu_error(31, at=sim.stamp())]
        sim.tick()
        before = set(sim.world_names())
        sim.run(200, until=lambda before=before: len(sim.world_names()) == 3 and not before & set(sim.world_names()))
        assert len(sim.counted) == times


def test_an_incident_that_fell_off_the_list_is_not_counted_again_when_a_pod_that_is_gone_still_tells_it(
    make_sim: Make,
) -> None:
    sim = training(make_sim, budgets=[], rules=[rule("Ignore", onGpuErrors={"xids": [79]})])
    fail(sim)
    last_word = copy.deepcopy(sim.heard["uid-gpt-w0"])
    last_word[1]["pod"]["uid"] = "gone"
    sim.heard["gone"] = last_word
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(79)]
    sim.run(30, until=lambda: decided(sim) == ["InPlaceByDefault", "IgnoreByRule"])
    for _ in range(12):
        sim.run(30, until=lambda: sim.world is not None)
        fail(sim)
        assert sim.status == Status.from_json(sim.status.to_json())
    assert sim.counted == ["Application"] * 13
    assert sim.status.restart_count == 13


def test_incidents_of_a_time_without_an_operator_are_all_counted_once_though_one_report_is_heard_in_part(
    make_sim: Make,
) -> None:
    sim = training(make_sim, budgets=[])
    fail(sim)
    (first,) = sim.incidents.values()
    for attempt in range(first["attempt"] + 1, first["attempt"] + 60):
        sim.incidents[first["generation"], attempt] = {**first, "attempt": attempt}
    sim.run(30)
    assert sim.counted == ["Application"] * 60
    assert sim.status.restart_count == 60


def test_a_worker_lost_with_the_operator_that_alone_had_seen_it_train_is_one_loss(make_sim: Make) -> None:
    """Its node is back soon, and the kubelet tells the next operator that the container ended, nobody knows how."""
    sim = training(make_sim)
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "uid-gpt-w3" in {member["podUID"] for member in sim.document["members"]})
    sim.deaf = True
    sim.run(5, until=lambda: "gpt-w3" in sim.world_names())
    node = sim.node_of("gpt-w3")
    sim.kill_node(node)
    sim.run(5, until=lambda: "gpt-w3" not in sim.world_names())
    sim.restart_operator(grace=True)
    sim.deaf = False
    sim.heal_node(node, rebooted=True)
    sim.run(60, until=lambda: "gpt-w4" in sim.world_names())
    assert [incident.pod for incident in sim.status.incidents] == ["gpt-w1", "gpt-w3"]
    assert sim.counted == ["Infrastructure"] * 2


def test_without_a_rule_the_sidecars_advice_is_followed(make_sim: Make) -> None:
    sim = training(make_sim)
    bad = sim.node_of("gpt-w1")
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(13, action="InPlace"), gpu_error(action="ReplaceNode")]
    sim.run(200, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    assert decided(sim) == ["ReplaceNodeByDefault"]
    assert [entry.node for entry in sim.status.avoided] == [bad]


def advised_without_room(make_sim: Make, *, minimum: int, **recovery: Any) -> Any:
    sim = make_sim(replicas=3, minimum=minimum, nodes=3, recovery=recovery)
    for name in sim.nodes:
        sim.nodes[name]["status"]["allocatable"]["cpu"] = "1"
    sim.obeys = True
    sim.run(60, until=lambda: sim.status.status == "Training")
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(action="ReplaceNode")]
    sim.run(60)
    return sim


def test_the_sidecars_advice_takes_no_worker_away_that_no_other_node_has_room_for(make_sim: Make) -> None:
    sim = advised_without_room(make_sim, minimum=3)
    assert sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert decided(sim) == ["InPlaceByDefault"]
    assert "GPU 0: XID 79; keeping the node" in told(sim, "InPlaceByDefault")[0]
    assert not sim.status.avoided


def test_the_sidecars_advice_is_followed_where_the_job_may_go_on_with_fewer(make_sim: Make) -> None:
    sim = advised_without_room(make_sim, minimum=2)
    assert sim.world_names() == ["gpt-w0", "gpt-w2"]
    assert decided(sim) == ["ReplaceNodeByDefault"]


def test_a_rule_is_followed_whether_there_is_room_or_not(make_sim: Make) -> None:
    rules = [rule("ReplaceNode", onGpuErrors={"xids": [79]})]
    sim = advised_without_room(make_sim, minimum=3, rules=rules)
    assert decided(sim) == ["ReplaceNodeByRule"]
    assert sim.status.avoided


def test_a_rule_may_set_aside_the_sidecars_advice_and_says_so_once(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("Ignore", onGpuErrors={"xids": [79]})])
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(action="ReplaceNode")]
    sim.run(60)
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert len(told(sim, "IgnoreByRule")) == 1
    assert sim.counted == []


@pytest.mark.parametrize("first", ["crash", "symptom"])
def test_a_gpu_error_and_the_crash_that_it_causes_are_one_incident(make_sim: Make, first: str) -> None:
    sim = training(make_sim, rules=[rule("ReplaceNode", cause="Infrastructure", onGpuErrors={"xids": [79]})])

    def show() -> None:
        sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(at=sim.stamp())]
        sim.tick()

    steps = [lambda: fail(sim, pod="gpt-w1"), show]
    for step in steps if first == "crash" else reversed(steps):
        step()
    sim.run(200, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    sim.run(30)
    (incident,) = sim.status.incidents
    assert (incident.cause, incident.decision) == ("Infrastructure", "ReplaceNodeByRule")
    assert sim.status.restart_count == 1
    assert [(count.cause, len(count.times)) for count in sim.status.restarts if count.total] == [
        ("Infrastructure", 1)
    ]


def test_a_condition_of_a_pod_that_trains_is_answered_at_once(make_sim: Make) -> None:
    rules = [rule("RecreatePod", name="sick", onPodConditions=[{"type": "example.com/Sick"}])]
    sim = training(make_sim, rules=rules)
    condition = {"type": "example.com/Sick", "status": "True", "reason": "Fever"}
    sim.pods["uid-gpt-w1"]["status"]["conditions"] = [condition]
    sim.tick()
    assert sim.document["directives"]["drain"] == ["uid-gpt-w1"]
    sim.run(120, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    assert decided(sim) == ["RecreatePodByRule"]
    assert "Sick True (Fever)" in sim.status.incidents[0].why


def test_a_condition_that_each_new_pod_shows_makes_no_tight_loop(make_sim: Make) -> None:
    rules = [rule("RecreatePod", onPodConditions=[{"type": "Ready", "status": "False"}])]
    sim = training(make_sim, rules=rules, budgets=[])
    for _ in range(300):
        for uid in sim.pods:
            sim.pods[uid]["status"].setdefault("conditions", [{"type": "Ready", "status": "False", "reason": "x"}])
        sim.tick()
    assert 3 < len(sim.created_names) < 25


def test_an_eviction_is_an_interruption_whose_rule_may_shun_the_node(make_sim: Make) -> None:
    rules = [rule("ReplaceNode", onPodConditions=[{"type": "DisruptionTarget"}])]
    sim = training(make_sim, rules=rules)
    node = sim.node_of("gpt-w1")
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    sim.pods["uid-gpt-w1"]["status"]["conditions"] = [condition]
    sim.delete("uid-gpt-w1")
    sim.run(60, until=lambda: len(sim.world_names()) == 3 and "gpt-w1" not in sim.world_names())
    sim.run(20)
    assert sim.counted == ["Interruption"]
    assert [entry.node for entry in sim.status.avoided] == [node]


@pytest.mark.parametrize("backend", ["Holdfast", "C10d"])
@pytest.mark.parametrize("asked", [{"onExitCodes": {"operator": "NotIn", "values": [2]}}, {"onSignals": ["SIGKILL"]}])
def test_no_rule_blames_the_script_for_the_code_of_a_pod_that_was_sent_away(
    make_sim: Make, backend: str, asked: dict[str, Any]
) -> None:
    recovery = {"rules": [rule("FailJob", cause="Application", **asked)]}
    sim = make_sim(rendezvous={"backend": backend}, recovery=recovery)
    sim.run(60, until=lambda: sim.status.status == "Training")
    sim.evict("gpt-w1")
    sim.settle()
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "gpt-w3" in sim.running() and sim.status.holds("Ready"))
    assert decided(sim) == ["RecreatePodByDefault"]
    assert sim.counted == ["Interruption"]


# Escalation


def test_a_pod_that_keeps_failing_climbs_the_ladder(make_sim: Make) -> None:
    ladder = {"actions": ["InPlace", "RecreatePod", "FailJob"], "failures": 2}
    sim = training(make_sim, nodes=6, escalation=ladder, budgets=[], backoff={"initialSeconds": 0})
    for _ in range(9):
        if sim.status.terminal or sim.status.status == "FailJobEscalated":
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


# Pauses


@given(st.integers(0, 3600), st.integers(0, 100), st.integers(1, 60), st.text(max_size=9))
def test_a_pause_is_never_longer_than_without_jitter_nor_shorter_than_it_allows(
    initial: int, jitter: int, count: int, key: str
) -> None:
    backoff = Backoff(initial_seconds=initial, max_seconds=3600, jitter_percent=jitter)
    seconds = pause(backoff, count, key).total_seconds()
    whole = backoff.seconds(count)
    assert whole * (1 - jitter / 100) - 1e-5 <= seconds <= whole + 1e-5
    assert pause(backoff, count, key).total_seconds() == seconds


@pytest.fixture
def paused(make_sim: Make) -> Any:
    """A job that trains, and whose script failed so often that the pause is minutes long."""
    sim = training(make_sim, nodes=6, budgets=[], backoff={"initialSeconds": 200, "maxSeconds": 300})
    fail(sim)
    sim.run(5, until=lambda: sim.world is not None)
    assert sim.status.backoff_until > sim.now + timedelta(seconds=100)
    return sim


def test_who_is_interrupted_during_a_pause_is_replaced_at_once(paused: Any) -> None:
    paused.notice("gpt-w1")
    paused.tick()
    assert "gpt-w3" in paused.names()


def test_a_node_that_dies_during_a_pause_costs_no_more_than_at_another_time(paused: Any) -> None:
    node = paused.node_of("gpt-w1")
    paused.kill_node(node)
    paused.node_unready(node)
    paused.run(30, until=lambda: "gpt-w3" in paused.world_names())


def test_a_job_that_is_made_larger_during_a_pause_grows_at_once(paused: Any) -> None:
    paused.body["spec"]["workers"]["replicas"] = 4
    paused.run(30, until=lambda: len(paused.world_names()) == 4)


def test_what_fails_by_itself_waits_for_the_pause_while_others_are_replaced(paused: Any) -> None:
    paused.end("gpt-w1", 1)
    paused.tick()
    paused.notice("gpt-w2")
    paused.run(100)
    assert paused.created_names[3:] == ["gpt-w3"]
    assert paused.status.held_back == 1
    paused.run(120, until=lambda: len(paused.world_names()) == 3)
    assert paused.status.held_back == 0


def test_an_operator_that_starts_anew_during_a_pause_holds_back_the_same(paused: Any) -> None:
    paused.end("gpt-w1", 1)
    paused.tick()
    paused.restart_operator(grace=True)
    paused.run(60)
    assert "gpt-w3" not in paused.created_names


def test_jobs_that_one_fault_hit_do_not_come_back_in_step() -> None:
    shares = sorted(share(f"job-{number}/1") for number in range(200))
    assert all(0 <= value < 1 for value in shares)
    assert max(later - earlier for earlier, later in pairwise(shares)) < 0.1


# Bad nodes


def test_a_node_that_fails_the_job_twice_is_avoided_until_its_failures_fade(make_sim: Make) -> None:
    sim = training(make_sim, avoidRepeatOffenders=2, budgets=[])
    bad = sim.node_of("gpt-w0")
    fail(sim, cause="Infrastructure", reason="RankKilled", code=137, pod="gpt-w0")
    sim.run(20)
    assert not sim.status.avoided
    fail(sim, cause="Infrastructure", reason="RankKilled", code=137, pod="gpt-w0")
    (entry,) = sim.status.avoided
    assert (entry.node, entry.reason) == (bad, "RepeatOffender")
    assert timedelta(hours=2) < entry.until - sim.now < timedelta(hours=3)
    assert "failed this job 2 times" in told(sim, "RepeatOffender")[0]
    sim.end("gpt-w0", 137)
    sim.run(60, until=lambda: "gpt-w3" in sim.world_names())
    assert sim.node_of("gpt-w3") != bad
    sim.now = entry.until
    sim.leases = dict.fromkeys(sim.nodes, sim.now)
    sim.restart_operator(grace=True)
    sim.settle()
    assert bad not in [known.node for known in sim.status.avoided if known.reason == "RepeatOffender"]


def test_a_node_that_falls_silent_and_comes_back_is_avoided_for_what_it_did_before(make_sim: Make) -> None:
    sim = training(make_sim, avoidRepeatOffenders=1)
    bad = sim.node_of("gpt-w0")
    sim.kill_node(bad)
    sim.run(6)
    assert [entry.reason for entry in sim.status.avoided] == ["RepeatOffender"], "its peers missed the worker there"
    sim.node_unready(bad)
    sim.run(20)
    assert {entry.reason for entry in sim.status.avoided} == {"NodeLost", "RepeatOffender"}
    sim.heal_node(bad, rebooted=False)
    sim.run(30)
    assert [(entry.node, entry.reason) for entry in sim.status.avoided] == [(bad, "RepeatOffender")]


def test_a_node_that_is_lost_again_and_again_is_avoided_when_it_is_back(make_sim: Make) -> None:
    rules = [rule("RecreatePod", onPodConditions=[{"type": "DisruptionTarget"}])]
    sim = training(make_sim, avoidRepeatOffenders=1, rules=rules)
    bad = sim.node_of("gpt-w0")
    sim.evict("gpt-w0", "DeletionByTaintManager")
    sim.kill_node(bad)
    sim.node_unready(bad)
    sim.run(30, until=lambda: "gpt-w3" in sim.running())
    sim.heal_node(bad, rebooted=False)
    sim.run(30)
    assert [(entry.node, entry.reason) for entry in sim.status.avoided] == [(bad, "RepeatOffender")]


def test_a_reboot_clears_a_node(make_sim: Make) -> None:
    sim = training(make_sim, avoidRepeatOffenders=2, budgets=[])
    node = sim.node_of("gpt-w0")
    fail(sim, cause="Infrastructure", pod="gpt-w0")
    sim.run(20)
    sim.nodes[node]["status"]["nodeInfo"]["bootID"] += "x"
    fail(sim, cause="Infrastructure", pod="gpt-w0")
    sim.run(20)
    assert not sim.status.avoided


def test_a_node_is_not_avoided_if_no_other_has_room(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=1, recovery={"avoidRepeatOffenders": 1})
    sim.run(60, until=lambda: sim.status.status == "Training")
    fail(sim, cause="Infrastructure")
    assert not sim.status.avoided
    assert "no other node has capacity" in told(sim, "RepeatOffenderStillUsed")[0]


@pytest.mark.parametrize("cause", ["Application", "OOM", "Interruption"])
def test_only_infrastructure_counts_against_a_node(make_sim: Make, cause: str) -> None:
    sim = training(make_sim, avoidRepeatOffenders=1, budgets=[])
    fail(sim, cause=cause)
    sim.run(5)
    assert not sim.status.avoided


HOURS = st.lists(st.floats(0, 400), min_size=1, max_size=c.OFFENCES_KEPT)


@given(HOURS, st.floats(0, 100))
def test_what_is_held_against_a_node_only_fades(hours: list[float], later: float) -> None:
    entry = NodeFailures(node="n", times=tuple(sorted(NOW - timedelta(hours=age) for age in hours)))
    weight = entry.weight(NOW)
    assert 0 < weight <= len(hours)
    assert entry.weight(NOW + timedelta(hours=later)) <= weight
    assert entry.plus(NOW).weight(NOW) > weight - 1e-9
    assert NodeFailures.from_json(entry.to_json()).node == "n"


@given(HOURS, st.integers(1, 10))
def test_a_node_is_good_again_when_its_time_is_over(hours: list[float], limit: int) -> None:
    entry = NodeFailures(node="n", times=tuple(NOW - timedelta(hours=age) for age in hours))
    weight = entry.weight(NOW)
    if weight >= limit - 0.5:
        over = NOW + repeat_offenders.until_below(weight, limit) + timedelta(seconds=1)
        assert entry.weight(over) < limit - 0.5


# Budgets


@given(st.lists(st.integers(0, 10**6), max_size=20), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_longer_window_never_counts_less(ages: list[int], window: int, more: int) -> None:
    count = RestartCount(cause="OOM", times=tuple(sorted(NOW - timedelta(seconds=age) for age in ages)))
    inner, outer = count.within(NOW, window), count.within(NOW, window + more)
    assert set(inner) <= set(outer)
    assert len(count.within(NOW + timedelta(seconds=more), window)) <= len(inner)


@pytest.mark.parametrize("budget", [999, 1000, 10_000])
def test_a_budget_of_any_size_ends_the_job_when_it_is_spent(trained: Any, budget: int) -> None:
    trained.body["spec"]["recovery"] = {"budgets": [{"cause": "Infrastructure", "maxRestarts": budget}]}
    spent = RestartCount(cause="Infrastructure", times=(trained.now,) * budget, total=budget)
    trained.body["status"]["restarts"] = [spent.to_json()]
    trained.run(10)
    assert not trained.status.terminal
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: trained.status.status == "InfrastructureBudgetExceeded")


# Always


def _incident(number: int, cause: str) -> Incident:
    return Incident(
        number=0,
        pair=AttemptId(generation=1, attempt=number),
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
def test_each_incident_is_decided_once_and_counted_once_or_ignored(
    trained: Any, recovery: dict[str, Any], failures: list[tuple[str, int | None]]
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
    assert len(draft.counted) == len(failures) - ignored == sum(count.total for count in draft.status.restarts)
    assert draft.status.restart_count == len(draft.counted)
    assert all(incident.decision and incident.why for incident in draft.status.incidents)
    assert len(draft.status.tallies) <= c.TALLIES_KEPT
    told = {event.reason for event in draft.events}
    assert {word.reason for word in draft.decided} <= told, "metric and event say the same"


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
    assert sim.status.restart_count == len(sim.counted)
    assert sim.plan().reason
