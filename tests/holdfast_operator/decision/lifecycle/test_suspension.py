"""A suspended job: its workers commit and leave, nothing is counted, and it goes on from its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim import Make, Sim

from holdfast_operator.decision.decide import decide
from holdfast_operator.scheduling.waiting_gang import rival_of


def suspend(sim: Sim, wanted: bool = True) -> None:
    sim.body["spec"]["suspend"] = wanted
    sim.body["metadata"]["generation"] += 1
    sim.settle()


def suspended(sim: Sim) -> None:
    suspend(sim)
    sim.obey_drain()
    sim.run(60, until=lambda: sim.status.holds("Suspended"))


def test_all_workers_are_asked_for_one_commit_and_to_leave(trained: Sim) -> None:
    suspend(trained)
    assert trained.document["directives"]["drain"] == ["uid-gpt-w0", "uid-gpt-w1", "uid-gpt-w2"]
    assert trained.status.summary == "Suspending"
    assert not trained.status.holds("Suspended"), "the template may not change before they have left"
    assert trained.names() == ["gpt-w0", "gpt-w1", "gpt-w2"], "nothing is deleted before it has committed"


def test_suspension_waits_for_the_checkpoint_timeout(make_sim: Make) -> None:
    sim = make_sim(hangDetection={"checkpointTimeoutSeconds": 600}, interruption={"checkpointDeadlineSeconds": 25})
    sim.run(60, until=lambda: sim.status.summary == "Training")
    assert sim.document["settings"]["checkpoint"]["deadlineSeconds"] == 25
    suspend(sim)
    assert sim.document["settings"]["checkpoint"]["deadlineSeconds"] == 600
    sim.run(500)
    assert len(sim.running()) == 3, "a commit may take its time"
    sim.run(200, until=lambda: not sim.running())


def test_last_checkpoint_is_known_after_workers_left(trained: Sim) -> None:
    """Workers report the checkpoint after they left their world."""
    suspend(trained)
    trained.world = None
    trained.checkpoints = {
        "shared": {"step": 321, "generation": 1, "attempt": 1, "time": "2026-01-31T12:00:00Z"},
    }
    trained.run(2)
    trained.obey_drain()
    trained.run(60, until=lambda: trained.status.holds("Suspended"))
    assert trained.status.last_checkpoint.step == 321
    assert "step 321" in dict(trained.events)["Suspended"]


def test_a_suspended_job_has_no_pods_counts_nothing_and_says_so(trained: Sim) -> None:
    suspended(trained)
    trained.run(600)
    assert not trained.running()
    assert trained.created_names == ["gpt-w0", "gpt-w1", "gpt-w2"]
    assert trained.status.incident_count == 0
    assert (trained.status.summary, trained.status.ready_workers, trained.status.wanted_workers) == (
        "Suspended",
        0,
        3,
    )
    assert [kind.type for kind in trained.status.conditions if kind.status] == ["Suspended"]
    assert [reason for reason, _ in trained.events].count("Suspended") == 1
    assert trained.plan().requeue_after is None, "it costs nothing to be suspended"


def test_a_resumed_job_starts_anew_as_a_gang_and_counts_nothing(trained: Sim) -> None:
    suspended(trained)
    suspend(trained, False)
    trained.run(60, until=lambda: trained.status.summary == "Training")
    assert trained.world_names() == ["gpt-w3", "gpt-w4", "gpt-w5"]
    assert trained.status.incident_count == 0
    assert not trained.status.holds("Suspended")
    assert "JobUnsuspended" in [reason for reason, _ in trained.events]
    assert trained.document["settings"]["checkpoint"]["deadlineSeconds"] == 25


def test_resumed_workers_have_the_changed_template(trained: Sim) -> None:
    suspended(trained)
    trained.body["spec"]["workers"]["template"]["spec"]["containers"][0]["image"] = "train:2"
    suspend(trained, False)
    trained.run(60, until=lambda: trained.status.summary == "Training")
    images = {trained.pods[trained.uid(name)]["spec"]["containers"][0]["image"] for name in trained.running()}
    assert images == {"train:2"}


def test_a_job_may_be_born_suspended_and_holds_no_other_up(make_sim: Make) -> None:
    sim = make_sim(suspend=True)
    sim.run(60)
    assert not sim.names()
    assert sim.status.holds("Suspended")
    assert sim.status.start_time is None
    assert rival_of(sim.body) is None
    suspend(sim, False)
    sim.run(60, until=lambda: sim.status.summary == "Training")


def test_a_job_that_waits_for_capacity_gives_its_gates_back(make_sim: Make) -> None:
    sim = make_sim(replicas=9, minimum=9, nodes=3)
    sim.run(30)
    assert len(sim.names()) == 9
    suspend(sim)
    sim.run(60, until=lambda: sim.status.holds("Suspended"))
    assert not sim.names()


def test_silent_node_does_not_delay_a_suspension(trained: Sim) -> None:
    trained.kill_node(trained.node_of("gpt-w1"))
    trained.run(40)
    suspended(trained)
    trained.run(60)
    assert "gpt-w1" not in trained.status.membership.gone, "it may still run, and is fenced when the job goes on"
    suspend(trained, False)
    trained.run(90, until=lambda: len(trained.world_names()) == 3)


@pytest.mark.parametrize("policy", ["Wait", "Replace"])
def test_returned_worker_is_suspended_too(make_sim: Make, policy: str) -> None:
    """The loss of the worker was counted before."""
    sim = make_sim(nodes=3, elasticity={"minReplicas": 3, "onFailure": policy})
    sim.run(60, until=lambda: sim.status.summary == "Training")
    node = sim.node_of("gpt-w1")
    for name in sim.nodes:
        sim.nodes[name]["status"]["allocatable"]["cpu"] = "1"
    sim.kill_node(node)
    sim.run(60)
    suspended(sim)
    assert not sim.running(), "its node is cut off, so nobody waits for it"
    assert sim.plan().requeue_after is not None, "its reports wake nobody"
    sim.heal_node(node, rebooted=False)
    sim.tick(2)
    assert sim.document["directives"]["drain"] == ["uid-gpt-w1"]
    sim.obey_drain()
    sim.run(60, until=lambda: sim.status.holds("Suspended"))
    assert not sim.running(), "it gives its room back"
    assert sim.status.incident_count == 1


def test_a_change_of_mind_before_all_have_left_replaces_who_left(trained: Sim) -> None:
    suspend(trained)
    trained.end("gpt-w0", 75)
    trained.tick()
    suspend(trained, False)
    trained.obey_drain()
    trained.run(
        120,
        until=lambda: (
            (trained.status.ready_workers, trained.status.wanted_workers) == (3, 3)
            and len(trained.world_names()) == 3
        ),
    )
    assert set(trained.world_names()).isdisjoint({"gpt-w0", "gpt-w1", "gpt-w2"})
    assert trained.status.incident_count <= 1


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ({"volume": {"claimName": "checkpoints"}}, "no checkpoint is known"),
        ({"object": {"url": "s3://b/p"}}, "no checkpoint is known"),
        ({}, "so the job will start from step 0"),
    ],
    ids=str,
)
def test_it_says_what_it_will_go_on_from(make_sim: Make, checkpoint: dict[str, Any], says: str) -> None:
    sim = make_sim(checkpoint=checkpoint)
    sim.run(60, until=lambda: sim.status.summary == "Training")
    suspended(sim)
    assert says in sim.status.condition("Suspended").message


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(pauses=st.lists(st.integers(0, 9), min_size=1, max_size=4), cuts=st.randoms(use_true_random=False))
def test_job_suspended_at_any_time_trains_in_the_end(make_sim: Make, pauses: list[int], cuts: Any) -> None:
    """Whatever pass dies in between; that no name or generation is used twice, the simulation sees to."""
    sim = make_sim(nodes=5)

    def cut() -> int | None:
        chosen: int | None = cuts.choice((None, None, 0, 1))
        return chosen

    for number, pause in enumerate(pauses):
        for _ in range(pause):
            sim.tick(2.0, cut)
            sim.obey_drain()
        sim.body["spec"]["suspend"] = number % 2 == 0
    for _ in range(40):
        sim.tick(2.0, cut)
        sim.obey_drain()
    assert bool(sim.running()) != sim.body["spec"]["suspend"]
    sim.body["spec"]["suspend"] = False
    sim.run(
        200,
        step=2.0,
        until=lambda: (sim.status.ready_workers, sim.status.wanted_workers) == (3, 3) and len(sim.world_names()) == 3,
    )
    assert not sim.status.terminal
    assert {incident.cause for incident in sim.status.incidents} <= {"Interruption", "Infrastructure"}
    assert decide(sim.observe(), sim.now).reason
