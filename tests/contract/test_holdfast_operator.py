"""The operator's side of the golden files: it understands what agents write, and writes what they expect."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.job import parse_job
from holdfast_operator.api.names import SPENT
from holdfast_operator.api.status import Membership
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_operator.cluster.agent_hub import parse_body as parse_wire
from holdfast_operator.errors import AgentRequestError
from holdfast_operator.manifests.membership_document import membership_document
from holdfast_operator.views import Restored, parse_pod, parse_report

GOLDEN = Path(__file__).parent
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def read(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def golden_job() -> dict[str, Any]:
    """The resource that the golden membership is about."""
    return {
        "metadata": {
            "namespace": "ml",
            "name": "gpt",
            "uid": "0b9d8c1e-5b1c-4c7e-9d55-6a1f2c3d4e5f",
            "creationTimestamp": "2026-01-31T12:00:00Z",
        },
        "spec": {
            "workers": {
                "replicas": 3,
                "processesPerWorker": 1,
                "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
            },
            "elasticity": {"minReplicas": 2, "replicaStep": 1, "onFailure": "Shrink"},
            "recovery": {
                "budgets": [{"cause": "Application", "maxRestarts": 3, "windowSeconds": 21600}],
                "backoff": {"initialSeconds": 1, "maxSeconds": 60},
                "rules": [
                    {
                        "name": "bug",
                        "cause": "Application",
                        "action": "FailJob",
                        "onExitCodes": {"operator": "In", "values": [2]},
                    },
                    {"name": "gpu", "action": "ReplaceNode", "onGpuErrors": {"xids": [79]}},
                ],
            },
            "checkpoint": {
                "intervalSteps": 50,
                "retention": {"keepLast": 3, "keepEvery": 10000, "keepBest": [{"metric": "val_loss", "count": 3}]},
                "resume": "Always",
            },
            "startupDeadlineSeconds": 300,
            "hangDetection": {"stepTimeoutSeconds": 120},
            "interruption": {"checkpointDeadlineSeconds": 25},
        },
    }


def test_the_membership_that_is_served_is_the_golden_one() -> None:
    golden = read("membership.json")
    job = parse_job(golden_job())
    assert job.spec is not None
    document = membership_document(
        job, job.spec, Membership.from_json(golden), golden["restarts"], golden["jobKey"], durable_step=400
    )
    assert document == golden
    hub = AgentHub(lambda _token: None, lambda _job: None)
    hub.publish(job.uid, document)
    publication = hub.publication(job.uid)
    assert publication is not None
    assert json.loads(publication.payload) == golden


def test_membership_in_status_and_on_the_wire_are_the_same() -> None:
    golden = read("membership.json")
    in_status = Membership.from_json(golden).to_json()
    assert {key: golden[key] for key in in_status} == in_status
    assert Membership.from_json(in_status) == Membership.from_json(golden)


def test_the_golden_report_is_taken_and_understood() -> None:
    heard: list[str] = []
    hub = AgentHub(lambda _token: None, heard.append, clock=lambda: NOON)
    hub.bind("uid-w0", "job")
    hub.record(PodIdentity(namespace="ml", pod="gpt-w0", pod_uid="uid-w0"), (GOLDEN / "report.json").read_bytes())
    kept = hub.latest("uid-w0")
    assert kept is not None
    report = kept.content
    assert heard == ["job"]
    assert report.pod_uid == "uid-w0"
    assert report.ready
    assert report.accepted == report.started == AttemptId(generation=2, attempt=1)
    assert report.world is not None
    assert report.world.members == ("uid-w0", "uid-w1", "uid-w3")
    assert report.world.publication == "p2-6f1e"
    assert report.restored == Restored(step=400, origin="shared, object")
    assert (report.committed_step, report.loss, report.throughput) == (412, 2.125, 1536.0)
    assert [(checkpoint.tier, checkpoint.step) for checkpoint in report.checkpoints] == [("shared", 400)]
    assert report.unsaved is not None
    assert (report.unsaved.since, report.unsaved.cause) == (NOON, "Full")
    assert report.divergences is not None
    last = report.divergences.last
    assert last is not None
    assert (report.divergences.count, last.rank, last.step, last.tensor) == (1, 1, 400, "model/weight")
    assert (last.repaired, last.time) == (True, NOON)
    assert report.highest_claim is not None
    assert report.highest_claim.to_json() == read("claim.json")
    assert report.lost_members == ("uid-w2",)
    assert dict(zip(SPENT, report.books, strict=False)) == {
        **{cause: round(seconds) for cause, seconds in read("status.json")["accounting"]["seconds"].items()}
    }
    assert [(incident.cause, incident.exit_code) for incident in report.incidents] == [("Infrastructure", 137)]
    (notice,) = report.notices
    assert (notice.id, notice.action, notice.leaves) == ("aws-spot-2026-01-31T12:02:00Z", "terminate", True)
    (error,) = report.gpu_errors
    assert (error.kind, error.xid, error.cause, error.action) == ("Xid", 79, "Infrastructure", "ReplaceNode")
    assert (error.gpu, error.count, error.time) == ("GPU-3f1c9a52-7d0e-4b6a-9c11-0d5e8a7b2c44", 1, NOON)
    assert report.preflight is not None
    assert not report.preflight.passed
    assert [check.name for check in report.preflight.checks] == ["GPU", "Storage", "ObjectStore", "Clock"]
    assert [(check.name, check.of_the_job) for check in report.preflight.failed] == [
        ("ObjectStore", True),
        ("Clock", False),
    ]


def test_the_report_carries_the_status_file_unchanged() -> None:
    assert read("report.json")["launcher"] == read("status.json")


def test_golden_termination_message_names_the_exit_cause() -> None:
    terminated = {"exitCode": 1, "reason": "Error", "message": (GOLDEN / "termination.json").read_text()}
    pod = parse_pod(
        {
            "metadata": {"name": "gpt-w0", "uid": "u"},
            "spec": {"containers": [{"name": "trainer"}]},
            "status": {"containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}]},
        }
    )
    assert pod.exit is not None
    assert (pod.exit.code, pod.exit.cause, pod.exit.final) == (1, "Application", True)
    assert pod.exit.words().endswith("ValueError: loss is negative")


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_an_unknown_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(AgentRequestError, match="version") as caught:
        parse_wire(json.dumps({**read("report.json"), "version": version}).encode())
    assert caught.value.status == 400


def test_an_unknown_field_is_ignored() -> None:
    body = {**read("report.json"), "ofTheFuture": {"x": 1}}
    body["launcher"]["ofTheFuture"] = [1]
    parsed = parse_wire(json.dumps(body).encode())
    assert parse_report(parsed, NOON) == parse_report(read("report.json"), NOON)
