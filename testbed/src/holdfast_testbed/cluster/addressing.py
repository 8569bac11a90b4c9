"""The names and addresses of a cluster. All depend on one number, so a removal needs only the plan.

Cluster k owns 10.k.0.0/16 and interfaces and namespaces named `hf<k>…`. Without nodes it uses only loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass

from holdfast_testbed.constants import MAX_NODES
from holdfast_testbed.errors import TestbedError

_FIRST, _LAST = 100, 250


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The names and addresses of one node."""

    number: int
    name: str
    namespace: str
    link: str
    """The node's end of its cable to the cluster's switch."""
    address: str
    pod_network: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The names and addresses of one cluster."""

    number: int
    nodes: tuple[NodePlan, ...]

    @property
    def tag(self) -> str:
        """The prefix of everything that the cluster creates on the machine."""
        return f"hf{self.number}"

    @property
    def switch(self) -> str:
        """The network namespace with the bridge between nodes."""
        return self.tag

    @property
    def host_link(self) -> str:
        """The host's own cable to the switch."""
        return self.tag

    @property
    def host_address(self) -> str:
        return f"10.{self.number}.0.1" if self.nodes else "127.0.0.1"

    @property
    def service_network(self) -> str:
        return f"10.{self.number}.192.0/18"

    @property
    def first_service_address(self) -> str:
        """The cluster IP of `kubernetes.default`."""
        return f"10.{self.number}.192.1"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All network namespaces of the cluster."""
        return (self.switch, *(node.namespace for node in self.nodes)) if self.nodes else ()

    def node(self, number: int) -> NodePlan:
        """Return the plan of node `number`, counted from 1."""
        for node in self.nodes:
            if node.number == number:
                return node
        raise TestbedError(f"no node {number}: the cluster has {len(self.nodes)}")


def make_plan(number: int, nodes: int) -> Plan:
    if not 0 <= nodes <= MAX_NODES:
        raise TestbedError(f"--nodes must be between 0 and {MAX_NODES}, not {nodes}")
    return Plan(number=number, nodes=tuple(_node(number, index) for index in range(1, nodes + 1)))


def _node(cluster: int, number: int) -> NodePlan:
    return NodePlan(
        number=number,
        name=f"node-{number}",
        namespace=f"hf{cluster}-n{number}",
        link=f"n{number}",
        address=f"10.{cluster}.0.{10 + number}",
        pod_network=f"10.{cluster}.{100 + number}.0/24",
    )


def free_number(*, networks: Collection[str], taken_tags: Collection[str]) -> int:
    """Return the first number whose /16 overlaps none of `networks` and whose tag is free."""
    used = [ipaddress.ip_network(network, strict=False) for network in networks]
    for number in range(_FIRST, _LAST + 1):
        mine = ipaddress.ip_network(f"10.{number}.0.0/16")
        if f"hf{number}" not in taken_tags and not any(mine.overlaps(other) for other in used):
            return number
    raise TestbedError("no free network: all of 10.100.0.0/16 … 10.250.0.0/16 are in use on this machine")


def node_number(text: str) -> int:
    """Return the number in `2`, `node-2` or `n2`, which is 2."""
    digits = text.removeprefix("node-").removeprefix("n")
    if not digits.isdigit():
        raise TestbedError(f"invalid node '{text}': expected a number or a name, for example 1 or node-1")
    return int(digits)
