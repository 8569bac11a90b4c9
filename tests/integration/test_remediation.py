"""Alerts about nodes of a real control plane, under the rights that the chart grants for this mode and no others.

Machines are EC2's, which moto plays on loopback: instances of an Auto Scaling group.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from kubernetes import client
from moto.server import ThreadedMotoServer
from players import Operator
from stage import Stage

from holdfast_testbed.fakes import chart

SYSTEM = "holdfast-nodes"
USER = chart.account(SYSTEM)
TOKEN = "a-token-of-the-test"
MARK = "holdfast.dev/remediation"
REMEDIATION = {
    "mode": "Replace",
    "provider": "AWS",
    "alerts": [{"alert": "Hot", "action": "Drain"}, {"alert": "Dead", "action": "Replace"}],
    "maxUnavailable": "100%",
    "maxPerHour": 1000,
    "cooldownSeconds": 0,
    "releaseAfterSeconds": 1,
}


@pytest.fixture(scope="module")
def granted(cluster: Any) -> Iterator[Path]:
    """A kubeconfig with exactly the rights of a release whose mode is Replace."""
    values = ("mode=Replace", "provider=AWS", "token.secretName=alerts")
    chosen = [
        renamed(document)
        for document in chart.rights(*(f"nodeRemediation.{value}" for value in values), namespace=SYSTEM)
    ]
    yield chart.grant(cluster, chosen, SYSTEM)
    chart.withdraw(cluster, chosen, SYSTEM)


def renamed(document: dict[str, Any]) -> dict[str, Any]:
    """Beside the other modules' release: cluster-wide names and the label by which those count their roles."""
    document["metadata"]["labels"]["app.kubernetes.io/name"] = "holdfast-nodes"
    if document["kind"].startswith("Cluster"):
        document["metadata"]["name"] = "holdfast-nodes"
        if "roleRef" in document:
            document["roleRef"]["name"] = "holdfast-nodes"
    return document


@pytest.fixture(scope="module")
def account() -> Iterator[dict[str, str]]:
    """The environment by which boto3 finds moto, and nothing of this machine's own account."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server.stop()


@pytest.fixture
def group(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Group:
    """An Auto Scaling group of three."""
    for name, value in account.items():
        monkeypatch.setenv(name, value)
    group = Group()
    image = group.ec2.describe_images()["Images"][0]["ImageId"]
    group.scaling.create_launch_configuration(
        LaunchConfigurationName="gpu", ImageId=image, InstanceType="p4d.24xlarge"
    )
    group.scaling.create_auto_scaling_group(
        AutoScalingGroupName="gpu",
        LaunchConfigurationName="gpu",
        MinSize=3,
        MaxSize=3,
        AvailabilityZones=["us-east-1a"],
    )
    return group


class Group:
    """Instances that are replaced when they go."""

    def __init__(self) -> None:
        self.ec2 = boto3.client("ec2", region_name="us-east-1")
        self.scaling = boto3.client("autoscaling", region_name="us-east-1")

    def instances(self) -> list[str]:
        (found,) = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=["gpu"])["AutoScalingGroups"]
        return sorted(instance["InstanceId"] for instance in found["Instances"])

    def state(self, instance: str) -> str:
        found = self.ec2.describe_instances(InstanceIds=[instance])
        return str(found["Reservations"][0]["Instances"][0]["State"]["Name"])


@pytest.fixture(scope="module")
def operator(granted: Path, account: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running operator that drains and replaces. It ends without complaint."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "token").write_text(TOKEN)
    made = Operator(
        granted,
        folder,
        HOLDFAST_NAMESPACE=SYSTEM,
        HOLDFAST_NODE_REMEDIATION=json.dumps(REMEDIATION),
        HOLDFAST_ALERTS_TOKEN_FILE=str(folder / "token"),
        **account,
    )
    made.start()
    yield made
    assert made.stop() == 0, made.log()[-3000:]


@pytest.fixture
def tell(operator: Any, admin: Any) -> Callable[..., int]:
    """Alertmanager's part."""
    secret = client.CoreV1Api(admin).read_namespaced_secret("holdfast-ca", SYSTEM)
    trust = ssl.create_default_context(cadata=ca_of(secret.data))
    began: dict[tuple[str, str], datetime] = {}

    def post(node: str, status: str = "firing", token: str = TOKEN, name: str = "Hot") -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", operator.agents_port, timeout=60, context=trust)
        alert = {
            "status": status,
            "labels": {"alertname": name, "node": node},
            "annotations": {"summary": "too hot"},
            "startsAt": began.setdefault((node, name), datetime.now(UTC)).isoformat(),
        }
        body = json.dumps({"version": "4", "alerts": [alert]})
        try:
            connection.request("POST", "/v1/alerts", body=body, headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status
        finally:
            connection.close()

    return post


def ca_of(data: dict[str, str]) -> str:
    return base64.b64decode(data["ca.crt"]).decode()


def node(stage: Stage, name: str) -> Any:
    return stage.core.read_node(name)


def marked(stage: Stage, name: str) -> dict[str, Any] | None:
    text = (node(stage, name).metadata.annotations or {}).get(MARK)
    return json.loads(text) if text else None


def told(stage: Stage, name: str) -> list[str]:
    """Reasons of our events about a node. As JSON: the client refuses those of others, without a time."""
    about = f"regarding.kind=Node,regarding.name={name}"
    answer = client.EventsV1Api(stage.api).list_namespaced_event(
        "default", field_selector=about, _preload_content=False
    )
    listed = json.loads(answer.data)["items"]
    found = [event for event in listed if event["reportingController"] == "holdfast.dev/operator"]
    return [str(event["reason"]) for event in sorted(found, key=lambda event: str(event["eventTime"]))]


def on_node(stage: Stage, name: str) -> list[str]:
    pods = stage.core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={name}").items
    return [pod.metadata.name for pod in pods if pod.status.phase in ("Pending", "Running")]


def test_an_alert_drains_a_node_and_its_end_gives_it_back(stage: Stage, tell: Any) -> None:
    stage.nodes(4)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    sick = stage.pod("gpt-w1").spec.node_name
    assert tell(sick, token="another") == 401
    assert tell(sick) == 200
    stage.wait(lambda: "gpt-w3" in stage.members() and "gpt-w1" not in stage.members(), "a replacement trains")
    stage.wait(lambda: not on_node(stage, sick), "the node is empty")
    assert node(stage, sick).spec.unschedulable
    assert stage.pod("gpt-w3").spec.node_name != sick
    stage.wait(lambda: stage.status().get("incidentsByCause") or [], "it is counted")
    assert [entry["cause"] for entry in stage.status()["incidentsByCause"]] == ["Interruption"]
    assert len(player.left) == 1, "it was told to leave, not killed"
    stage.wait(lambda: "NodeDrained" in told(stage, sick), "it is told")
    assert tell(sick, "resolved") == 200
    stage.wait(lambda: not node(stage, sick).spec.unschedulable, "the node is given back")
    assert marked(stage, sick) is None
    stage.wait(lambda: "NodeReleased" in told(stage, sick), "it is told")
    assert {"NodeCordoned", "AlertsResolved"} <= set(told(stage, sick))


def bare_pod(stage: Stage, name: str, where: str) -> None:
    """A pod that something would make again, with a budget that lets nobody have it."""
    owner = stage.core.create_namespaced_config_map(stage.namespace, {"metadata": {"name": name}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": owner.metadata.uid, "controller": True}
    meta = {"name": name, "labels": {"app": name}, "ownerReferences": [reference]}
    spec = {"nodeName": where, "containers": [{"name": "c", "image": "x"}]}
    stage.core.create_namespaced_pod(stage.namespace, {"metadata": meta, "spec": spec})
    budget = {"metadata": {"name": name}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}}
    client.PolicyV1Api(stage.api).create_namespaced_pod_disruption_budget(stage.namespace, budget)
    stage.wait(lambda: stage.core.read_namespaced_pod(name, stage.namespace).status.phase == "Running", "it runs")


def test_budget_delays_a_drain_until_lifted_across_a_restart(stage: Stage, tell: Any) -> None:
    """The restart of the operator loses nothing."""
    (sick,) = stage.nodes(1)
    bare_pod(stage, "web", sick)
    blocked = "holdfast_remediation_actions_total"
    assert tell(sick) == 200
    stage.wait(lambda: stage.operator.metric(blocked, action="Evict", result="blocked") >= 2, "it is refused, twice")
    assert on_node(stage, sick) == ["web"]
    stage.operator.restart()
    before = marked(stage, sick)
    client.PolicyV1Api(stage.api).delete_namespaced_pod_disruption_budget("web", stage.namespace)
    stage.wait(lambda: not on_node(stage, sick), "it is evicted, though nobody told the alert again")
    assert marked(stage, sick) == before
    assert node(stage, sick).spec.unschedulable


def test_job_that_opted_out_and_foreign_cordons_are_left_alone(stage: Stage, tell: Any) -> None:
    stage.nodes(3)
    stage.run(replicas=2, nodeRemediation={"policy": "Ignore"})
    sick = stage.pod("gpt-w1").spec.node_name
    free = next(name for name in stage.nodes(0) if not on_node(stage, name))
    stage.core.patch_node(free, {"spec": {"unschedulable": True}})
    stage.wait(lambda: node(stage, free).spec.taints, "the cordon is everywhere")
    assert [tell(sick), tell(free)] == [200, 200]
    stage.wait(lambda: {"NodeCordoned", "DrainWaits"} <= set(told(stage, sick)), "its node waits for it")
    stage.wait(lambda: told(stage, free) == ["CordonedByOthers"], "and that is told")
    assert stage.members() == ["gpt-w0", "gpt-w1"]
    assert marked(stage, free) is None
    assert [tell(free, "resolved"), tell(sick, "resolved")] == [200, 200]
    stage.wait(lambda: not node(stage, sick).spec.unschedulable, "the operator's own cordon is lifted")
    assert node(stage, free).spec.unschedulable, "nobody but its owner lifts it"
    assert on_node(stage, sick) == ["gpt-w1"]


def test_a_dead_machine_is_replaced_once_its_pods_are_away(stage: Stage, tell: Any, group: Group) -> None:
    nodes, instances = stage.nodes(3), group.instances()
    for name, instance in zip(nodes, instances, strict=True):
        stage.core.patch_node(name, {"spec": {"providerID": f"aws:///us-east-1a/{instance}"}})
    player = stage.run(replicas=2)
    sick = stage.pod("gpt-w1").spec.node_name
    machine = instances[nodes.index(sick)]
    assert tell(sick, name="Dead") == 200
    stage.wait(lambda: group.state(machine) in ("shutting-down", "terminated"), "its instance is terminated")
    stage.wait(lambda: stage.recovered(["gpt-w0", "gpt-w2"]), "another trains elsewhere")
    assert len(player.left) == 1, "its worker was told to leave, not killed"
    assert not on_node(stage, sick)

    stage.operator.restart()
    stage.kubelets.silent.add(sick)
    stage.wait(lambda: "NodeReplaced" in told(stage, sick), "it is told")
    (fresh,) = set(group.instances()) - set(instances)
    stage.remove_node(sick)  # as a cloud's node controller does
    assert {group.state(one) for one in (set(instances) - {machine}) | {fresh}} == {"running"}
    stage.wait(lambda: stage.status().get("incidentsByCause") or [], "it is counted")
    assert [(entry["cause"], entry["count"]) for entry in stage.status()["incidentsByCause"]] == [("Interruption", 1)]


def test_every_right_over_nodes_is_used_and_no_call_refused(stage: Stage, tell: Any, audited: Any) -> None:
    (sick,) = stage.nodes(1)
    bare_pod(stage, "web", sick)
    client.PolicyV1Api(stage.api).delete_namespaced_pod_disruption_budget("web", stage.namespace)
    assert tell(sick) == 200
    stage.wait(lambda: not on_node(stage, sick), "the node is empty")
    needed = {("nodes", "patch"), ("pods/eviction", "create"), ("nodes", "get")}
    # A call may be answered a moment before it is written down.
    stage.wait(lambda: needed <= asked(audited())[0], "every right was used")
    assert asked(audited())[1] == set()


def asked(entries: list[dict[str, Any]]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Rights that the operator used, and those that it was refused."""
    used, refused = set(), set()
    for entry in entries:
        target = entry.get("objectRef")
        if entry["user"]["username"] != USER or not target:
            continue
        right = ("/".join(filter(None, (target["resource"], target.get("subresource")))), entry["verb"])
        used.add(right)
        if entry["responseStatus"].get("code") == 403 and "because it is being terminated" not in str(entry):
            refused.add(right)
    return used, refused
