"""Nodes that fail a job again and again are avoided until their failures fade."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from failing_jobs import fail, rule, told, training
from hypothesis import given
from hypothesis import strategies as st
from sim import Make

from holdfast_operator.api import names as c
from holdfast_operator.api.status.failure_history import NodeFailures
from holdfast_operator.decision.failures import repeat_offenders

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_a_node_that_failed_twice_is_avoided_until_that_fades(make_sim: Make) -> None:
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


def test_a_silent_node_that_returns_is_avoided_for_its_failures(make_sim: Make) -> None:
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


def test_a_node_that_is_lost_repeatedly_is_avoided_on_return(make_sim: Make) -> None:
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
    sim.run(60, until=lambda: sim.status.summary == "Training")
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
