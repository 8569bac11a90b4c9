"""Could the cluster hold these pods?"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.api.quantities import quantity, requests
from holdfast_operator.scheduling.capacity import (
    FreeCapacity,
    PodRequest,
    admits,
    keeps_away,
    no_node,
    place_together,
    too_big,
)
from holdfast_operator.views import NodeUsage, NodeView, PodAffinityInfo

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
    room = FreeCapacity([node("n1"), node("n2")], [NodeUsage(node="n1", amounts=requests(pod("3")))], NOW)
    assert room.place(PodRequest(pod_spec=pod(), count=5)) == 2


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
    room = FreeCapacity(nodes, [], NOW)
    left = {f"n{i}": cpu for i, cpu in enumerate(offers)}
    for asked, count in gangs:
        assert room.place(PodRequest(pod_spec=pod(str(asked)), count=count)) == one_by_one(left, asked, count)


def test_dead_cordoned_and_avoided_nodes_hold_nothing() -> None:
    nodes = [node("n1", ready=False), node("n2", unschedulable=True), node("n3"), node("n4")]
    assert FreeCapacity(nodes, [], NOW).place(PodRequest(pod_spec=pod(), count=9, avoid=("n4",))) == 2


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


MEND = ": fix the template, or add a node that meets its requests"
SELECTOR, TAINT = "the labels of its nodeSelector", "a taint that it does not tolerate"
GPU_ONLY = pod(nodeSelector={"kind": "gpu", "zone": "a"})
TAINTED = (("dedicated", "ml", "NoSchedule"),)


def near(*values: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "kind", "operator": "In", "values": list(values)}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return pod(affinity={"nodeAffinity": required})


@pytest.mark.parametrize(
    ("spec", "nodes", "told"),
    [
        (GPU_ONLY, [node("n1"), node("n2")], f"2 without {SELECTOR} (kind=gpu, zone=a)"),
        (near("gpu"), [node("n1", labels={"kind": "cpu"})], "1 that its node affinity does not match"),
        (pod(), [node("n1", taints=TAINTED)], f"1 with {TAINT} (dedicated=ml:NoSchedule)"),
        (
            GPU_ONLY,
            [node("n1"), node("n2", labels={"kind": "gpu", "zone": "a"}, taints=TAINTED)],
            f"1 without {SELECTOR}, 1 with {TAINT} (kind=gpu, zone=a; dedicated=ml:NoSchedule)",
        ),
    ],
    ids=["selector", "affinity", "taint", "one each"],
)
def test_message_names_the_request_that_fits_no_node(spec: dict[str, Any], nodes: list[NodeView], told: str) -> None:
    assert no_node(spec, nodes) == f"none of {len(nodes)} nodes can run a worker: {told}{MEND}"


def test_of_the_nodes_that_it_may_use_the_largest_is_told() -> None:
    nodes = [node("n1", cpu="64"), node("n2", labels={"kind": "gpu"})]
    assert no_node(pod("8", nodeSelector={"kind": "gpu"}), nodes) == (
        "a worker asks for 8 cpu, and no node that it may use has more than 4: ask for less, or add a larger node"
    )


@pytest.mark.parametrize(
    "passing",
    [
        {"unschedulable": True, "taints": (("node.kubernetes.io/unschedulable", "", "NoSchedule"),)},
        {"ready": False, "taints": (("node.kubernetes.io/not-ready", "", "NoExecute"),)},
        {"taints": (("node.kubernetes.io/disk-pressure", "", "NoSchedule"),)},
        {"taints": (("ToBeDeletedByClusterAutoscaler", "", "NoSchedule"),)},
    ],
)
def test_what_passes_by_itself_makes_no_template_impossible(passing: dict[str, Any]) -> None:
    assert no_node(pod(), [node("n1", **passing)]) == ""


@given(
    asked=st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy")),
    cpus=st.integers(1, 6),
    cluster=st.lists(st.tuples(st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy")), st.integers(1, 6))),
)
def test_no_node_means_that_an_empty_cluster_lacks_capacity(
    asked: dict[str, str], cpus: int, cluster: list[tuple[dict[str, str], int]]
) -> None:
    nodes = [node(f"n{i}", cpu=str(cpu), labels=labels) for i, (labels, cpu) in enumerate(cluster)]
    spec = pod(str(cpus), nodeSelector=asked)
    room = FreeCapacity(nodes, [], NOW).place(PodRequest(pod_spec=spec, count=1))
    assert bool(no_node(spec, nodes)) == (room == 0 and bool(nodes))


def labelled(name: str, **labels: str) -> NodeView:
    return node(name, cpu="2", labels={"kubernetes.io/hostname": name, **labels})


def apart_from(*terms: dict[str, Any]) -> dict[str, Any]:
    return pod(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": list(terms)}})


def test_pods_that_keep_away_from_each_other_share_no_domain() -> None:
    nodes = [labelled("n1", rack="r1"), labelled("n2", rack="r1"), labelled("n3", rack="r2")]
    apart = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "x"}}}
    ask = PodRequest(pod_spec=apart_from(apart), count=3, namespace="ml", labels={"app": "x"})
    assert FreeCapacity(nodes, [], NOW).place(ask) == 2, "one in each rack"
    assert (
        FreeCapacity(nodes, [], NOW).place(
            PodRequest(pod_spec=ask.pod_spec, count=3, namespace="ml", labels={"app": "y"})
        )
        == 3
    )


@pytest.mark.parametrize(
    ("term", "held"),
    [
        ({}, 1),
        ({"namespaces": ["other"]}, 2),
        ({"namespaces": ["ml"]}, 1),
        ({"namespaceSelector": {}}, 1),
        (
            {
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["ml"]}
                    ]
                }
            },
            2,
        ),
        ({"matchLabelKeys": ["pod-template-hash"]}, 2),
    ],
    ids=["own namespace", "another", "named", "all", "all others", "beyond what is known"],
)
def test_who_is_kept_away_from_depends_on_the_namespace(term: dict[str, Any], held: int) -> None:
    away = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "x"}}, **term}
    there = NodeUsage(node="n1", amounts={}, tenants=(PodAffinityInfo(namespace="ml", labels={"app": "x"}),))
    nodes = [labelled("n1"), labelled("n2")]
    assert (
        FreeCapacity(nodes, [there], NOW).place(PodRequest(pod_spec=apart_from(away), count=9, namespace="ml"))
        == held
    )
    guard = PodAffinityInfo(namespace="ml", keeps_away=keeps_away(apart_from(away)))
    bound = NodeUsage(node="n1", amounts={}, tenants=(guard,))
    newcomer = PodRequest(pod_spec=pod(), count=9, namespace="ml", labels={"app": "x"})
    assert FreeCapacity(nodes, [bound], NOW).place(newcomer) == held, "who is there keeps others away as well"


def test_anti_affinity_of_victims_does_not_count() -> None:
    """The anti-affinity of the pods that take their place counts."""
    away = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "x"}}}
    guard = PodAffinityInfo(namespace="ml", keeps_away=keeps_away(apart_from(away)))
    bound = NodeUsage(node="n1", amounts={}, tenants=(guard,))
    room = FreeCapacity([node("n1", cpu="8", labels={"kubernetes.io/hostname": "n1"})], [bound], NOW)
    newcomer = PodRequest(pod_spec=pod(), count=9, namespace="ml", labels={"app": "x"})
    freed = room.without([bound])
    assert (room.copy().place(newcomer), freed.copy().place(newcomer)) == (0, 4)

    trial = freed.copy()
    trial.place(PodRequest(pod_spec=apart_from(away), count=1, namespace="ml"))
    room.put(trial.beyond(freed))
    assert room.without([bound]).place(newcomer) == 0, "whoever took the place keeps others away from it"


def test_one_domain_holds_all_or_the_most() -> None:
    nodes = [labelled("n1", zone="a"), labelled("n2", zone="b"), labelled("n3", zone="b"), labelled("n4")]
    room = FreeCapacity(nodes, [], NOW)
    assert place_together(room, [PodRequest(pod_spec=pod(), count=3)], "zone") == ((2,), "b")
    assert place_together(room, [PodRequest(pod_spec=pod(), count=3)], "zone") == ((1,), "a"), "that room was taken"
    assert place_together(room, [PodRequest(pod_spec=pod(), count=3)], "zone") == ((0,), "")
