"""What no plan of remediation ever does, and what a plan costs."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sick_nodes import MINUTE, NOW, alert, machine, marked, plan, pod, rules

from holdfast_operator.api.node_mark import Mode
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.decide import remedy
from holdfast_operator.remediation.fleet import FleetSnapshot, Node, StayReason
from holdfast_operator.remediation.plan import Evict, Release, SetMark, Terminate
from holdfast_operator.remediation.settings import NodeLimit, RemediationSettings

MODES = st.sampled_from(list(Mode))
NAMES = [f"n{number}" for number in range(6)]


@st.composite
def machines(draw: st.DrawFn) -> tuple[Node, ...]:
    made = []
    for name in NAMES:
        kinds = draw(st.lists(st.sampled_from(list(StayReason)), max_size=3))
        deleted = st.sampled_from([None, NOW])
        pods = [pod(f"{name}-{number}", stay=kind, deleted_at=draw(deleted)) for number, kind in enumerate(kinds)]
        changes = {"ready": draw(st.booleans()), "unschedulable": draw(st.booleans())}
        mark = marked(name, draw(MODES.filter(bool)), pods=pods, overruled=draw(st.booleans()))
        times = {
            "clear_since": draw(st.sampled_from([None, NOW - 20 * MINUTE])),
            "terminating_since": draw(st.sampled_from([None, None, NOW - MINUTE])),
        }
        assert mark.mark is not None
        mark = replace(mark, mark=replace(mark.mark, **times))
        made.append(replace(mark if draw(st.booleans()) else machine(name), **changes))
    return tuple(made)


ALERTS = st.lists(
    st.builds(alert, st.sampled_from([*NAMES, "gone"]), MODES, name=st.sampled_from("AB"), firing=st.booleans()),
    max_size=20,
)


RULES = st.builds(
    rules,
    mode=MODES,
    dry_run=st.booleans(),
    force=st.booleans(),
    max_unavailable=st.builds(NodeLimit, number=st.integers(0, 7)),
    max_per_hour=st.integers(0, 7),
)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No search for garbage, which would look through all that the tests before have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_the_cost_of_a_plan_grows_linearly_with_the_nodes() -> None:
    def seconds(number: int) -> float:
        nodes = [machine(f"n{n}", labels={"pool": "gpu"}) for n in range(number)]
        alerts = [alert(node.name) for node in nodes]
        began = time.process_time()
        plan(*nodes, alerts=alerts, max_per_hour=1, node_selector={"pool": "gpu"})
        return time.process_time() - began

    few, many = (min(seconds(number) for _ in range(5)) for number in (800, 8_000))
    assert many < 30 * few


@given(RULES, ALERTS, machines(), st.timedeltas(min_value=timedelta(0), max_value=timedelta(hours=3)))
@settings(max_examples=300, deadline=None)
def test_what_no_plan_ever_does(
    chosen: RemediationSettings, alerts: list[Alert], nodes: tuple[Node, ...], after: timedelta
) -> None:
    made = remedy(FleetSnapshot(rules=chosen, alerts=tuple(alerts), machines=nodes), NOW + after)
    if chosen.mode is Mode.OBSERVE or chosen.dry_run:
        assert made.actions == ()
    begun = [action.machine for action in made.actions if isinstance(action, SetMark) and action.cordon]
    away = {node.name for node in nodes if not node.ready or node.unschedulable}
    assert len({node.name for node in begun}) == len(begun), "one action a node"
    if begun:
        assert len(away | {node.name for node in begun}) <= max(chosen.max_unavailable.number, len(away))
        assert len(begun) <= chosen.max_per_hour
        assert not any(node.marked or node.unschedulable for node in begun)
    for action in made.actions:
        if isinstance(action, Evict):
            assert action.machine.mark is not None
            assert action.pod.stay is not StayReason.OPTED_OUT
        if isinstance(action, Release | Terminate):
            assert action.machine.mark is not None
        if isinstance(action, Terminate):
            assert action.machine.pods is not None
            assert all(pod.deleting for pod in action.machine.pods), "never under a pod that runs"
            opted_out = [pod for pod in action.machine.pods if pod.stay is StayReason.OPTED_OUT]
            assert not (opted_out and action.machine.ready), "least of all of a job that opted out"
            assert action.machine.unschedulable
            assert chosen.mode is Mode.REPLACE
    assert all(isinstance(decision.reason, str) and decision.message for decision in made.decisions)


def test_a_storm_of_ten_thousand_alerts_is_one_plan() -> None:
    nodes = [machine(f"n{number}") for number in range(1000)]
    storm = [alert(f"n{number % 1000}", name=f"A{number}") for number in range(10_000)]
    made = plan(*nodes, alerts=storm, max_unavailable=NodeLimit(number=5))
    assert len(made.actions) == 5
    assert len(made.decisions) == 1000


def test_a_crash_after_any_action_of_a_plan_loses_nothing() -> None:
    """What was done is seen by the next pass; the rest is planned again."""
    made = plan(marked(mode=Mode.REPLACE), alerts=[alert(mode=Mode.REPLACE)], mode=Mode.REPLACE)
    for cut in range(len(made.actions)):
        node = marked(mode=Mode.REPLACE)
        for action in itertools.islice(made.actions, cut):
            if isinstance(action, SetMark):
                node = replace(node, mark=action.mark)
        again = plan(node, alerts=[alert(mode=Mode.REPLACE)], mode=Mode.REPLACE)
        assert any(isinstance(action, Terminate) for action in again.actions)
