"""The real process against a real operator over TLS and a real metadata service, both hurt on purpose."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.fakes.metadata import CLOUDS, GCP, Answer, Instance, MetadataServer

DEADLINE = 240.0


def shape(value: Any) -> Any:
    """The names in a document, without its values."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None


def test_report_matches_the_golden_file(sidecar, operator, metadata, golden, wait):
    """It contains the status unchanged."""
    status = sidecar.write_status()
    metadata.interrupt()
    sidecar.start()
    report = wait(lambda: next((r for r in operator.reports if r["notices"]), None), "a report with the notice")
    expected = {**golden("report.json"), "gpu": [], "preflight": None}  # nobody asked an exporter, nor for checks
    assert shape(report) == shape(expected)
    assert report["launcher"] == status
    assert report["pod"] == expected["pod"]
    assert {**report["notices"][0], "observedAt": ""} == {**expected["notices"][0], "observedAt": ""}


def test_the_membership_is_stored_byte_for_byte(sidecar, operator, run_dir, wait):
    first = operator.membership(7)
    sidecar.start()
    wait((run_dir / "membership.json").exists, "the first membership")
    assert (run_dir / "membership.json").read_bytes() == first
    second = operator.membership(8)
    wait(lambda: (run_dir / "membership.json").read_bytes() == second, "the second membership")


def test_each_change_of_the_launcher_is_reported(sidecar, operator, wait):
    sidecar.start()
    for phase in ("Starting", "Forming", "Running", "Draining"):
        sidecar.write_status(phase=phase)
        wait(lambda phase=phase: _phase(operator) == phase, f"the report of {phase}")


def _phase(operator: Any) -> str:
    return ((operator.latest().get("launcher") or {}).get("phase")) or ""


def test_killed_sidecar_forwards_a_notice_once(sidecar, operator, metadata, run_dir, wait):
    """It continues to report the notice."""
    metadata.interrupt()
    sidecar.start()
    wait((run_dir / "emergency_checkpoint").exists, "the touch-file")
    (run_dir / "emergency_checkpoint").rename(run_dir / "taken")  # the launcher consumes it
    wait(lambda: operator.latest().get("notices"), "the notice's report")
    sidecar.kill()
    said = len(sidecar.lines())
    sidecar.start()
    answers = "AWS: the source of notices answers"
    wait(lambda: any(answers in line["message"] for line in sidecar.lines()[said:]), "a poll of the new process")
    report = wait(lambda: starts(operator)[1:], "a report of the new process")[0]
    assert not (run_dir / "emergency_checkpoint").exists()
    assert [notice["id"] for notice in report["notices"]] == ["aws-spot-2026-01-31T12:02:00Z"]
    assert len(starts(operator)) == 2


def starts(operator: Any) -> list[Any]:
    """The first report of each process."""
    return list({report["sidecar"]["startId"]: report for report in reversed(operator.reports)}.values())[::-1]


def test_a_killed_sidecar_takes_up_the_stored_membership(sidecar, operator, run_dir, wait):
    operator.membership(7)
    sidecar.start()
    wait((run_dir / "membership.json").exists, "the membership")
    wait(lambda: operator.polls[-1:] == [7], "the poll for the next one")
    sidecar.kill()
    before = (run_dir / "membership.json").stat().st_ino
    asked = len(operator.polls)
    sidecar.start()
    wait(lambda: len(operator.polls) > asked, "a poll of the new process")
    assert operator.polls[-1] == 7
    assert (run_dir / "membership.json").stat().st_ino == before


def test_an_operator_that_was_away_is_told_everything(sidecar, operator, run_dir, wait):
    operator.membership(1)
    sidecar.start()
    wait(lambda: sidecar.says("reports reach the operator"), "a first report and its answer")
    operator.stop()
    incident = {"generation": 2, "attempt": 1, "cause": "Application"}
    sidecar.write_status(phase="Forming", incidents=[incident])
    sidecar.write_status(phase="Running", incidents=[incident])
    failed = re.compile(r'sidecar_reports_total{result="failed"} ([3-9]|\d\d)')
    wait(lambda: failed.search(sidecar.get("/metrics")[1]), "some tries")
    latest = operator.membership(2)
    operator.start()
    wait(lambda: _phase(operator) == "Running", "the report after the return")
    assert operator.latest()["launcher"]["incidents"] == [incident]
    wait(lambda: _content(run_dir) == latest, "the membership that was missed")
    refused = "reports do not reach the operator: ConnectionRefusedError"
    assert sidecar.says(refused) == 1, "a fault is one line, not one a try"


def test_a_report_whose_answer_was_lost_is_made_good(sidecar, operator, wait):
    operator.lose_answers = True
    sidecar.write_status()
    sidecar.start()
    wait(lambda: len(operator.reports) >= 2, "a second try")
    operator.lose_answers = False
    wait(lambda: sidecar.says("reports reach the operator"), "an accepted report")
    reports = list(operator.reports)
    pairs = [(r["sidecar"]["startId"], r["sidecar"]["number"]) for r in reports]
    bodies = dict(zip(pairs, reports, strict=True))
    assert [bodies[pair] for pair in pairs] == reports, "two reports of one number are the same report"


@pytest.mark.parametrize(
    "refusal",
    [
        (401, "does not accept this pod's token"),
        (403, "belongs to another pod"),
        (404, "no job that this pod belongs to"),
        (413, "too large"),
        (503, "its leader is https://other:8443"),
        (500, "answered 500"),
    ],
)
def test_each_refusal_is_one_clear_line_and_ends_by_itself(sidecar, operator, run_dir, wait, refusal):
    status, line = refusal
    operator.status = status
    sidecar.start()
    wait(lambda: sidecar.says(line), f"a line about {status}")
    wait(lambda: len(operator.tries) >= 6, "some more tries")
    said = sidecar.says(line)
    assert said <= 2, "one line of the reports and one of the membership"
    operator.status = None
    data = operator.membership(1)
    wait(lambda: operator.reports, "a report")
    wait((run_dir / "membership.json").exists, "the membership")
    assert (run_dir / "membership.json").read_bytes() == data


def test_a_rotated_token_is_used_at_once_and_none_is_ever_logged(sidecar, operator, tmp_path, wait):
    sidecar.start()
    wait(lambda: operator.reports, "a report")
    operator.tokens = {"second-token"}
    sidecar.write_status(phase="Forming")
    wait(lambda: sidecar.says("does not accept this pod's token"), "the refusal")
    beside = tmp_path / "token.new"
    beside.write_text("second-token")
    beside.rename(tmp_path / "token")
    wait(lambda: _phase(operator) == "Forming", "a report with the new token")
    assert "first-token" not in sidecar.log.read_text()
    assert "second-token" not in sidecar.log.read_text()


def test_a_rotated_ca_is_trusted_and_a_foreign_one_never(sidecar, operator, tmp_path, authority_named, wait):
    sidecar.start()
    wait(lambda: operator.reports, "a report")
    other = authority_named("second")
    operator.stop()
    operator.context = other.server_context()
    operator.start()
    sidecar.write_status(phase="Forming")
    wait(lambda: sidecar.says("certificate refused"), "the refusal of a foreign certificate")
    assert _phase(operator) != "Forming"
    (tmp_path / "bundle.new").write_bytes(other.file.read_bytes())
    (tmp_path / "bundle.new").rename(tmp_path / "ca.crt")
    wait(lambda: _phase(operator) == "Forming", "a report over the new trust")


def test_a_certificate_of_another_name_is_refused(sidecar, operator, authority, wait):
    operator.stop()
    operator.context = authority.server_context("127.0.0.2")
    operator.start()
    sidecar.start()
    wait(lambda: sidecar.says("certificate refused"), "the refusal")
    assert operator.reports == []


def test_a_membership_of_an_unknown_version_is_refused_by_name(sidecar, operator, run_dir, wait):
    kept = operator.membership(1)
    sidecar.start()
    wait((run_dir / "membership.json").exists, "the first membership")
    operator.membership(2, version=2)
    wait(lambda: sidecar.says("membership has version 2; this sidecar understands 1"), "the refusal")
    assert (run_dir / "membership.json").read_bytes() == kept
    wanted = operator.membership(3)
    wait(lambda: (run_dir / "membership.json").read_bytes() == wanted, "the next good one")


def test_a_revision_that_fell_is_followed(sidecar, operator, run_dir, wait):
    operator.membership(9)
    sidecar.start()
    wait((run_dir / "membership.json").exists, "the membership")
    restored = operator.membership(4)
    wait(lambda: (run_dir / "membership.json").read_bytes() == restored, "the restored one")
    assert sidecar.says("revision fell from 9 to 4") == 1


@pytest.mark.usefixtures("patient")
def test_an_operator_that_hangs_on_reports_delays_nothing_else(sidecar, operator, run_dir, wait):
    operator.hangs = True
    sidecar.write_status(exit={"code": 0})
    sidecar.start()
    wait(lambda: "/v1/report" in operator.tries, "the report that hangs")
    data = operator.membership(1)
    wait(lambda: _content(run_dir) == data, "the membership")
    assert sidecar.get("/healthz")[0] == 200
    operator.hangs = False
    assert sidecar.terminate() == 0
    assert operator.latest()["launcher"]["exit"] == {"code": 0}


def test_no_launcher_yet_is_told_as_such(sidecar, operator, wait):
    sidecar.start()
    report = wait(operator.latest, "a report")
    assert report["launcher"] is None
    sidecar.write_status(ready=True)
    wait(lambda: (operator.latest()["launcher"] or {}).get("ready"), "the launcher's first status")


def test_a_launcher_that_is_there_already_is_in_the_first_report(sidecar, operator, wait):
    """Also where the thread that watches it comes late."""
    sidecar.before = "from holdfast_sidecar.main import Sidecar; Sidecar._watch_status = lambda self: 60.0"
    status = sidecar.write_status()
    sidecar.start()
    wait(operator.latest, "a report")
    assert operator.reports[0]["launcher"] == status


def test_probes_and_metrics_answer_and_change_nothing(sidecar, operator, metadata, wait):
    metadata.recommend()
    sidecar.write_status(committedStep=412)
    sidecar.start()
    wait(lambda: operator.latest().get("notices"), "the notice")
    wait(lambda: sidecar.get("/readyz")[0] == 200, "readiness")
    assert sidecar.get("/healthz") == (200, "ok\n")
    counted = 'holdfast_sidecar_notices_total{action="rebalance",source="AWS"} 1.0'
    wait(lambda: counted in sidecar.get("/metrics")[1], "the notice's count")
    text = sidecar.get("/metrics")[1]
    assert "holdfast_training_completed_step 412.0" in text
    assert 'holdfast_checkpoint_step{tier="shared"} 400.0' in text
    assert sidecar.get("/")[0] == 404
    assert sidecar.get("/healthz", "POST")[0] == 501


def test_an_absent_metadata_service_is_one_line_for_each_cloud(sidecar, operator, metadata, wait):
    sidecar.environment["HOLDFAST_NOTICE_PROVIDERS"] = "AWS,GCP,Azure"
    metadata.server.stop()
    sidecar.start()
    for cloud in CLOUDS:
        wait(lambda cloud=cloud: sidecar.says(f"{cloud}: no such service here"), f"the line about {cloud}")
    again = [re.compile(rf'poll_errors_total{{source="{cloud}"}} ([2-9]|\d\d)') for cloud in CLOUDS]
    wait(lambda: all(line.search(sidecar.get("/metrics")[1]) for line in again), "a second poll of each")
    assert [sidecar.says(f"{cloud}: no such service here") for cloud in CLOUDS] == [1, 1, 1]
    assert sidecar.get("/healthz")[0] == 200


@pytest.mark.parametrize("cloud", CLOUDS)
def test_all_sources_run_on_each_cloud(sidecar, operator, metadata, cloud, wait):
    """The other clouds' paths are answered as this cloud answers what it does not know."""
    metadata.server.stop()
    served = MetadataServer(Instance(lambda: metadata.said[cloud]))
    with served:
        sidecar.environment |= {
            "HOLDFAST_NOTICE_PROVIDERS": "AWS,GCP,Azure",
            "HOLDFAST_METADATA_URL": served.url,
        }
        sidecar.start()
        wait(lambda: sidecar.says(f"{cloud}: the source of notices answers"), "the source")
        metadata.announce(cloud)
        report = wait(lambda: next((r for r in operator.reports if r["notices"]), None), "the report")
        (told,) = report["notices"]
        assert (told["source"], told["action"] in {"terminate", "preempt"}) == (cloud, True)
        request = json.loads((sidecar.run_dir / "emergency_checkpoint").read_text())
        assert (request["id"], request["drain"]) == (told["id"], True)
        for other in set(CLOUDS) - {cloud}:
            wait(lambda other=other: sidecar.says(f"{other}: no such service here") == 1, f"the line about {other}")
        assert sidecar.terminate() == 0


def test_waiting_source_delays_no_other(sidecar, operator, metadata, run_dir, wait):
    """SIGTERM is not delayed either."""
    held = threading.Event()

    def answer(request: Any) -> Any:
        held.set()
        metadata.server.closing.wait()

    metadata.gcp.answer = answer
    sidecar.environment["HOLDFAST_NOTICE_PROVIDERS"] = "GCP,AWS"
    sidecar.start()
    wait(held.is_set, "GCP's request")
    metadata.interrupt()
    wait((run_dir / "emergency_checkpoint").exists, "AWS's notice")
    assert sidecar.terminate() == 0


def test_other_failures_do_not_hide_a_preemption(sidecar, operator, metadata, run_dir, wait):
    """They are counted."""
    whole = metadata.gcp.answer

    def answer(request: Any) -> Any:
        busy = request.path.endswith("maintenance-event")
        return Answer(status=503, headers={"Metadata-Flavor": "Google"}) if busy else whole(request)

    metadata.gcp.answer = answer
    sidecar.environment["HOLDFAST_NOTICE_PROVIDERS"] = "GCP"
    sidecar.start()
    wait(lambda: 'poll_errors_total{source="GCP"}' in sidecar.get("/metrics")[1], "the fault to be counted")
    metadata.announce(GCP)
    wait((run_dir / "emergency_checkpoint").exists, "the preemption")
    assert sidecar.says("maintenance-event for now") == 1


def test_azure_is_approved_after_the_acknowledgement(sidecar, operator, metadata, run_dir, wait):
    sidecar.environment["HOLDFAST_NOTICE_PROVIDERS"] = "Azure"
    event = metadata.announce("Azure", seconds=300)
    sidecar.start()
    wait((run_dir / "emergency_checkpoint").exists, "the touch-file")
    request = json.loads((run_dir / "emergency_checkpoint").read_text())
    (run_dir / "emergency_checkpoint").rename(run_dir / "taken")
    polled = len(metadata.server.seen)
    wait(lambda: len(metadata.server.seen) > polled + 1, "two more polls")
    assert metadata.azure.approved == []
    beside = run_dir / "ack.new"
    beside.write_text(json.dumps({"version": 1, "id": request["id"], "step": 7, "result": "Committed"}))
    beside.rename(run_dir / "emergency_checkpoint.ack")
    wait(lambda: metadata.azure.approved == [event.id], "the approval")


def test_without_its_settings_it_says_what_is_missing(sidecar, tmp_path: Path):
    del sidecar.environment["HOLDFAST_OPERATOR_URL"]
    assert sidecar.run() == 78
    assert sidecar.says("HOLDFAST_OPERATOR_URL is not set") == 1


def test_an_operator_without_tls_is_refused(sidecar):
    sidecar.environment["HOLDFAST_OPERATOR_URL"] = "http://127.0.0.1:1"
    assert sidecar.run() == 78
    assert sidecar.says("must be an https:// address") == 1


def test_a_port_that_is_taken_is_named(sidecar, operator):
    sidecar.environment["HOLDFAST_SIDECAR_PORT"] = str(operator.port)
    assert sidecar.run() == 70
    assert sidecar.says(f"cannot listen on port {operator.port}: Address already in use") == 1


def test_it_stays_within_its_memory(sidecar, operator, metadata, run_dir, wait):
    """All on: both connections to the operator open, notices polled, metrics scraped, memberships coming."""
    operator.membership(1)
    metadata.interrupt()
    sidecar.start()
    for revision in range(2, 12):
        sidecar.write_status(committedStep=revision)
        data = operator.membership(revision)
        wait(lambda data=data: _content(run_dir) == data, "the membership")
        assert sidecar.get("/metrics")[0] == 200
    wait(lambda: operator.latest().get("notices"), "the notice")
    rollup = Path(f"/proc/{sidecar.process.pid}/smaps_rollup").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    assert kib["Rss"] <= 60 * 1024, f"resident set of {kib['Rss']} KiB"
    assert kib["Pss"] <= 60 * 1024


def _content(run_dir: Path) -> bytes:
    path = run_dir / "membership.json"
    return path.read_bytes() if path.exists() else b""


def test_its_log_is_json_with_the_pod_in_each_line(sidecar, wait):
    sidecar.start()
    lines = [line for line in sidecar.lines() if line["logger"].startswith("holdfast_sidecar")]
    assert lines
    assert all(line["pod"] == "gpt-w0" for line in lines), json.dumps(lines)
