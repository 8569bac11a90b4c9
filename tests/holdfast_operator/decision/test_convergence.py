"""``decide`` is total, comes to rest, and ends the same wherever its plans are cut.

Random faults hit a simulated job; every pass dies after a random number of its actions, with the operator restarted.
Names are used once and a generation is published once (asserted by the simulation); afterwards the job trains with
all its workers again, each failure counted as often as in an undisturbed run.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sim import Make, Sim

from holdfast_operator.reconcile.act import status_patch

FAULTS = ("delete", "kill", "force", "node", "node-unready", "notice", "restart", "nothing", "cut off")
# No shrinking: it would take longer than all other tests together, and the faults of an example are few.
SETTINGS = settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def hurt(sim: Sim, fault: str, pick: int) -> None:
    """One fault on one of the running workers."""
    names = sim.running()
    if not names:
        return
    name = names[pick % len(names)]
    node = sim.node_of(name)
    match fault:
        case "delete":
            sim.delete(sim.uid(name))
        case "kill":
            sim.end(name, 137)
        case "force":
            sim.force_gone(name)
        case "node":
            sim.kill_node(node)
        case "node-unready":
            sim.kill_node(node)
            sim.node_unready(node)
        case "notice":
            sim.notice(name)
        case "cut off":
            sim.cut(name)
        case "restart":
            sim.restart_operator(grace=True)


def calm(sim: Sim) -> None:
    """All nodes and networks are back, and the job has the time to recover."""
    sim.cut_off.clear()
    for name in sim.nodes:
        sim.heal_node(name, rebooted=True)
    sim.run(
        400,
        step=2.0,
        until=lambda: len(sim.world_names()) == 3 and (sim.status.ready_workers, sim.status.wanted_workers) == (3, 3),
    )
    sim.run(80, step=4.0)


@SETTINGS
@given(
    faults=st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 5), st.integers(1, 20)), max_size=5),
    seed=st.integers(0, 2**32),
)
def test_cut_anywhere_the_end_is_the_same(make_sim: Make, faults: list[tuple[str, int, int]], seed: int) -> None:
    sim, dice = make_sim(nodes=5), random.Random(seed)

    def cut() -> int | None:
        return dice.choice((None, None, 0, 1, 2))

    for _ in range(8):
        sim.tick(2.0, cut)
    for fault, pick, pause in faults:
        hurt(sim, fault, pick)
        for _ in range(pause):
            sim.tick(1.0, cut)
    calm(sim)
    status = sim.status
    assert len(sim.running()) == 3
    assert sim.world_names() == sim.running()
    assert status.incident_count == len(sim.counted) == sum(count.total for count in status.incidents_by_cause)
    assert status.incident_count <= len(faults) + 1
    assert all(incident.resumed is not None for incident in status.incidents)
    assert not status.terminal


@pytest.mark.thorough
@settings(SETTINGS, max_examples=10)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(("gpt-w0", "gpt-w1", "gpt-w2")), back=st.integers(40, 130))
def test_unreachable_worker_is_replaced_at_most_once(make_sim: Make, seed: int, name: str, back: int) -> None:
    """Cut, too, between the order to delete it and its deletion."""
    sim, dice = make_sim(nodes=5), random.Random(seed)
    sim.run(30, until=lambda: len(sim.world_names()) == 3)
    sim.lingers = timedelta(seconds=dice.choice((0, 20)))
    sim.cut(name)
    for passed in range(200):
        if passed == back:
            sim.cut_off.clear()
        sim.tick(1.0, lambda: dice.choice((*(None,) * 40, 0, 1)))
    sim.run(200, step=2.0)
    assert len(sim.running()) == 3
    assert sim.world_names() == sim.running()
    assert len(sim.created_names) <= 4
    assert sim.counted == ["Infrastructure"]


@settings(SETTINGS, max_examples=8)
@given(faults=st.lists(st.tuples(st.sampled_from(FAULTS[:4]), st.integers(0, 2)), min_size=1, max_size=2))
def test_a_failure_counts_as_often_with_cuts_as_without(make_sim: Make, faults: list[tuple[str, int]]) -> None:
    counts = []
    for cuts in ((None,), (0, 1, None)):
        sim, dice = make_sim(nodes=6), random.Random(7)
        sim.run(30, until=lambda sim=sim: len(sim.world_names()) == 3)
        for fault, pick in faults:
            hurt(sim, fault, pick)
            for _ in range(45):
                sim.tick(2.0, lambda cuts=cuts, dice=dice: dice.choice(cuts))
        counts.append(sorted(incident.cause for incident in sim.status.incidents))
    assert counts[0] == counts[1]
    assert len(counts[0]) == len(faults)


@SETTINGS
@given(data=st.data())
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(make_sim: Make, data: st.DataObject) -> None:
    sim = make_sim(nodes=4)
    for _ in range(data.draw(st.integers(0, 12))):
        sim.tick(2.0)
        hurt(sim, data.draw(st.sampled_from(FAULTS)), data.draw(st.integers(0, 2)))
    sim.settle()
    plan = sim.plan()
    assert not plan.actions
    assert not status_patch(sim.body["status"], plan.status.to_json())


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.text(max_size=4)
    | st.sampled_from(("True", "Wanted", "uid-gpt-w0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def spoil(value: Any, dice: random.Random, junk: list[Any]) -> Any:
    """The same with some leaves replaced by junk or left out."""
    if isinstance(value, dict):
        kept = {key: spoil(item, dice, junk) for key, item in value.items() if dice.random() > 0.03}
        return kept if kept else value
    if isinstance(value, list):
        return [spoil(item, dice, junk) for item in value]
    return dice.choice(junk) if dice.random() < 0.03 else value


@pytest.fixture(scope="module")
def seeds() -> list[int]:
    return list(range(60))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=st.lists(JUNK, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_whatever_agents_report_a_decision_is_made(trained: Sim, junk: list[Any], seed: int) -> None:
    """Agents are other programs of other versions: no field of theirs may stop a pass."""
    dice = random.Random(seed)
    for uid, (at, body) in list(trained.heard.items()):
        launcher = spoil(body["launcher"], dice, junk)
        trained.heard[uid] = (at, {**body, "launcher": {**launcher, "version": 1, "podUID": uid}})
    assert trained.plan().reason
