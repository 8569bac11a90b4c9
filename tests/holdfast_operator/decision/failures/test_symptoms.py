"""What a pod or a GPU shows before its worker fails, and what a rule makes of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from failing_jobs import decided, fail, gpu_error, rule, told, training
from sim import Make, Sim

from holdfast_operator.api.status import Status


def test_a_gpu_error_that_a_rule_names_moves_the_worker_once(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("ReplaceNode", name="bus", onGpuErrors={"xids": [79]})])
    bad = sim.node_of("gpt-w1")
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(at=sim.stamp())]
    sim.run(200, until=lambda: sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"])
    sim.run(60)
    assert bad not in {sim.node_of(name) for name in sim.world_names()}
    assert sim.counted == ["Infrastructure"]
    assert "rule bus matches GPU error Xid 79" in told(sim, "ReplaceNodeByRule")[0]


def test_a_symptom_during_training_loses_no_step(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("Ignore", cause="Infrastructure", onGpuErrors={"xids": [79]})])
    sim.restored = {"step": 0, "from": "nothing"}
    sim.run(60, until=lambda: sim.step > 20)
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(at=sim.stamp())]
    sim.run(60, until=lambda: bool(sim.status.incidents) and sim.status.incidents[0].resumed is not None)
    (incident,) = sim.status.incidents
    assert (incident.reason, incident.lost_steps, incident.restored_from) == ("GpuError", None, None)


def test_two_workers_with_one_symptom_leave_as_one_incident(make_sim: Make) -> None:
    sim = training(make_sim, nodes=2, rules=[rule("ReplaceNode", onGpuErrors={"xids": [79]})])
    bad = sim.node_of("gpt-w0")
    for name in (there := [name for name in sim.world_names() if sim.node_of(name) == bad]):
        sim.pods[sim.uid(name)]["gpu"] = [gpu_error(at=sim.stamp())]
    sim.tick()
    assert sim.document["directives"]["drain"] == sorted(sim.uid(name) for name in there)
    assert len(there) == 2
    assert sim.counted == ["Infrastructure"]


@pytest.mark.parametrize("crashed", [None, "gpt-w0", "gpt-w1"])
def test_one_fault_on_several_pods_gpus_counts_once(make_sim: Make, crashed: str | None) -> None:
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


def test_a_fault_that_the_next_pods_show_counts_again(make_sim: Make) -> None:
    sim = training(make_sim, budgets=[], rules=[rule("RestartGang", onGpuErrors={"xids": [31]})])
    for times in (1, 2):
        for name in sim.world_names():
            sim.pods[sim.uid(name)]["gpu"] = [gpu_error(31, at=sim.stamp())]
        sim.tick()
        before = set(sim.world_names())
        sim.run(200, until=lambda before=before: len(sim.world_names()) == 3 and not before & set(sim.world_names()))
        assert len(sim.counted) == times


def test_an_old_incident_that_a_gone_pod_repeats_counts_once(
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
    assert sim.status.incident_count == 13


def test_incidents_during_an_operator_outage_are_counted_once(
    make_sim: Make,
) -> None:
    sim = training(make_sim, budgets=[])
    fail(sim)
    (first,) = sim.incidents.values()
    for attempt in range(first["attempt"] + 1, first["attempt"] + 60):
        sim.incidents[first["generation"], attempt] = {**first, "attempt": attempt}
    sim.run(30)
    assert sim.counted == ["Application"] * 60
    assert sim.status.incident_count == 60


def test_a_worker_lost_with_its_operator_is_one_loss(make_sim: Make) -> None:
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


def advised_without_room(make_sim: Make, *, minimum: int, **recovery: Any) -> Sim:
    sim = make_sim(replicas=3, minimum=minimum, nodes=3, recovery=recovery)
    for name in sim.nodes:
        sim.nodes[name]["status"]["allocatable"]["cpu"] = "1"
    sim.obeys = True
    sim.run(60, until=lambda: sim.status.summary == "Training")
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(action="ReplaceNode")]
    sim.run(60)
    return sim


def test_the_sidecars_advice_is_ignored_without_free_capacity(make_sim: Make) -> None:
    sim = advised_without_room(make_sim, minimum=3)
    assert sim.world_names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert decided(sim) == ["InPlaceByDefault"]
    assert "GPU 0: XID 79; keeping the node" in told(sim, "InPlaceByDefault")[0]
    assert not sim.status.avoided


def test_the_sidecars_advice_is_followed_where_fewer_may_train(make_sim: Make) -> None:
    sim = advised_without_room(make_sim, minimum=2)
    assert sim.world_names() == ["gpt-w0", "gpt-w2"]
    assert decided(sim) == ["ReplaceNodeByDefault"]


def test_a_rule_is_followed_whether_there_is_room_or_not(make_sim: Make) -> None:
    rules = [rule("ReplaceNode", onGpuErrors={"xids": [79]})]
    sim = advised_without_room(make_sim, minimum=3, rules=rules)
    assert decided(sim) == ["ReplaceNodeByRule"]
    assert sim.status.avoided


def test_a_rule_overrides_the_sidecars_advice_and_says_so_once(make_sim: Make) -> None:
    sim = training(make_sim, rules=[rule("Ignore", onGpuErrors={"xids": [79]})])
    sim.pods["uid-gpt-w1"]["gpu"] = [gpu_error(action="ReplaceNode")]
    sim.run(60)
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert len(told(sim, "IgnoreByRule")) == 1
    assert sim.counted == []


@pytest.mark.parametrize("first", ["crash", "symptom"])
def test_a_gpu_error_and_the_crash_it_causes_are_one_incident(make_sim: Make, first: str) -> None:
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
    assert sim.status.incident_count == 1
    assert [(count.cause, len(count.times)) for count in sim.status.incidents_by_cause if count.total] == [
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


def test_a_rule_on_evictions_may_avoid_the_node(make_sim: Make) -> None:
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
def test_no_rule_blames_the_script_for_an_evicted_pods_exit_code(
    make_sim: Make, backend: str, asked: dict[str, Any]
) -> None:
    recovery = {"rules": [rule("FailJob", cause="Application", **asked)]}
    sim = make_sim(rendezvous={"backend": backend}, recovery=recovery)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    sim.evict("gpt-w1")
    sim.settle()
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: "gpt-w3" in sim.running() and sim.status.holds("Ready"))
    assert decided(sim) == ["RecreatePodByDefault"]
    assert sim.counted == ["Interruption"]
