"""The connections that NetworkPolicies allow by their specification, because the testbed's CNI enforces none.

https://kubernetes.io/docs/concepts/services-networking/network-policies/. A form that is not supported here raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from holdfast_testbed.errors import TestbedError

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a flow: a pod, or without a namespace a host or another end outside of pods. A pod with the host's
    network is such an end too."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports by name."""
    address: str = "192.0.2.1"


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A connection to open."""

    source: End
    target: End
    port: int
    protocol: str = "TCP"


def allowed(policies: Iterable[Json], flow: Flow) -> bool:
    """Return whether the flow is allowed: the target accepts it, and the source may open it."""
    listed = list(policies)
    taken = _side([one for one in listed if _concerns(one, "Ingress", flow.target)], "ingress", "from", flow)
    return taken and _side([one for one in listed if _concerns(one, "Egress", flow.source)], "egress", "to", flow)


def _side(policies: list[Json], rules: str, peers: str, flow: Flow) -> bool:
    """Return whether the policies of one end allow the flow; without policies, everything is allowed."""
    other = flow.source if peers == "from" else flow.target
    return not policies or any(
        _any_peer(rule.get(peers), other, policy["metadata"]["namespace"]) and _any_port(rule.get("ports"), flow)
        for policy in policies
        for rule in policy["spec"].get(rules) or ()
    )


def _concerns(policy: Json, kind: str, subject: End) -> bool:
    here = policy["metadata"]["namespace"] == subject.namespace
    return here and kind in policy["spec"]["policyTypes"] and _selects(policy["spec"]["podSelector"], subject.labels)


def _any_peer(peers: list[Json] | None, other: End, namespace: str) -> bool:
    return not peers or any(_peer(peer, other, namespace) for peer in peers)


def _peer(peer: Json, other: End, namespace: str) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        address = ip_address(other.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(part) for part in block.get("except") or ()
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        here = _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
    else:
        here = other.namespace == namespace
    return here and _selects(peer.get("podSelector") or {}, other.labels)


def _any_port(ports: list[Json] | None, flow: Flow) -> bool:
    return not ports or any(_port(one, flow) for one in ports)


def _port(one: Json, flow: Flow) -> bool:
    if one.get("protocol", "TCP") != flow.protocol:
        return False
    wanted = one.get("port")
    if isinstance(wanted, str):
        return flow.target.ports.get(wanted) == flow.port
    return wanted is None or bool(wanted <= flow.port <= one.get("endPort", wanted))


def _selects(selector: Json, labels: Mapping[str, str]) -> bool:
    if set(selector) - {"matchLabels"}:
        raise TestbedError(f"a selector of this form is not evaluated here: {dict(selector)}")
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
