"""The real sidecar process against the real agents' API of the operator: both sides of the contract at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast_operator.agents.server import AgentServer
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity


def identify(token: str) -> PodIdentity | None:
    return PodIdentity(namespace="ml", pod="gpt-w0", pod_uid="uid-w0") if token == "first-token" else None


@pytest.fixture
def hub(sidecar, authority) -> Iterator[AgentHub]:
    found = AgentHub(identify, lambda _job: None)
    server = AgentServer(found, authority.server_context(), host="127.0.0.1", port=0)
    server.start()
    sidecar.environment["HOLDFAST_OPERATOR_URL"] = f"https://127.0.0.1:{server.port}"
    yield found
    server.stop()


def stored(sidecar: Any) -> Any:
    path = sidecar.run_dir / "membership.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def test_reports_arrive_and_publications_come_back(hub, sidecar, metadata, golden, wait):
    hub.bind("uid-w0", "job-1")
    status = sidecar.write_status()
    sidecar.start()
    report = wait(lambda: hub.latest("uid-w0"), "a report")
    assert report.content.has_launcher
    assert (report.content.phase, report.content.committed_step) == (status["phase"], status["committedStep"])
    for revision in (7, 8):
        published = {**golden("membership.json"), "revision": revision}
        hub.publish("job-1", published)
        wait(lambda published=published: stored(sidecar) == published, "the membership")
    metadata.interrupt()
    wait(lambda: hub.latest("uid-w0").content.notices, "the notice")


def test_a_pod_that_is_not_known_yet_is_served_once_it_is(hub, sidecar, wait):
    sidecar.start()
    wait(lambda: sidecar.says("no job that this pod belongs to (404)") >= 2, "the refusals")
    hub.bind("uid-w0", "job-1")
    wait(lambda: hub.latest("uid-w0"), "a report")


def test_an_operator_that_stands_by_is_waited_for(hub, sidecar, wait):
    hub.bind("uid-w0", "job-1")
    hub.stand_by("https://10.0.0.9:8443")
    sidecar.start()
    wait(lambda: sidecar.says("its leader is https://10.0.0.9:8443"), "the refusal")
    hub.take_over()
    wait(lambda: hub.latest("uid-w0"), "a report")


def test_what_the_operator_dislikes_about_a_report_is_in_the_log(hub, sidecar, wait):
    hub.bind("uid-w0", "job-1")
    sidecar.write_status(podUID="uid-other")
    sidecar.start()
    wait(lambda: sidecar.says("the operator answered 400: launcher.podUID is another pod's"), "the complaint")
    assert hub.latest("uid-w0") is None
