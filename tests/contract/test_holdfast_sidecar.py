"""The sidecar's side of the golden files: what it reads is understood, what it writes is theirs."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast_sidecar.errors import MalformedError, UnknownVersionError
from holdfast_sidecar.preflight.checks import Inputs, judge
from holdfast_sidecar.protocol.document import format_time, parse_document, parse_time
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.membership import membership_revision
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.protocol.preflight import Preflight
from holdfast_sidecar.protocol.report import Pod, Report
from holdfast_sidecar.settings import PreflightSettings

GOLDEN = Path(__file__).parent


def read(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def golden_notice() -> Notice:
    return Notice.from_report(read("report.json")["notices"][0])


def test_the_golden_report_is_what_the_sidecar_emits():
    golden = read("report.json")
    report = Report(
        start_id=golden["sidecar"]["startId"],
        number=golden["sidecar"]["number"],
        pod=Pod(**golden["pod"]),
        launcher=parse_document((GOLDEN / "status.json").read_bytes(), "status.json"),
        launcher_silent_seconds=golden["launcherSilentSeconds"],
        notices=[golden_notice()],
        gpu=[GpuError.from_report(entry) for entry in golden["gpu"]],
        preflight=Preflight.from_report(golden["preflight"]),
    )
    assert json.loads(report.encode()) == golden


def test_the_launchers_golden_preflight_is_understood():
    told = parse_document((GOLDEN / "preflight.json").read_bytes(), "preflight.json")
    asked = PreflightSettings(checks=("Storage", "ObjectStore"), seconds=60.0, gpus=0, skew_seconds=5.0)
    found = judge(asked, Inputs(elapsed=1.0, launcher=True, told=told))
    assert found.as_report()["checks"] == read("preflight.json")["checks"]


def test_the_golden_touch_file_is_what_a_notice_writes():
    assert golden_notice().as_request() == read("emergency_checkpoint.json")


def test_the_golden_membership_is_accepted():
    assert membership_revision((GOLDEN / "membership.json").read_bytes()) == 7


def test_times_survive_a_round_trip():
    text = "2026-01-31T12:00:00.000001Z"
    assert format_time(parse_time(text)) == text
    assert format_time(parse_time("2026-01-31T13:00:00+01:00")) == "2026-01-31T12:00:00.000000Z"


@pytest.mark.parametrize("text", ["", "soon", "2026-01-31T12:00:00", "2026-13-31T12:00:00Z"])
def test_what_is_no_time_in_a_zone_is_refused(text: str):
    with pytest.raises(MalformedError):
        parse_time(text)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_an_unknown_version_is_refused_by_name(version: object):
    with pytest.raises(UnknownVersionError, match=r"membership has version .*understands 1"):
        membership_revision(json.dumps({**read("membership.json"), "version": version}).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"version": 1}', b'{"version": 1, "revision": -1}'],
)
def test_what_is_no_membership_is_refused(data: bytes):
    with pytest.raises((MalformedError, UnknownVersionError)):
        membership_revision(data)


def test_unknown_fields_are_ignored_and_non_numbers_become_null():
    status = parse_document(b'{"version": 1, "later": {"x": 1}, "loss": NaN, "throughput": 1e999}', "status.json")
    assert status == {"version": 1, "later": {"x": 1}, "loss": None, "throughput": None}
