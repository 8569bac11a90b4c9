"""A job that has ended keeps nothing that runs."""

from __future__ import annotations

from sim import Make, Sim


def test_a_failed_job_stops_what_runs_and_keeps_what_ended(make_sim: Make) -> None:
    sim = make_sim(recovery={"budgets": [{"cause": "Infrastructure", "maxRestarts": 0}]})
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.end("gpt-w1", 137)
    sim.run(60, until=lambda: sim.status.holds("Failed"))
    sim.run(10)
    assert sim.names() == ["gpt-w1"]
    assert (sim.status.ready_workers, sim.status.wanted_workers) == (0, 3)


def test_a_job_on_its_way_out_is_left_to_the_garbage_collector(trained: Sim) -> None:
    trained.body["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    trained.end("gpt-w1", 137)
    plan = trained.plan()
    assert not plan.actions
    assert plan.status == trained.status
