"""Could the cluster hold these pods?"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.capacity import Room, admits, too_big
from holdfast_operator.quantities import quantity, requests
from holdfast_operator.seen import NodeView, Usage

NOW = datetime(2026, 1, 31, tzinfo=UTC)


def node(name: str, *, cpu: str = "4", **more: Any) -> NodeView:
    return NodeView(name=name, allocatable={"cpu": cpu, "memory": "8Gi", "pods": "10"}, **more)


def pod(cpu: str = "2", **spec: Any) -> dict[str, Any]:
    return {"containers": [{"name": "a", "resources": {"requests": {"cpu": cpu}}}], **spec}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("100m", "0.1"), ("1Gi", 2**30), ("2k", 2000), ("1e3", 1000), ("1.5", "1.5"), ("5E", 5 * 10**18)],
)
def test_quantities(text: str, value: Any) -> None:
    assert quantity(text) == Decimal(value)


def test_what_is_no_quantity_counts_as_nothing() -> None:
    assert quantity("much") == 0


def test_limits_stand_in_for_requests_and_native_sidecars_add_up() -> None:
    spec = {
        "containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "2"}, "requests": {"cpu": "1"}}}],
        "initContainers": [
            {"name": "side", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
            {"name": "once", "resources": {"requests": {"cpu": "3"}}},
        ],
        "overhead": {"cpu": "100m"},
    }
    asked = requests(spec)
    assert asked["nvidia.com/gpu"] == 2
    assert asked["cpu"] == Decimal("3.6")


def test_a_node_holds_what_fits_beside_what_runs() -> None:
    room = Room([node("n1"), node("n2")], [Usage(node="n1", amounts=requests(pod("3")))], NOW)
    assert room.place(pod(), 5) == 2


def one_by_one(left: dict[str, int], asked: int, count: int) -> int:
    """Each pod on the fullest node that still holds it."""
    for placed in range(count):
        fitting = [name for name, cpu in left.items() if cpu >= asked]
        if not fitting:
            return placed
        left[min(fitting, key=lambda name: (left[name], name))] -= asked
    return count


@given(
    offers=st.lists(st.integers(0, 9), max_size=5),
    gangs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4),
)
def test_gangs_are_placed_as_if_pod_by_pod(offers: list[int], gangs: list[tuple[int, int]]) -> None:
    nodes = [NodeView(name=f"n{i}", allocatable={"cpu": cpu, "pods": 99}) for i, cpu in enumerate(offers)]
    room = Room(nodes, [], NOW)
    left = {f"n{i}": cpu for i, cpu in enumerate(offers)}
    for asked, count in gangs:
        assert room.place(pod(str(asked)), count) == one_by_one(left, asked, count)


def test_dead_cordoned_and_avoided_nodes_hold_nothing() -> None:
    nodes = [node("n1", ready=False), node("n2", unschedulable=True), node("n3"), node("n4")]
    assert Room(nodes, [], NOW).place(pod(), 9, ("n4",)) == 2


def test_selectors_affinity_and_taints_are_respected() -> None:
    gpu = node("g", labels={"kind": "gpu"}, taints=(("nvidia.com/gpu", "", "NoSchedule"),))
    assert not admits(gpu, pod())
    tolerant = pod(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}])
    assert admits(gpu, tolerant)
    assert not admits(gpu, {**tolerant, "nodeSelector": {"kind": "cpu"}})
    term = {"matchExpressions": [{"key": "kind", "operator": "NotIn", "values": ["gpu"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    assert not admits(gpu, {**tolerant, "affinity": {"nodeAffinity": required}})


def test_more_than_any_node_has_is_said_with_the_figures() -> None:
    assert too_big(pod("64"), [node("n1"), node("n2", cpu="8")]) == (
        "a worker asks for 64 cpu, and no node has more than 8"
    )
    assert too_big(pod("8"), [node("n1"), node("n2", cpu="8")]) == ""
    assert too_big(pod("8"), []) == ""
