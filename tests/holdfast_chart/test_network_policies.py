"""NetworkPolicies of the operator, by the rules of Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from charted import all_of, container, one

from holdfast_testbed.fakes.chart import render
from holdfast_testbed.fakes.network_policy import End, Flow, allowed

pytestmark = pytest.mark.integration  # needs the Helm CLI


def test_network_policies_can_be_turned_off_and_narrowed() -> None:
    policies = all_of(render(), "NetworkPolicy")
    assert {kind for policy in policies for kind in policy["spec"]["policyTypes"]} == {"Ingress", "Egress"}
    assert not all_of(render("networkPolicy.enabled=false"), "NetworkPolicy")
    narrowed = one(
        render("networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring"),
        "NetworkPolicy",
        "holdfast-ingress",
    )
    assert narrowed["spec"]["ingress"][1]["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]


def test_who_reaches_the_operator_and_whom_it_reaches() -> None:
    documents = render()
    policies = all_of(documents, "NetworkPolicy")
    ports = {port["name"]: port["containerPort"] for port in container(documents)["ports"]}
    template = one(documents, "Deployment")["spec"]["template"]
    operator = End(namespace="holdfast-system", labels=template["metadata"]["labels"], ports=ports)
    pod, host = End(namespace="ml", labels={"app": "x"}), End()
    flows = {
        "a sidecar's report": (pod, operator, 8443, True),
        "a sidecar's report with the host's network": (host, operator, 8443, True),
        "a scrape": (pod, operator, 8080, True),
        "a scrape from outside": (host, operator, 8080, False),
        "any other port": (pod, operator, 9000, False),
        "the API server": (operator, host, 6443, True),
        "anything else": (operator, host, 22, False),
        "a worker": (operator, pod, 29400, False),
        "another pod beside it": (pod, End(namespace="holdfast-system"), 9000, True),
    }
    found = {
        name: allowed(policies, Flow(source=source, target=target, port=port))
        for name, (source, target, port, _) in flows.items()
    }
    assert found == {name: flow[3] for name, flow in flows.items()}


REPLACES = ("nodeRemediation.mode=Replace", "nodeRemediation.provider=AWS", "nodeRemediation.token.secretName=alerts")


@pytest.mark.parametrize("address", ["169.254.170.23", "169.254.169.254", "fd00:ec2::23"])
def test_credentials_of_aws_are_reached_where_machines_are_replaced(address: str) -> None:
    """By Pod Identity or the node's role, both at port 80; nothing else is, and nothing without AWS."""

    def reached(documents: Sequence[dict[str, Any]], address: str, port: int) -> bool:
        template = one(documents, "Deployment")["spec"]["template"]
        operator = End(namespace="holdfast-system", labels=template["metadata"]["labels"])
        policies = all_of(documents, "NetworkPolicy")
        return allowed(policies, Flow(source=operator, target=End(address=address), port=port))

    assert reached(render(*REPLACES), address, 80)
    assert not reached(render(*REPLACES), address, 8080)
    assert not reached(render(*REPLACES), "192.0.2.1", 80)
    assert not reached(render(), address, 80)
