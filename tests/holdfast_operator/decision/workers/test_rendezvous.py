"""Workers without Holdfast's launcher: torchrun's own rendezvous around one of them, or none at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Make, Sim


@pytest.fixture
def make_met(make_sim: Make) -> Make:
    """A job of this backend whose workers run."""

    def make(backend: str, **job: Any) -> Any:
        sim = make_sim(rendezvous={"backend": backend}, **job)
        sim.run(60, until=lambda: sim.status.holds("Ready"))
        return sim

    return make


def env(sim: Sim, name: str) -> dict[str, str]:
    """What the trainer of this pod is told in plain values."""
    (trainer,) = sim.pods[sim.uid(name)]["spec"]["containers"]
    return {item["name"]: item.get("value", "") for item in trainer["env"]}


def asked(sim: Sim, name: str) -> dict[str, str]:
    """The options of its torchrun."""
    return {key[4:]: value for key, value in env(sim, name).items() if key.startswith("PET_")}


# C10d


def test_an_unmodified_torchrun_is_told_where_to_meet(make_met: Make) -> None:
    sim = make_met("C10d", elasticity={"minReplicas": 2, "maxReplicas": 4})
    common = {
        "NNODES": "2:4",
        "NPROC_PER_NODE": "1",
        "RDZV_BACKEND": "c10d",
        "RDZV_ID": "gpt-job-gpt-0",
        "LOCAL_ADDR": "$(HOLDFAST_POD_IP)",
        "MAX_RESTARTS": "3",
    }
    host = {"RDZV_ENDPOINT": "$(HOLDFAST_POD_IP):29400", "RDZV_CONF": "is_host=1"}
    guest = {"RDZV_ENDPOINT": "10.96.0.7:29400", "RDZV_CONF": "is_host=0"}
    assert asked(sim, "gpt-w0") == common | host
    assert env(sim, "gpt-w0")["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert asked(sim, "gpt-w1") == asked(sim, "gpt-w2") == common | guest
    selector = sim.children["gpt-rendezvous"]["spec"]["selector"]
    assert selector == {"holdfast.dev/job-name": "gpt", "holdfast.dev/incarnation": "0"}


def test_the_sidecar_waits_for_no_launcher(make_met: Make) -> None:
    sim = make_met("C10d")
    (sidecar,) = sim.pods[sim.uid("gpt-w0")]["spec"]["initContainers"]
    assert {"name": "HOLDFAST_LAUNCHER", "value": "None"} in sidecar["env"]


def test_workers_run_says_the_condition_and_not_that_they_train(make_met: Make) -> None:
    sim = make_met("C10d")
    assert (sim.status.ready_workers, sim.status.condition("Ready").message) == (3, "3 of 3 workers are running")


def test_no_worker_is_made_before_the_address_is_known(make_sim: Make) -> None:
    sim = make_sim(rendezvous={"backend": "C10d"})
    plan = sim.plan()
    assert not [action for action in plan.actions if type(action).__name__ == "CreatePod"]
    assert plan.requeue_after is not None
    assert plan.requeue_after <= 1


@pytest.mark.parametrize("how", ["deleted", "ended"])
def test_replacement_joins_the_same_host(make_met: Make, how: str) -> None:
    sim = make_met("C10d")
    if how == "deleted":
        sim.delete(sim.uid("gpt-w2"))
    else:
        sim.end("gpt-w2", 1)
    sim.run(40, until=lambda: "gpt-w3" in sim.names() and sim.status.holds("Ready"))
    assert {"gpt-w0", "gpt-w1", "gpt-w3"} == set(sim.running())
    assert asked(sim, "gpt-w3")["RDZV_ID"] == "gpt-job-gpt-0"
    cause = "Interruption" if how == "deleted" else "Application"
    assert [(count.cause, len(count.times)) for count in sim.status.incidents_by_cause] == [(cause, 1)]
    assert sim.status.incidents[0].resumed is not None


def test_lost_host_restarts_all_and_counts_once(make_met: Make) -> None:
    sim = make_met("C10d")
    sim.delete(sim.uid("gpt-w0"))
    sim.run(60, until=lambda: set(sim.running()) == {"gpt-w3", "gpt-w4", "gpt-w5"} and sim.status.holds("Ready"))
    assert asked(sim, "gpt-w3")["RDZV_CONF"] == "is_host=1"
    assert {asked(sim, name)["RDZV_ID"] for name in sim.running()} == {"gpt-job-gpt-3"}
    assert sim.children["gpt-rendezvous"]["spec"]["selector"]["holdfast.dev/incarnation"] == "3"
    assert [(count.cause, len(count.times)) for count in sim.status.incidents_by_cause] == [("Interruption", 1)]


def test_torchruns_that_give_up_together_are_one_incident(make_met: Make) -> None:
    sim = make_met("C10d")
    for name in ("gpt-w2", "gpt-w1", "gpt-w0"):
        sim.end(name, 1, message="train.py FAILED")
        sim.run(3)
    sim.run(90, until=lambda: sim.status.holds("Ready"))
    assert [(count.cause, len(count.times)) for count in sim.status.incidents_by_cause] == [("Application", 1)]
    assert "train.py FAILED" in sim.status.incidents[0].message


def test_new_workers_wait_until_the_host_is_proved_gone(make_met: Make) -> None:
    """The host may still train."""
    sim = make_met("C10d")
    node = sim.node_of("gpt-w0")
    sim.kill_node(node)
    sim.node_unready(node)
    sim.run(60, until=lambda: sim.status.summary == "AwaitingFence")
    assert "gpt-w0 on" in sim.status.condition("Degraded").message
    sim.run(60)
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    sim.heal_node(node, rebooted=True)
    sim.run(60, until=lambda: sim.status.holds("Ready"))
    assert len(sim.running()) == 3
    assert "gpt-w0" not in sim.running()


def test_a_host_that_comes_back_leaves_for_the_one_in_its_place(make_met: Make) -> None:
    sim = make_met("C10d")
    node = sim.node_of("gpt-w0")
    sim.kill_node(node)
    sim.node_unready(node)
    sim.run(60, until=lambda: sim.status.summary == "AwaitingFence")
    sim.heal_node(node, rebooted=False)
    sim.run(90, until=lambda: len(sim.running()) == 3 and sim.status.holds("Ready"))
    assert {asked(sim, name)["RDZV_ID"] for name in sim.running()} == {"gpt-job-gpt-3"}
    assert sim.children["gpt-rendezvous"]["spec"]["selector"]["holdfast.dev/incarnation"] == "3"


def test_a_worker_that_must_leave_is_not_waited_for(make_met: Make) -> None:
    sim = make_met("C10d")
    sim.notice("gpt-w1")
    sim.tick()
    assert sim.pods[sim.uid("gpt-w1")]["metadata"].get("deletionTimestamp"), "nobody would answer a directive"


def test_the_host_is_the_last_to_leave_a_job_that_shrinks(make_met: Make) -> None:
    sim = make_met("C10d", minimum=1)
    sim.delete(sim.uid("gpt-w0"))
    sim.run(60, until=lambda: len(sim.running()) == 3 and sim.status.holds("Ready"))
    sim.body["spec"]["workers"]["replicas"] = 1
    sim.run(60, until=lambda: len(sim.running()) == 1)
    assert sim.running() == ["gpt-w3"]


def test_one_torchrun_that_ends_well_completes_the_job(make_met: Make) -> None:
    sim = make_met("C10d")
    sim.end("gpt-w1", 0)
    sim.tick()
    assert sim.status.holds("Complete")


def test_a_fixed_size_is_asked_for_where_the_job_may_not_shrink(make_met: Make) -> None:
    sim = make_met("C10d", elasticity={"minReplicas": 2, "onFailure": "Replace"})
    assert asked(sim, "gpt-w1")["NNODES"] == "3:3"


def test_the_host_is_known_again_after_the_operators_restart(make_met: Make) -> None:
    sim = make_met("C10d")
    sim.restart_operator()
    sim.delete(sim.uid("gpt-w2"))
    sim.run(60, until=lambda: "gpt-w3" in sim.running())
    assert asked(sim, "gpt-w3")["RDZV_ENDPOINT"] == "10.96.0.7:29400"


def send_away(sim: Sim, name: str, code: int) -> None:
    """Evicted; the script has its own answer to SIGTERM."""
    sim.evict(name)
    sim.end(name, code)


@pytest.mark.parametrize("seen", ["while it leaves", "once it has ended"])
def test_terminated_torchrun_does_not_complete_the_job(make_met: Make, seen: str) -> None:
    """It exits with 0 after SIGTERM."""
    sim = make_met("C10d")
    if seen == "while it leaves":
        sim.delete(sim.uid("gpt-w1"))
        sim.settle()
    send_away(sim, "gpt-w1", 0)
    sim.run(60, until=lambda: "gpt-w3" in sim.running() and sim.status.holds("Ready"))
    assert sim.counted == ["Interruption"]


def test_a_surplus_torchrun_that_ends_well_completes_nothing(make_met: Make) -> None:
    sim = make_met("C10d")
    sim.body["spec"]["workers"]["replicas"] = 2
    sim.settle()
    sim.end("gpt-w2", 0)
    sim.run(30)
    assert sim.running() == ["gpt-w0", "gpt-w1"]
    assert not sim.status.terminal


# None


def test_terminated_worker_does_not_complete_its_part(make_met: Make) -> None:
    """It exits with 0 after SIGTERM."""
    sim = make_met("None")
    for name in sim.running():
        send_away(sim, name, 0)
    sim.run(60, until=lambda: sim.running() == ["gpt-w3", "gpt-w4", "gpt-w5"])
    assert not sim.status.terminal
    for name in sim.running():
        sim.end(name, 0)
    sim.run(5, until=lambda: sim.status.holds("Complete"))


def test_workers_on_their_own_are_told_nothing(make_met: Make) -> None:
    sim = make_met("None")
    assert asked(sim, "gpt-w0") == {}
    assert "gpt-rendezvous" not in sim.children


def test_each_workers_part_is_waited_for_and_done_once(make_met: Make) -> None:
    sim = make_met("None")
    sim.end("gpt-w1", 0)
    sim.run(30)
    assert not sim.status.terminal
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert not sim.status.incidents_by_cause or not any(count.times for count in sim.status.incidents_by_cause)
    sim.end("gpt-w0", 1)
    sim.run(60, until=lambda: "gpt-w3" in sim.running())
    sim.end("gpt-w2", 0)
    sim.run(30)
    assert not sim.status.terminal
    sim.end("gpt-w3", 0)
    sim.run(5, until=lambda: sim.status.holds("Complete"))


def test_a_done_part_stays_done_when_its_pod_is_removed(make_met: Make) -> None:
    sim = make_met("None")
    sim.end("gpt-w1", 0)
    sim.tick()
    sim.force_gone("gpt-w1")
    sim.run(120)
    assert sim.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert not sim.status.terminal


# Either


@pytest.mark.parametrize("backend", ["C10d", "None"])
@pytest.mark.parametrize("code", [70, 75])
def test_launcher_exit_codes_are_the_scripts_without_launcher(make_met: Make, backend: str, code: int) -> None:
    sim = make_met(backend, replicas=2)
    for _ in range(200):
        for name in sim.running():
            sim.end(name, code)
        sim.tick()
    assert sim.status.summary == "ApplicationBudgetExceeded"
    assert f"exit code {code}" in sim.status.condition("Failed").message


@pytest.mark.parametrize("backend", ["C10d", "None"])
def test_whatever_an_evicted_worker_ends_with_is_an_interruption(make_met: Make, backend: str) -> None:
    sim = make_met(backend)
    send_away(sim, "gpt-w1", 1)
    sim.run(60, until=lambda: "gpt-w3" in sim.running() and sim.status.holds("Ready"))
    assert sim.counted == ["Interruption"]


# Whatever happens


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["C10d", "None"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_lost_the_job_runs_again_with_one_host(make_met: Make, backend: str, data: Any) -> None:
    sim = make_met(backend, minimum=1, recovery={"budgets": []})
    for _ in range(data.draw(st.integers(1, 6))):
        running = sim.running()
        if running:
            name = data.draw(st.sampled_from(running))
            data.draw(st.sampled_from([sim.delete, lambda uid, n=name: sim.end(n, 1)]))(sim.uid(name))
        sim.run(data.draw(st.integers(1, 20)))
    sim.run(400, until=lambda: len(sim.running()) == 3 and sim.status.holds("Ready"))
    hosts = {asked(sim, name).get("RDZV_ID") for name in sim.running()}
    assert len(hosts) == 1
