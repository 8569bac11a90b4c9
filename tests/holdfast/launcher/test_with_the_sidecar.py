"""A cloud notice, the real sidecar and the real launchers, down to the incident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast_testbed.fakes.metadata import (
    AZURE,
    CLOUDS,
    NOTICE_SECONDS,
    PREEMPTION,
    Announcement,
    Instance,
    MetadataServer,
)

Wait = Callable[..., Any]


class Machine:
    """The metadata service of the machine of a pod."""

    def __init__(self, cloud: str) -> None:
        self.said = Announcement(instance_id="node-c", cloud=cloud)
        self.server = MetadataServer(Instance(lambda: self.said))

    def announce_removal(self) -> None:
        """Announce that the cloud removes the machine."""
        cloud = self.said.cloud
        self.said = self.said.announce(PREEMPTION[cloud], now=datetime.now(UTC), seconds=NOTICE_SECONDS[cloud])


@pytest.fixture
def machine(request: Any) -> Iterator[Machine]:
    found = Machine(request.param)
    with found.server:
        yield found


@pytest.fixture
def sidecar(machine: Machine) -> Iterator[Callable[[Any], Any]]:
    """Start the sidecar of a pod, which needs no operator to pass a notice on."""
    running: list[subprocess.Popen[bytes]] = []

    def start(pod: Any) -> Any:
        log = pod.run_dir / "sidecar.log"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOLDFAST_RUN_DIR": str(pod.run_dir),
            "HOLDFAST_POD_UID": pod.uid,
            "HOLDFAST_POD_NAME": pod.name,
            "HOLDFAST_POD_NAMESPACE": "ml",
            "HOLDFAST_OPERATOR_URL": "https://127.0.0.1:1",
            "HOLDFAST_NOTICE_PROVIDERS": ",".join(CLOUDS),
            "HOLDFAST_METADATA_URL": machine.server.url,
            "HOLDFAST_SIDECAR_PORT": "0",
            "HOLDFAST_SIDECAR_ADDRESS": "127.0.0.1",
        }
        with log.open("wb") as output:
            command = [sys.executable, "-m", "holdfast_sidecar"]
            running.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        return log

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("machine", CLOUDS, indirect=True)
def test_a_clouds_notice_ends_in_a_commit_and_is_an_interruption(
    cluster: Any, wait_for: Wait, machine: Machine, sidecar: Callable[[Any], Any]
) -> None:
    a, b, c = cluster.start("a", "b", "c")
    log = sidecar(c)
    cluster.publish(1, "a", "b", "c")
    cluster.await_world(1, "a", "b", "c")
    wait_for(lambda: f"{machine.said.cloud}: the source of notices answers" in log.read_text(), log.read_text)
    wait_for(lambda: min(pod.step for pod in (a, b, c)) > 5, "they train")
    machine.announce_removal()
    assert c.wait() == 75, cluster.tail() + log.read_text()
    answer = json.loads((c.run_dir / "emergency_checkpoint.ack").read_text())
    (notice,) = c.status["notices"]
    assert (answer["id"], answer["result"]) == (notice["id"], "Committed")
    cluster.await_world(1, "a", "b", above=(1, 1))
    wait_for(lambda: a.status["incidents"] and a.status["incidents"][0]["resumedTime"], "two go on")
    (incident,) = a.status["incidents"]
    assert (incident["cause"], incident["pod"]) == ("Interruption", "c")
    if machine.said.cloud == AZURE:
        wait_for(lambda: "is approved, its checkpoint is complete" in log.read_text(), log.read_text)
