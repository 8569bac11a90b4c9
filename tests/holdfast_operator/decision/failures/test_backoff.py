"""How long a failed worker waits for its replacement, and that nobody else does."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest
from failing_jobs import fail, training
from hypothesis import given
from hypothesis import strategies as st
from sim import Make, Sim

from holdfast_operator.api.spec.recovery import Backoff
from holdfast_operator.decision.failures.backoff import pause, share


@given(st.integers(0, 3600), st.integers(0, 100), st.integers(1, 60), st.text(max_size=9))
def test_jitter_shortens_a_pause_within_its_bounds(initial: int, jitter: int, count: int, key: str) -> None:
    backoff = Backoff(initial_seconds=initial, max_seconds=3600, jitter_percent=jitter)
    seconds = pause(backoff, count, key).total_seconds()
    whole = backoff.seconds(count)
    assert whole * (1 - jitter / 100) - 1e-5 <= seconds <= whole + 1e-5
    assert pause(backoff, count, key).total_seconds() == seconds


@pytest.fixture
def paused(make_sim: Make) -> Sim:
    """A job that trains, and whose script failed so often that the pause is minutes long."""
    sim = training(make_sim, nodes=6, budgets=[], backoff={"initialSeconds": 200, "maxSeconds": 300})
    fail(sim)
    sim.run(5, until=lambda: sim.world is not None)
    assert sim.status.backoff_until > sim.now + timedelta(seconds=100)
    return sim


def test_who_is_interrupted_during_a_pause_is_replaced_at_once(paused: Sim) -> None:
    paused.notice("gpt-w1")
    paused.tick()
    assert "gpt-w3" in paused.names()


def test_a_node_lost_during_a_pause_is_replaced_at_once(paused: Sim) -> None:
    node = paused.node_of("gpt-w1")
    paused.kill_node(node)
    paused.node_unready(node)
    paused.run(30, until=lambda: "gpt-w3" in paused.world_names())


def test_a_job_that_is_made_larger_during_a_pause_grows_at_once(paused: Sim) -> None:
    paused.body["spec"]["workers"]["replicas"] = 4
    paused.run(30, until=lambda: len(paused.world_names()) == 4)


def test_failed_workers_wait_for_the_pause_and_others_do_not(paused: Sim) -> None:
    paused.end("gpt-w1", 1)
    paused.tick()
    paused.notice("gpt-w2")
    paused.run(100)
    assert paused.created_names[3:] == ["gpt-w3"]
    assert paused.status.held_back == 1
    paused.run(120, until=lambda: len(paused.world_names()) == 3)
    assert paused.status.held_back == 0


def test_a_restarted_operator_keeps_to_the_pause(paused: Sim) -> None:
    paused.end("gpt-w1", 1)
    paused.tick()
    paused.restart_operator(grace=True)
    paused.run(60)
    assert "gpt-w3" not in paused.created_names


def test_jobs_that_one_fault_hit_do_not_come_back_in_step() -> None:
    shares = sorted(share(f"job-{number}/1") for number in range(200))
    assert all(0 <= value < 1 for value in shares)
    assert max(later - earlier for earlier, later in pairwise(shares)) < 0.1
