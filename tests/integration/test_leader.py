"""Two operators on one cluster: one leads by the Lease, and whatever becomes of it, the other goes on from there."""

from __future__ import annotations

import http.client
import json
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

SYSTEM = "holdfast-system"
LEASE_SECONDS = 6


class Pair:
    """Two replicas. To players of agents it is the one that leads, as the sidecar finds it."""

    def __init__(self, one: Any, other: Any) -> None:
        self.leader, self.standby = one, other

    @property
    def agents_port(self) -> int:
        return int(self.leader.agents_port)

    def log(self) -> str:
        """Of both, the leader's last."""
        return str(self.standby.log()) + str(self.leader.log())

    def changed(self) -> bool:
        """Whether the other one leads now; then it is the leader."""
        if not self.standby.metric("holdfast_leader"):
            return False
        self.leader, self.standby = self.standby, self.leader
        return True


@pytest.fixture(scope="module")
def operator(rights: Path, tmp_path_factory: pytest.TempPathFactory, operator_class: Any) -> Iterator[Pair]:
    """Both of them, with a Lease that does not last long. The leader ends without complaint."""
    folder = tmp_path_factory.mktemp("pair")
    made = [operator_class(rights, folder, HOLDFAST_LEASE_SECONDS=str(LEASE_SECONDS)) for _ in range(2)]
    for one in made:
        one.start()
    pair = Pair(*made)
    yield pair
    for one in (pair.standby, pair.leader):
        assert one.stop() == 0, one.log()[-3000:]


def holder(stage: Any) -> tuple[str, int]:
    """Of the Lease, and how often it has changed hands."""
    lease = client.CoordinationV1Api(stage.api).read_namespaced_lease("holdfast-operator", SYSTEM)
    return str(lease.spec.holder_identity), int(lease.spec.lease_transitions)


def name_of(operator: Any) -> str:
    return f"operator-{operator.http_port}"


def asked(stage: Any, operator: Any) -> tuple[int, Any]:
    """The agents' API of one of the two, by who has no token."""
    core = client.CoreV1Api(stage.api)
    trust = core.read_namespaced_config_map("gpt-holdfast-ca", stage.namespace).data["ca.crt"]
    context = ssl.create_default_context(cadata=trust)
    connection = http.client.HTTPSConnection("127.0.0.1", operator.agents_port, timeout=10, context=context)
    try:
        connection.request("GET", "/v1/membership?after=0")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def recovered(stage: Any, members: list[str]) -> bool:
    trains = stage.launchers[-1].world or {"members": []}
    in_it = {pod.metadata.name for pod in stage.pods() if pod.metadata.uid in trains["members"]}
    return bool(stage.members() == members and in_it == set(members) and stage.condition("Ready")["status"] == "True")


def test_a_standby_goes_on_where_a_killed_leader_was_and_nothing_is_doubled(stage: Any, operator: Pair) -> None:
    stage.nodes(3)
    player = stage.run(replicas=3, elasticity={"minReplicas": 2})
    assert holder(stage)[0] == name_of(operator.leader)
    assert operator.standby.get("/readyz")[0] == 200
    assert operator.standby.metric("holdfast_leader") == 0
    status, answer = asked(stage, operator.standby)
    assert (status, answer["leader"]) == (503, f"https://127.0.0.1:{operator.leader.agents_port}")
    before, transitions = {pod.metadata.uid for pod in stage.pods()}, holder(stage)[1]

    operator.leader.kill()
    stage.lose("gpt-w1", player)
    stage.wait(operator.changed, "the standby leads")
    stage.wait(lambda: recovered(stage, ["gpt-w0", "gpt-w3", "gpt-w2"]), "the replacement trains")

    stage.wait(lambda: stage.status().get("incidents"), "it is counted")
    assert holder(stage) == (name_of(operator.leader), transitions + 1)
    assert [pod.metadata.name for pod in stage.pods()] == ["gpt-w0", "gpt-w1", "gpt-w2", "gpt-w3"]
    assert before <= {pod.metadata.uid for pod in stage.pods()}, "no pod was made anew"
    found = stage.status()
    assert [(one["cause"], one["pod"]) for one in found["incidents"]] == [("Infrastructure", "gpt-w1")]
    assert (found["restartCount"], found["membership"]["generation"]) == (1, 2)
    operator.standby.start()
    assert operator.standby.metric("holdfast_leader") == 0


def test_a_leader_that_slept_ends_when_it_wakes_and_the_next_has_all(stage: Any, operator: Pair) -> None:
    stage.nodes(2)
    player = stage.run(replicas=2)
    pods = {pod.metadata.uid for pod in stage.pods()}
    sleeper = operator.leader
    sleeper.signal(signal.SIGSTOP)
    stage.wait(operator.changed, "the standby leads")
    step = player.step
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait() == 1
    last = sleeper.lines()[-1]["message"]
    assert "the operator ends: the Lease could not be renewed" in last
    stage.wait(lambda: (stage.status().get("progress") or {}).get("step", 0) > step, "progress is shown")
    assert {pod.metadata.uid for pod in stage.pods()} == pods
    assert len(player.worlds) == 1
    sleeper.start()


def test_a_leader_that_ends_by_itself_gives_the_lease_back(stage: Any, operator: Pair) -> None:
    first = operator.leader
    assert first.stop() == 0
    stage.wait(operator.changed, "the standby leads")
    assert any("the Lease had been given back" in line["message"] for line in operator.leader.lines())
    first.start()
