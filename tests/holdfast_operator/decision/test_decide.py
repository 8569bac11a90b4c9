"""One job from its first pass to its end, on the simulated cluster: what is lost, why, and counted as what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from sim import Make, Sim

from holdfast_operator.api.status import AvoidedNode


def trains_with(sim: Sim, count: int) -> Callable[[], bool]:
    def condition() -> bool:
        return len(sim.world_names()) == count and (sim.status.ready_workers, sim.status.wanted_workers) == (count, 3)

    return condition


def causes(sim: Sim) -> list[str]:
    return [incident.cause for incident in sim.status.incidents]


def test_a_gang_starts_together_and_trains(sim: Sim) -> None:
    sim.settle()
    assert all(
        "schedulingGates" in sim.pods[sim.uid(name)]["spec"] or sim.status.gang.lifted_at for name in sim.names()
    )
    sim.run(60, until=trains_with(sim, 3))
    assert sim.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert sim.status.membership.generation == 1
    assert sim.status.membership.active is not None
    assert sim.status.summary == "Training"
    assert sim.status.incident_count == 0


def test_oom_is_named_though_survivors_saw_a_peer_vanish(trained: Sim) -> None:
    trained.end("gpt-w1", 137, reason="OOMKilled")
    trained.tick()
    assert trained.incidents
    assert {told["cause"] for told in trained.incidents.values()} == {"Infrastructure"}
    assert causes(trained) == ["OOM"]
    assert trained.counted == ["OOM"]


def test_a_deleted_pod_is_replaced_and_is_an_interruption(trained: Sim) -> None:
    trained.delete(trained.uid("gpt-w1"))
    trained.run(90, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30, until=lambda: bool(causes(trained)))
    assert trained.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"]
    assert causes(trained) == ["Interruption"]
    assert trained.counted == ["Interruption"]


def test_a_leaver_that_knew_the_next_world_is_counted_once(trained: Sim) -> None:
    uid = trained.uid("gpt-w1")
    trained.delete(uid)
    _, last = trained.heard[uid]
    last["launcher"]["started"] = {"generation": 1, "attempt": 2}  # its peers told it before it was gone
    trained.run(90, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30)
    assert trained.counted == ["Interruption"]


def test_a_killed_launcher_counts_as_infrastructure_once(trained: Sim) -> None:
    trained.end("gpt-w1", 137)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30)
    assert causes(trained) == ["Infrastructure"]
    assert trained.status.incident_count == 1
    assert trained.status.incidents[0].resumed is not None


def test_a_dead_nodes_worker_is_replaced_before_its_proof_of_end(trained: Sim) -> None:
    node = trained.node_of("gpt-w1")
    trained.kill_node(node)
    trained.run(120, until=lambda: "gpt-w3" in trained.world_names())
    assert trained.node_of("gpt-w3") != node
    assert node in {entry.node for entry in trained.status.avoided}
    assert trained.uid("gpt-w1") not in trained.status.membership.gone
    assert causes(trained) == ["Infrastructure"]
    trained.heal_node(node, rebooted=True)
    trained.run(30)
    assert "gpt-w1" not in trained.running()
    assert not trained.status.avoided
    assert trained.status.incident_count == 1


def test_a_noticed_worker_drains_and_its_node_is_avoided(trained: Sim) -> None:
    node = trained.node_of("gpt-w2")
    uid = trained.uid("gpt-w2")
    trained.notice("gpt-w2")
    trained.tick()
    assert trained.document["directives"]["drain"] == [uid]
    assert "gpt-w3" in trained.names()
    trained.end("gpt-w2", 75)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30)
    assert trained.node_of("gpt-w3") != node
    assert causes(trained) == ["Interruption"]


def test_a_noticed_node_is_used_again_once_it_is_another_machine(trained: Sim) -> None:
    node = trained.node_of("gpt-w2")
    trained.notice("gpt-w2")
    trained.tick()
    trained.end("gpt-w2", 75)
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    assert node in {entry.node for entry in trained.status.avoided}
    trained.kill_node(node)
    trained.heal_node(node, rebooted=True)
    trained.run(30)
    assert not trained.status.avoided


def test_a_pod_deleted_by_force_is_an_interruption(trained: Sim) -> None:
    trained.force_gone("gpt-w0")
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30)
    assert causes(trained) == ["Interruption"]


@pytest.mark.parametrize("force", [False, True])
def test_most_pods_deleted_at_once_are_one_incident(make_sim: Make, force: bool) -> None:
    sim = make_sim(replicas=16, nodes=20, recovery={"budgets": [{"cause": "Application", "maxRestarts": 0}]})
    sim.run(60, until=lambda: len(sim.world_names()) == 16)
    for name in sim.names()[:15]:
        sim.force_gone(name) if force else sim.delete(sim.uid(name))
    sim.tick()
    assert len(sim.created_names) == 16 + 15
    sim.run(200, step=2.0, until=lambda: len(sim.world_names()) == 16)
    assert sim.counted == causes(sim) == ["Interruption"]
    assert not sim.status.terminal


@pytest.mark.parametrize("owned", [True, False])
def test_a_pod_that_somebody_recreates_takes_no_workers_place(make_sim: Make, owned: bool) -> None:
    """Its name and labels are a worker's, and its UID is not. One that names the job as its owner is surplus."""
    sim = make_sim(nodes=6)
    sim.run(60, until=trains_with(sim, 3))
    again = copy.deepcopy(sim.pods[sim.uid("gpt-w1")])
    sim.force_gone("gpt-w1")
    again["metadata"] |= {"uid": "another"} | ({} if owned else {"ownerReferences": []})
    again["status"] = {"phase": "Pending"}
    del again["spec"]["nodeName"]
    sim.pods["another"] = again
    sim.run(120)
    assert sim.world_names() == ["gpt-w0", "gpt-w2", "gpt-w3"]
    assert ("another" in sim.pods) is not owned
    assert sim.counted == ["Interruption"]


def test_all_launchers_killed_is_one_incident(trained: Sim) -> None:
    for name in trained.names():
        trained.end(name, 137)
    trained.run(120, until=lambda: len(trained.world_names()) == 3)
    trained.run(30)
    assert causes(trained) == ["Infrastructure"]
    assert trained.world_names() == ["gpt-w3", "gpt-w4", "gpt-w5"]


def test_the_steps_lost_with_all_launchers_are_counted(trained: Sim) -> None:
    trained.step = 100
    trained.run(7)  # progress is written every few seconds only
    reached = trained.step
    for name in trained.names():
        trained.end(name, 137)
    trained.step, trained.restored = 70, {"step": 70, "from": "object"}
    trained.run(120, until=lambda: len(trained.world_names()) == 3)
    trained.run(30)
    (incident,) = trained.status.incidents
    assert (incident.lost_steps, incident.restored_from) == (reached - 70, "object")
    told = next(message for reason, message in trained.events if reason == "TrainingResumed")
    assert told.endswith(f"{reached - 70} steps lost, state from: object")


def test_a_launcher_that_reported_its_end_is_not_waited_for(trained: Sim) -> None:
    """Its report stays the newest of its pod for a while, in which others train on."""
    trained.step = 100
    trained.run(7)
    last = trained.incident_of("gpt-w2", cause="Interruption", reason="Drained")
    trained.incidents[last["generation"], last["attempt"]] = last
    trained.tick()
    reached = trained.step
    trained.incidents.clear()  # none of the launchers to come knows of it
    for name in trained.names():
        trained.end(name, 137)
    trained.step, trained.restored = 70, {"step": 70, "from": "object"}
    trained.run(120, until=lambda: len(trained.world_names()) == 3)
    trained.run(40)
    (incident,) = trained.status.incidents
    assert (incident.cause, incident.reason) == ("Interruption", "Drained")
    assert (incident.lost_steps, incident.restored_from) == (reached - 70, "object")


def test_an_unknown_origin_of_the_state_is_not_guessed(trained: Sim) -> None:
    for name in trained.names():
        trained.end(name, 137)
    trained.run(120, until=lambda: len(trained.world_names()) == 3)
    trained.run(30)
    (incident,) = trained.status.incidents
    assert incident.resumed is not None
    assert (incident.lost_steps, incident.restored_from) == (None, None)


def test_a_final_exit_fails_the_job_with_its_traceback(trained: Sim, final_exit: str) -> None:
    for name in ("gpt-w0", "gpt-w1", "gpt-w2"):
        trained.end(name, 1, message=final_exit)
    trained.run(30, until=lambda: trained.status.holds("Failed"))
    failed = trained.status.condition("Failed")
    assert failed.reason == "Exception"
    assert failed.message.endswith("ValueError: loss is negative")
    assert causes(trained) == ["Application"]


def test_an_interruption_never_burns_the_applications_budget(make_sim: Make) -> None:
    sim = make_sim(recovery={"budgets": [{"cause": "Application", "maxRestarts": 0}]})
    sim.run(60, until=trains_with(sim, 3))
    for _ in range(4):
        sim.delete(sim.uid(sim.running()[0]))
        sim.run(60, until=trains_with(sim, 3))
        sim.run(20)
    assert not sim.status.terminal
    assert set(causes(sim)) == {"Interruption"}


def test_a_spent_budget_fails_the_job(make_sim: Make) -> None:
    budgets = [{"cause": "Infrastructure", "maxRestarts": 1}]
    sim = make_sim(recovery={"budgets": budgets, "backoff": {"initialSeconds": 1, "maxSeconds": 2}})
    sim.run(60, until=trains_with(sim, 3))
    for _ in range(2):
        sim.end(sim.running()[0], 137)
        sim.run(40, until=lambda: sim.status.terminal or len(sim.world_names()) == 3)
        sim.run(15)
    assert sim.status.holds("Failed")
    assert sim.status.summary == "InfrastructureBudgetExceeded"
    assert not sim.running()


def test_two_workers_one_lost_go_on_as_one_by_the_operators_word(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=2)
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    sim.kill_node(sim.node_of("gpt-w0"))
    sim.run(60, until=lambda: sim.world_names() == ["gpt-w1"])
    assert sim.status.condition("Degraded").reason == "RunningWithFewerWorkers"


def test_the_only_worker_on_a_silent_node_awaits_its_fence(make_sim: Make) -> None:
    sim = make_sim(replicas=1, minimum=1, nodes=2)
    sim.run(60, until=lambda: len(sim.world_names()) == 1)
    node = sim.node_of("gpt-w0")
    sim.kill_node(node)
    sim.run(90, until=lambda: sim.status.summary == "AwaitingFence" or "AwaitingFence" in str(sim.events))
    assert not sim.world_names()
    assert "out-of-service" in sim.status.condition("Degraded").message
    sim.heal_node(node, rebooted=True)
    sim.run(60, until=lambda: sim.world_names() == ["gpt-w1"])
    assert sim.status.incident_count == 1


def test_a_launcher_that_hangs_on_a_healthy_node_is_replaced(trained: Sim) -> None:
    node = trained.node_of("gpt-w1")
    trained.freeze("gpt-w1")
    trained.run(40)
    assert trained.names() == ["gpt-w0", "gpt-w1", "gpt-w2"], "it may be a pause"
    trained.run(60, until=lambda: "gpt-w3" in trained.world_names())
    trained.run(30)
    assert "gpt-w1" not in trained.names()
    assert causes(trained) == ["Infrastructure"]
    assert trained.counted == ["Infrastructure"], "its peers told of it, and it is told once"
    assert node not in {entry.node for entry in trained.status.avoided}, "the node is well"


def test_the_only_worker_whose_launcher_hangs_is_replaced(make_sim: Make) -> None:
    sim = make_sim(replicas=1, minimum=1, nodes=2)
    sim.run(60, until=lambda: len(sim.world_names()) == 1)
    sim.freeze("gpt-w0")
    sim.run(120, until=lambda: sim.world_names() == ["gpt-w1"])
    assert sim.counted == ["Infrastructure"]
    assert sim.status.incidents[0].reason == "LauncherUnresponsive"


def test_scaling_down_drains_the_surplus_and_counts_nothing(trained: Sim) -> None:
    trained.body["spec"]["workers"]["replicas"] = 2
    trained.body["metadata"]["generation"] = 2
    trained.tick()
    drained = trained.document["directives"]["drain"]
    assert len(drained) == 1
    trained.end(trained.pods[drained[0]]["metadata"]["name"], 75)
    trained.run(60, until=lambda: (trained.status.ready_workers, trained.status.wanted_workers) == (2, 2))
    trained.run(20)
    assert trained.status.incident_count in (0, 1)
    assert len(trained.running()) == 2


def test_scaling_up_adds_a_worker_by_a_new_generation(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1)
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    sim.body["spec"]["workers"]["replicas"] = 3
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert sim.status.membership.generation == 2
    assert sim.status.incident_count == 0


def test_a_restart_of_the_operator_changes_nothing(trained: Sim) -> None:
    before = trained.names(), trained.status.membership.generation, trained.status.conditions
    for _ in range(3):
        trained.restart_operator(grace=True)
        trained.settle()
        trained.tick()
    assert (trained.names(), trained.status.membership.generation, trained.status.conditions) == before


def test_a_restart_in_the_middle_of_a_recovery_counts_it_once(trained: Sim) -> None:
    trained.end("gpt-w1", 137)
    for _ in range(12):
        trained.tick()
        trained.restart_operator(grace=True)
    trained.run(60, until=lambda: len(trained.world_names()) == 3)
    trained.run(30)
    assert causes(trained) == ["Infrastructure"]
    assert trained.counted == ["Infrastructure"]


def test_silence_alone_loses_nobody(trained: Sim) -> None:
    """An operator that was away for an hour hears no reports at first: nothing is replaced for that."""
    trained.now += timedelta(hours=1)
    for name in trained.nodes:
        trained.leases[name] = trained.now
    trained.restart_operator(grace=True)
    trained.settle()
    assert trained.names() == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert not trained.status.incidents


def test_a_worker_avoids_a_few_nodes_that_stay_bad_longest(trained: Sim) -> None:
    ends = [trained.now + timedelta(minutes=5 + n) for n in range(20)]
    names = [f"bad-{n:02}" for n in range(20)]
    for name in names:
        trained.nodes[name] = copy.deepcopy(trained.nodes["node-1"])
        trained.nodes[name]["metadata"]["name"] = name
    trained.leases |= dict.fromkeys(names, trained.now)
    boot = trained.nodes["bad-00"]["status"]["nodeInfo"]["bootID"]
    avoided = tuple(
        AvoidedNode(node=name, reason="x", until=end, boot_id=boot) for name, end in zip(names, ends, strict=True)
    )
    trained.body["status"] = replace(trained.status, avoided=avoided).to_json()
    trained.end("gpt-w1", 137)
    trained.settle()
    told = next(worker.avoid for worker in trained.status.workers if worker.incarnation == 3)
    assert told == tuple(names[4:])
