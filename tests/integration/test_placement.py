"""Where a real scheduler puts workers, and that the API server takes what is added to pods behind their gates."""

from __future__ import annotations

from stage import Stage

ZONE = "topology.kubernetes.io/zone"
SPOT = {"karpenter.sh/capacity-type": "spot"}
PACKED = {"topologyKey": ZONE, "topologyPolicy": "Packed", "nodeSharing": "Exclusive"}


def nodes_of(stage: Stage, name: str) -> set[str]:
    return {pod.spec.node_name for pod in stage.pods(name) if pod.spec.node_name}


def test_gang_uses_one_zone_off_spot_and_shares_no_node(stage: Stage) -> None:
    west = stage.nodes(2, labels={ZONE: "a"})
    spot = stage.nodes(1, labels={ZONE: "b", **SPOT})[2]
    east = stage.nodes(2, labels={ZONE: "b"})[2:]
    body = stage.job(replicas=3, cpu="3", scheduling=PACKED)
    body["spec"]["workers"]["onDemandReplicas"] = 2
    stage.apply(body)
    player = stage.play()
    stage.wait(lambda: len(stage.members()) == 3, "it trains")
    assert nodes_of(stage, "gpt") == set(east)
    by_index = {member["index"]: member["node"] for member in stage.status()["membership"]["members"]}
    assert by_index[2] == spot, "spot capacity has the last index"
    stage.apply(stage.job("other", replicas=3, cpu="500m"))
    stage.wait(lambda: len([pod for pod in stage.pods("other") if pod.spec.node_name]) == 3, "the other is placed")
    assert nodes_of(stage, "other") <= set(west), "there was room beside the first, too"
    stage.lose(next(pod for pod in stage.members() if stage.pod(pod).spec.node_name == by_index[0]), player)
    stage.wait(lambda: "gpt-w3" in stage.members(), "its replacement is there")
    members = stage.status()["membership"]["members"]
    assert {member["index"]: member["node"] for member in members}[0] == by_index[0]


def test_spare_replaces_a_lost_worker_and_another_is_on_standby(stage: Stage) -> None:
    stage.nodes(3)
    body = stage.job(replicas=2, cpu="1", elasticity={"minReplicas": 1})
    body["spec"]["workers"]["spares"] = 1
    stage.apply(body)
    player = stage.play()
    stage.wait(lambda: stage.members() == ["gpt-w0", "gpt-w1"], "two train")
    stage.wait(lambda: "1 of 1 spares are on standby" in stage.condition("Ready")["message"], "one stands by")
    assert stage.status()["replicas"] == 2
    nodes = [stage.pod(f"gpt-w{number}").spec.node_name for number in range(3)]
    assert nodes[2] not in nodes[:2], "it stands by on a node of its own"
    stage.lose("gpt-w1", player)
    stage.wait(lambda: stage.members() == ["gpt-w0", "gpt-w2"], "the spare has its place")
    stage.wait(lambda: "1 of 1 spares are on standby" in stage.condition("Ready")["message"], "another stands by")
    stage.wait(lambda: stage.status().get("incidentCount") == 1, "the loss is counted")
    stage.wait(lambda: "gpt-w3" in [pod.metadata.name for pod in stage.pods()], "another is made")
    stage.core.delete_namespaced_pod("gpt-w3", stage.namespace)
    stage.wait(lambda: "gpt-w4" in [pod.metadata.name for pod in stage.pods()], "a lost spare is replaced")
    assert [incident["cause"] for incident in stage.status()["incidents"]] == ["Infrastructure"]
    assert stage.members() == ["gpt-w0", "gpt-w2"]


def test_queued_gang_starts_when_its_last_worker_is_admitted(stage: Stage) -> None:
    """Kueue is played: it takes its gate from one pod after the other, and tells it the nodes of its flavor."""
    flavor = stage.nodes(3, labels={"flavor": "reserved"})
    stage.nodes(2)
    stage.apply(stage.job(replicas=3, cpu="1", scheduling={"queue": "team-a"}))
    stage.play()
    stage.wait(lambda: len(stage.pods()) == 3, "its pods are made")
    for number in range(3):
        told = f"{number} of 3 workers are admitted by queue team-a"
        stage.wait(lambda told=told: told in stage.condition("Ready")["message"], told)
        assert not nodes_of(stage, "gpt")
        pod = stage.pod(f"gpt-w{number}")
        assert pod.metadata.labels["kueue.x-k8s.io/queue-name"] == "team-a"
        assert [gate.name for gate in pod.spec.scheduling_gates] == ["holdfast.dev/gang", "kueue.x-k8s.io/admission"]
        gates = [{"name": "kueue.x-k8s.io/admission", "$patch": "delete"}]
        spec = {"schedulingGates": gates, "nodeSelector": {"flavor": "reserved"}}
        stage.core.patch_namespaced_pod(pod.metadata.name, stage.namespace, {"spec": spec})
    stage.wait(lambda: len(stage.members()) == 3, "it trains")
    assert nodes_of(stage, "gpt") <= set(flavor)
    stage.core.delete_namespaced_pod("gpt-w1", stage.namespace)
    stage.wait(lambda: "gpt-w3" in [pod.metadata.name for pod in stage.pods()], "its replacement is made")
    assert [gate.name for gate in stage.pod("gpt-w3").spec.scheduling_gates] == ["kueue.x-k8s.io/admission"]
