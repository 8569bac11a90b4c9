"""Where workers may go: what is asked of the scheduler, and that no gate lifts for what it could not give."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sim import Make, Sim

from holdfast_operator.api.spec.scheduling import Scheduling, parse_scheduling
from holdfast_operator.errors import UnreadableError
from holdfast_operator.manifests.placement import placed

ZONE = "topology.kubernetes.io/zone"
SPOT = "karpenter.sh/capacity-type"
BARE = {"containers": [{"name": "trainer", "image": "x"}]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def asked(scheduling: Scheduling, pod_spec: Any = BARE, **more: Any) -> dict[str, Any]:
    return placed(pod_spec, scheduling, namespace="ml", job="gpt", **more)


def zones(sim: Sim, *names: str) -> None:
    """The nodes in their order get these zones."""
    for node, name in zip(sim.nodes.values(), names, strict=True):
        node["metadata"]["labels"][ZONE] = name


def single(sim: Sim) -> None:
    """Each node has room for one worker."""
    for node in sim.nodes.values():
        node["status"]["allocatable"]["cpu"] = "1"


def spot(sim: Sim, *names: str) -> None:
    for name in names:
        sim.nodes[name]["metadata"]["labels"][SPOT] = "spot"


def packed(**more: Any) -> dict[str, Any]:
    return {"scheduling": {"topologyKey": ZONE, "topologyPolicy": "Packed", **more}}


def zones_of(sim: Sim) -> set[str]:
    nodes = {body["spec"]["nodeName"] for body in sim.pods.values() if body["spec"].get("nodeName")}
    return {sim.nodes[node]["metadata"]["labels"][ZONE] for node in nodes}


# What the scheduler is told


def test_a_job_that_asks_for_nothing_gets_its_pod_spec_as_it_is() -> None:
    assert asked(Scheduling()) == BARE


def test_what_the_user_asked_for_stays_beside_it() -> None:
    term = {"matchExpressions": [{"key": "kind", "operator": "In", "values": ["gpu"]}]}
    anti = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    given = {
        **BARE,
        "nodeSelector": {"pool": "a"},
        "affinity": {
            "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term, {"matchFields": []}]}},
            "podAntiAffinity": {REQUIRED: [anti]},
        },
        "topologySpreadConstraints": [{"topologyKey": "rack"}],
    }
    packs = Scheduling(on_demand=1, topology_key=ZONE, topology_policy="Packed", exclusive_nodes=True)
    result = asked(packs, given, on_demand=True, domain="a", avoid=("node-1",))
    terms = result["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0] == term["matchExpressions"][0]
    for alternative in terms:
        assert {"key": SPOT, "operator": "NotIn", "values": ["spot"]} in alternative["matchExpressions"]
        assert {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]} in alternative["matchFields"]
    assert result["nodeSelector"] == {"pool": "a", ZONE: "a"}
    assert result["affinity"]["podAntiAffinity"][REQUIRED][0] == anti
    assert len(result["affinity"]["podAntiAffinity"][REQUIRED]) == 3
    assert given["nodeSelector"] == {"pool": "a"}, "the template itself stays as it was"
    spread = asked(Scheduling(topology_key=ZONE, topology_policy="Spread"), given)["topologySpreadConstraints"]
    assert [item["topologyKey"] for item in spread] == ["rack", ZONE]


def test_those_that_may_be_lost_prefer_spot_capacity() -> None:
    affinity = asked(Scheduling(on_demand=1))["affinity"]["nodeAffinity"]
    assert REQUIRED not in affinity
    wanted = [term["preference"] for term in affinity["preferredDuringSchedulingIgnoredDuringExecution"]]
    eks = {"key": "eks.amazonaws.com/capacityType", "operator": "In", "values": ["SPOT"]}
    assert {"matchExpressions": [eks]} in wanted


def test_spreading_never_keeps_a_worker_from_a_node() -> None:
    (constraint,) = asked(Scheduling(topology_key=ZONE, topology_policy="Spread"))["topologySpreadConstraints"]
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["labelSelector"]["matchLabels"]["holdfast.dev/job-name"] == "gpt"


def test_what_is_no_policy_is_refused_by_name() -> None:
    with pytest.raises(UnreadableError, match="topologyPolicy must be one of"):
        parse_scheduling({"workers": {}, "scheduling": {"topologyKey": "a", "topologyPolicy": "Stacked"}})


# Off spot capacity


def on_demand_job(make_sim: Make, *, on_demand: int, **more: Any) -> Sim:
    sim = make_sim(**more)
    sim.body["spec"]["workers"]["onDemandReplicas"] = on_demand
    single(sim)
    return sim


def test_the_first_indices_stay_off_spot_capacity(make_sim: Make) -> None:
    sim = on_demand_job(make_sim, on_demand=1, replicas=3, nodes=3)
    spot(sim, "node-1", "node-2")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    first = next(member for member in sim.document["members"] if member["index"] == 0)
    assert first["node"] == "node-3"


def test_its_replacement_takes_its_place_and_no_other_does(make_sim: Make) -> None:
    sim = on_demand_job(make_sim, on_demand=1, replicas=3, minimum=1, nodes=5)
    spot(sim, "node-1", "node-2", "node-3")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    home = next(member["node"] for member in sim.document["members"] if member["index"] == 0)
    other = ({"node-4", "node-5"} - {home}).pop()
    sim.nodes[other]["spec"]["unschedulable"] = True  # nothing is free off spot capacity
    sim.nodes[other]["cut"] = True
    lost = next(member["pod"] for member in sim.document["members"] if member["index"] == 1)
    sim.nodes[home]["cut"] = True
    sim.node_unready(home)
    sim.end(lost, 137)
    sim.run(120, until=lambda: len(sim.world_names()) == 2)
    assert sorted(member["index"] for member in sim.document["members"]) == [1, 2]
    sim.nodes[other]["spec"].pop("unschedulable")
    sim.nodes[other].pop("cut")
    sim.run(120, until=lambda: len(sim.world_names()) == 3)
    assert {member["index"]: member["node"] for member in sim.document["members"]}[0] == other


def test_a_gang_waits_for_room_off_spot_capacity_and_says_so(make_sim: Make) -> None:
    sim = on_demand_job(make_sim, on_demand=2, replicas=3, minimum=3, nodes=4)
    spot(sim, "node-1", "node-2", "node-3")
    sim.run(40)
    assert all(body["spec"]["schedulingGates"] for body in sim.pods.values())
    assert (
        "capacity for 2 of 3 workers, of which 2 must not be on spot capacity"
        in sim.status.condition("Ready").message
    )
    sim.nodes["node-3"]["metadata"]["labels"].pop(SPOT)
    sim.run(30, until=lambda: len(sim.world_names()) == 3)


def test_an_elastic_gang_begins_with_those_that_find_room(make_sim: Make) -> None:
    sim = on_demand_job(make_sim, on_demand=2, replicas=4, minimum=2, nodes=3)
    spot(sim, "node-1", "node-2", "node-3")
    sim.run(120, until=lambda: len(sim.world_names()) == 2)
    assert not any(worker.on_demand and worker.node for worker in sim.status.workers)
    assert sorted(member["index"] for member in sim.document["members"]) == [2, 3]


def test_a_scale_down_takes_spot_workers_first(make_sim: Make) -> None:
    sim = on_demand_job(make_sim, on_demand=1, replicas=3, minimum=1, nodes=3)
    spot(sim, "node-1", "node-2")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    sim.obeys = True
    sim.body["spec"]["workers"]["replicas"] = 1
    sim.run(60, until=lambda: len(sim.world_names()) == 1)
    assert sim.node_of(sim.world_names()[0]) == "node-3"


def test_a_cordon_moves_a_worker_only_where_it_may_go(make_sim: Make) -> None:
    sim = on_demand_job(make_sim, on_demand=1, replicas=2, minimum=1, nodes=3)
    spot(sim, "node-1", "node-2")
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    before = sim.world_names()
    sim.nodes["node-3"]["spec"]["unschedulable"] = True
    sim.run(30)
    assert sim.world_names() == before, "the free node is spot capacity"


# Packed


def test_a_packed_gang_goes_where_all_of_it_finds_room(make_sim: Make) -> None:
    sim = make_sim(replicas=3, minimum=3, nodes=5, **packed())
    single(sim)
    zones(sim, "a", "b", "b", "a", "b")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert zones_of(sim) == {"b"}


def test_gang_needs_capacity_in_one_domain(make_sim: Make) -> None:
    """No gate is lifted otherwise."""
    sim = make_sim(replicas=3, minimum=3, nodes=4, **packed())
    single(sim)
    zones(sim, "a", "a", "b", "b")
    sim.run(40)
    assert all(body["spec"]["schedulingGates"] for body in sim.pods.values())
    assert f"capacity for 2 of 3 workers with one {ZONE}" in sim.status.condition("Ready").message


def test_a_replacement_follows_those_that_are_there(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=1, nodes=5, **packed())
    single(sim)
    zones(sim, "a", "a", "b", "b", "b")
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    (home,) = zones_of(sim)
    sim.end(sim.world_names()[0], 137)
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    assert zones_of(sim) == {home}


def test_when_nothing_is_left_there_another_domain_is_chosen(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=2, nodes=4, **packed())
    single(sim)
    zones(sim, "a", "a", "b", "b")
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    for name in ("node-1", "node-2"):
        sim.kill_node(name)
        sim.node_unready(name)
        sim.run(40)  # meanwhile the replacement of the first waits for room in the same zone
    for name in ("node-1", "node-2"):
        del sim.nodes[name], sim.leases[name]  # the zone is gone for good
    sim.run(120, until=lambda: len(sim.world_names()) == 2)
    assert {sim.node_of(name) for name in sim.world_names()} == {"node-3", "node-4"}


def test_pods_that_still_end_hold_a_resumed_job_in_no_domain(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=2, nodes=4, **packed())
    single(sim)
    zones(sim, "a", "a", "b", "b")
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
    sim.lingers = timedelta(seconds=60)
    for suspended in (True, False):
        sim.body["spec"]["suspend"] = suspended
        for name in sim.names() if suspended else ():
            sim.delete(sim.uid(name))
        sim.settle()
    sim.run(20)
    there = {name: sim.pods[sim.uid(name)]["spec"]["nodeName"] for name in sim.names()}
    assert there == {"gpt-w0": "node-1", "gpt-w1": "node-2", "gpt-w2": "node-3", "gpt-w3": "node-4"}
    sim.run(120, until=lambda: sim.world_names() == ["gpt-w2", "gpt-w3"])


# The node's own network


def host_network(sim: Sim) -> Any:
    sim.body["spec"]["workers"]["template"]["spec"]["hostNetwork"] = True
    return sim


def test_workers_that_would_meet_at_their_ports_share_no_node() -> None:
    (term,) = asked(Scheduling(), {**BARE, "hostNetwork": True})["affinity"]["podAntiAffinity"][REQUIRED]
    assert term == {
        "topologyKey": "kubernetes.io/hostname",
        "namespaceSelector": {},
        "labelSelector": {
            "matchLabels": {
                "app.kubernetes.io/managed-by": "holdfast",
                "app.kubernetes.io/component": "worker",
            }
        },
    }
    assert asked(Scheduling(), {**BARE, "hostNetwork": False}) == {**BARE, "hostNetwork": False}


def test_a_gang_in_the_nodes_network_waits_for_a_node_for_each(make_sim: Make) -> None:
    sim = host_network(make_sim(replicas=3, minimum=3, nodes=2))
    sim.run(40)
    assert sim.status.summary == "WaitingForCapacity"
    assert not any(body["spec"].get("nodeName") for body in sim.pods.values())
    sim.add_node("node-9")
    sim.run(60, until=lambda: len(sim.world_names()) == 3)
    assert len({sim.node_of(name) for name in sim.running()}) == 3


def test_no_job_comes_beside_a_worker_in_its_nodes_network(make_sim: Make) -> None:
    pair = host_network(make_sim(name="alpha", replicas=2, minimum=2, nodes=2)), make_sim(name="beta", replicas=1)
    for sim, peer in zip(pair, reversed(pair), strict=True):
        sim.nodes, sim.leases, sim.peers = pair[0].nodes, pair[0].leases, [peer]
    play(pair[:1], 20)
    play(pair, 40)
    assert [len(sim.world_names()) for sim in pair] == [2, 0]
    assert pair[1].status.summary == "WaitingForCapacity"


# Exclusive nodes


def exclusive_pair(make_sim: Make, nodes: int) -> tuple[Any, Any]:
    alone = make_sim(name="alpha", replicas=2, minimum=2, nodes=nodes, scheduling={"nodeSharing": "Exclusive"})
    other = make_sim(name="beta", replicas=2, minimum=2, nodes=nodes)
    for sim in (alone, other):
        sim.nodes, sim.leases = alone.nodes, alone.leases
        sim.peers = [peer for peer in (alone, other) if peer is not sim]
    return alone, other


def play(sims: tuple[Any, ...], seconds: int) -> None:
    for _ in range(seconds):
        for sim in sims:
            sim.tick()


@pytest.mark.parametrize("first", [0, 1], ids=["the exclusive one first", "the other first"])
def test_no_other_jobs_worker_shares_a_node(make_sim: Make, first: int) -> None:
    pair = exclusive_pair(make_sim, nodes=2)
    play((pair[first],), 20)
    assert len(pair[first].world_names()) == 2
    pair[1 - first].settle()
    play(pair, 40)
    waiting = pair[1 - first]
    assert all(body["spec"]["schedulingGates"] for body in waiting.pods.values()), "room, but beside the other job"
    assert waiting.status.summary == "WaitingForCapacity"
    pair[first].complete_at = pair[first].step + 1
    play(pair, 100)
    assert len(waiting.world_names()) == 2


def test_an_exclusive_job_waits_for_no_room_of_its_own(make_sim: Make) -> None:
    sim = make_sim(replicas=2, minimum=2, nodes=1, scheduling={"nodeSharing": "Exclusive"})
    sim.run(60, until=lambda: len(sim.world_names()) == 2)
