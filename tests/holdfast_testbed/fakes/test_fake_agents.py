"""Players of launchers say what the contract knows, and form worlds by its rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.fakes import fake_agents

GOLDEN = Path(__file__).parents[2] / "contract"
WORKER = fake_agents.Worker(namespace="ml", name="gpt-w0", uid="uid-w0", node="node-1")
ALL = ["uid-w0", "uid-w1", "uid-w3"]


@pytest.fixture
def membership() -> Any:
    """The golden one: the second generation, with three members of whom two may go on alone."""
    return json.loads((GOLDEN / "membership.json").read_text())


@pytest.fixture
def world(membership: Any) -> Any:
    """Of all its members."""
    return fake_agents.form(membership, None, broken=False, up=set(ALL))[0]


def test_a_report_has_fields_of_the_contract_only(world: Any) -> None:
    incident = fake_agents.incident(world, ["uid-w1"], at="now", pod="gpt-w1")
    told = {"tiers": ["shared"], "incidents": [incident], "lost": {"uid-w2": "now"}}
    status = fake_agents.status(WORKER, world, step=412, at="now", **told)
    assert_known(fake_agents.report(WORKER, status, number=17), json.loads((GOLDEN / "report.json").read_text()))


def assert_known(said: Any, known: Any) -> None:
    if isinstance(said, dict):
        assert said.keys() <= known.keys()
        for key, value in said.items():
            assert_known(value, known[key])
    for value in said if isinstance(said, list) else ():
        assert_known(value, known[0])


def test_a_generation_starts_with_all_and_continues_with_most(membership: Any, world: Any) -> None:
    assert (world["generation"], world["attempt"], world["members"]) == (2, 1, ALL)
    assert fake_agents.form(membership, None, broken=False, up=set(ALL[1:])) == (None, False)
    left, broken = fake_agents.form(membership, world, broken=False, up=set(ALL[1:]))
    assert left == {**world, "attempt": 2, "members": ALL[1:], "coordinator": "uid-w1"}
    assert not broken
    assert fake_agents.gone(world, left) == ["uid-w0"]
    assert fake_agents.form(membership, left, broken=False, up=set(ALL)) == (left, False), (
        "nobody comes back by itself"
    )


@pytest.mark.parametrize("settings", [{"minReplicas": 3}, {"onFailure": "Wait"}])
def test_a_world_that_cannot_shrink_is_broken_until_republished(
    membership: Any, world: Any, settings: dict[str, Any]
) -> None:
    membership["settings"] |= settings
    assert fake_agents.form(membership, world, broken=False, up=set(ALL[:2])) == (world, True)
    status = fake_agents.status(WORKER, world, step=1, at="now", broken=True, lost={})
    assert (status["world"], status["phase"], status["started"]) == (None, "Waiting", {"generation": 2, "attempt": 1})
    assert fake_agents.form({**membership, "generation": 3}, world, broken=True, up=set(ALL))[1] is False


def test_an_incident_is_told_until_it_is_acknowledged(membership: Any, world: Any) -> None:
    incident = fake_agents.incident(world, ["uid-w1"], at="now")
    assert fake_agents.unacknowledged([incident], membership) == [incident]
    membership["acknowledged"].append({"generation": 2, "attempt": 1})
    assert fake_agents.unacknowledged([incident], membership) == []
