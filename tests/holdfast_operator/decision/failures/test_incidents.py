"""Each failure is one incident."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sim import Make, Sim

from holdfast_operator.api.times import format_time


def test_the_newest_ten_incidents_are_kept_and_counted_once(trained: Sim) -> None:
    for _ in range(12):
        trained.end(trained.running()[-1], 137)
        trained.tick()
        trained.run(
            60,
            until=lambda: (
                len(trained.world_names()) == 3
                and (trained.status.ready_workers, trained.status.wanted_workers) == (3, 3)
            ),
        )
    old = {"generation": 1, "attempt": 1}
    for incident in list(trained.incidents.values())[:2]:
        trained.incidents[(0, 0)] = {**incident, **old}
    trained.run(5)
    assert [incident.number for incident in trained.status.incidents] == list(range(3, 13))
    assert trained.status.incident_count == 12
    assert old in trained.document["acknowledged"]
    trained.incidents.clear()  # the launchers drop what is acknowledged, and the dead are forgotten
    trained.heard.clear()
    trained.report()
    trained.settle()
    assert old not in trained.document["acknowledged"]


def test_an_incident_has_the_time_at_which_the_launcher_found_it(trained: Sim) -> None:
    found = trained.now - timedelta(seconds=7)
    told = {"cause": "Application", "action": "InPlace", "reason": "Exception", "message": "boom", "pod": None}
    at = {"generation": 1, "attempt": 1, "detectedTime": format_time(found)}
    trained.incidents[(1, 1)] = {**told, **at, "rank": None, "node": None, "lostSteps": None}
    trained.report()
    trained.settle()
    assert [one.detected for one in trained.status.incidents] == [found]


def test_a_crash_before_any_world_counts_once_for_the_whole_gang(make_sim: Make) -> None:
    sim = make_sim(recovery={"backoff": {"initialSeconds": 5, "maxSeconds": 60}})
    counts = []
    for _ in range(70):
        sim.tick()
        for name in sim.running():
            if sim.world is None:
                sim.end(name, 1)
        counts.append(sim.status.incident_count)
        if sim.status.terminal:
            break
    assert sim.status.summary == "ApplicationBudgetExceeded"
    assert sim.status.incident_count == 4
    assert len(sim.created_names) == 12


def test_later_report_adds_what_the_first_one_lacks_and_changes_nothing_else(trained: Sim) -> None:
    def tell(**known: Any) -> None:
        told = {"cause": "Application", "action": "InPlace", "reason": "Exception", "message": "boom", "pod": None}
        at = {"generation": 1, "attempt": 1, "detectedTime": format_time(trained.now)}
        trained.incidents[(1, 1)] = {**told, **at, "rank": None, "node": None, "lostSteps": None, **known}
        trained.report()
        trained.settle()

    tell()
    assert [(one.node, one.rank, one.lost_steps) for one in trained.status.incidents] == [(None, None, None)]
    tell(node="node-2", rank=1, lostSteps=3)
    assert [(one.node, one.rank, one.lost_steps) for one in trained.status.incidents] == [("node-2", 1, 3)]
    tell(node="node-3", rank=2, lostSteps=4)
    assert [(one.node, one.rank, one.lost_steps) for one in trained.status.incidents] == [("node-2", 1, 3)]
