"""Names and addresses follow from one number, and two clusters never share any."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_testbed.cluster.addressing import free_number, make_plan, node_number
from holdfast_testbed.constants import MAX_NODES
from holdfast_testbed.errors import TestbedError


@given(number=st.integers(100, 250), nodes=st.integers(1, MAX_NODES))
def test_networks_of_one_cluster_do_not_overlap(number: int, nodes: int) -> None:
    plan = make_plan(number, nodes)
    networks = [ipaddress.ip_network(node.pod_network) for node in plan.nodes]
    networks += [
        ipaddress.ip_network(plan.service_network),
        ipaddress.ip_network(f"{plan.host_address}/24", strict=False),
    ]
    for index, network in enumerate(networks):
        assert not any(network.overlaps(other) for other in networks[index + 1 :])


@given(number=st.integers(100, 250), nodes=st.integers(1, MAX_NODES))
def test_every_address_lies_in_the_clusters_network(number: int, nodes: int) -> None:
    plan = make_plan(number, nodes)
    whole = ipaddress.IPv4Network(f"10.{number}.0.0/16")
    assert all(ipaddress.ip_address(node.address) in whole for node in plan.nodes)
    assert all(ipaddress.IPv4Network(node.pod_network).subnet_of(whole) for node in plan.nodes)
    assert ipaddress.ip_address(plan.first_service_address) in ipaddress.ip_network(plan.service_network)
    assert len({node.address for node in plan.nodes} | {plan.host_address}) == nodes + 1


@given(number=st.integers(100, 250), nodes=st.integers(1, MAX_NODES))
def test_link_names_fit_the_kernels_limit(number: int, nodes: int) -> None:
    plan = make_plan(number, nodes)
    names = [plan.host_link, f"{plan.tag}s", *(node.link for node in plan.nodes)]
    assert max(len(name) for name in names) <= 15


def test_without_nodes_all_stays_on_loopback() -> None:
    plan = make_plan(63, 0)
    assert plan.host_address == "127.0.0.1"
    assert plan.namespaces == ()


def test_a_number_is_free_if_neither_network_nor_name_is_taken() -> None:
    assert free_number(networks=[], taken_tags=[]) == 100
    assert free_number(networks=["10.100.3.0/24"], taken_tags=["hf101", "eth0"]) == 102


def test_a_wide_route_takes_many_numbers() -> None:
    with pytest.raises(TestbedError, match="no free network"):
        free_number(networks=["10.0.0.0/8"], taken_tags=[])


@pytest.mark.parametrize("text", ["2", "node-2", "n2"])
def test_a_node_is_named_in_several_ways(text: str) -> None:
    assert node_number(text) == 2


@pytest.mark.parametrize("text", ["", "node", "two", "-1"])
def test_what_names_no_node_is_refused(text: str) -> None:
    with pytest.raises(TestbedError, match="invalid node"):
        node_number(text)


def test_a_node_that_is_not_there_is_refused_with_the_count() -> None:
    with pytest.raises(TestbedError, match="no node 4: the cluster has 3"):
        make_plan(100, 3).node(4)


@pytest.mark.parametrize("nodes", [-1, MAX_NODES + 1])
def test_too_many_nodes_are_refused(nodes: int) -> None:
    with pytest.raises(TestbedError, match="--nodes must be between"):
        make_plan(100, nodes)
