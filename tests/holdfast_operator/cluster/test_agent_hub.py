"""The hub that agents report to: what it keeps, what wakes a reconciliation, what it serves."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity, parse_body
from holdfast_operator.errors import AgentRequestError

GOLDEN = json.loads((Path(__file__).parents[2] / "contract" / "report.json").read_text())
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
POD = PodIdentity(namespace="ml", pod="gpt-w0", pod_uid="uid-w0")


def report(
    number: int = 1,
    start_id: str = "a",
    launcher: dict[str, Any] | None = None,
    silent: float | None = 0.1,
    gpu: list[Any] | None = None,
) -> bytes:
    """A report of pod uid-w0 with these differences from the golden one."""
    body = json.loads(json.dumps(GOLDEN))
    body["sidecar"] = {"startId": start_id, "number": number}
    body["launcher"].update(launcher or {})
    body["launcherSilentSeconds"] = silent
    body["gpu"] = GOLDEN["gpu"] if gpu is None else gpu
    return json.dumps(body).encode()


@pytest.fixture
def woken() -> list[str]:
    return []


@pytest.fixture
def repeated() -> list[None]:
    return []


@pytest.fixture
def hub(woken: list[str], repeated: list[None]) -> AgentHub:
    hub = AgentHub(lambda _token: POD, woken.append, clock=lambda: NOON, on_repeat=lambda: repeated.append(None))
    hub.bind("uid-w0", "job-1")
    return hub


def kept(hub: AgentHub) -> tuple[str, int]:
    latest = hub.latest("uid-w0")
    assert latest is not None
    return latest.start_id, latest.number


def test_a_report_is_kept_with_its_time_and_wakes_its_job(hub: AgentHub, woken: list[str]) -> None:
    hub.record(POD, report(number=17))
    latest = hub.latest("uid-w0")
    assert latest is not None
    assert (latest.start_id, latest.number, latest.content.received_at) == ("a", 17, NOON)
    assert latest.content.committed_step == 412
    assert woken == ["job-1"]


def test_a_repeated_report_changes_nothing_and_is_counted(
    hub: AgentHub, woken: list[str], repeated: list[None]
) -> None:
    hub.record(POD, report(number=2))
    hub.record(POD, report(number=2, launcher={"phase": "Failed"}))
    hub.record(POD, report(number=1, launcher={"phase": "Failed"}))
    latest = hub.latest("uid-w0")
    assert latest is not None
    assert latest.content.phase == "Running"
    assert woken == ["job-1"]
    assert len(repeated) == 2


def test_late_report_of_the_previous_sidecar_is_ignored(hub: AgentHub, repeated: list[None]) -> None:
    """A restarted sidecar counts its reports from the start."""
    hub.record(POD, report(number=9, start_id="a"))
    hub.record(POD, report(number=1, start_id="b"))
    assert kept(hub) == ("b", 1)
    hub.record(POD, report(number=10, start_id="a"))
    assert kept(hub) == ("b", 1)
    assert len(repeated) == 1


def test_progress_alone_is_kept_but_wakes_nobody(hub: AgentHub, woken: list[str]) -> None:
    hub.record(POD, report(number=1))
    hub.record(POD, report(number=2, launcher={"committedStep": 413, "loss": 2.0, "ranks": [], "accounting": {}}))
    latest = hub.latest("uid-w0")
    assert latest is not None
    assert latest.content.committed_step == 413
    assert woken == ["job-1"]


@pytest.mark.parametrize(
    "change",
    [
        {"launcher": {"phase": "Failed"}},
        {"launcher": {"started": {"generation": 3, "attempt": 1}}},
        {"launcher": {"incidents": []}},
        {"silent": 60.0},
        {"start_id": "b"},
        {"gpu": []},
    ],
)
def test_what_a_decision_may_depend_on_wakes_the_job(hub: AgentHub, woken: list[str], change: dict[str, Any]) -> None:
    hub.record(POD, report(number=1))
    hub.record(POD, report(number=2, **change))
    assert woken == ["job-1", "job-1"]


def refused(call: Callable[[], object]) -> AgentRequestError:
    with pytest.raises(AgentRequestError) as caught:
        call()
    return caught.value


def test_a_report_for_another_pod_is_refused(hub: AgentHub, woken: list[str]) -> None:
    other = PodIdentity(namespace="ml", pod="x", pod_uid="uid-x")
    hub.bind("uid-x", "job-1")
    assert refused(lambda: hub.record(other, report())).status == 403
    assert hub.latest("uid-w0") is None
    assert woken == []


def test_a_pod_of_no_job_is_refused(hub: AgentHub) -> None:
    hub.forget_pod("uid-w0")
    assert refused(lambda: hub.record(POD, report())).status == 404


def test_a_forgotten_job_leaves_nothing_behind(hub: AgentHub) -> None:
    hub.record(POD, report())
    hub.publish("job-1", {"revision": 3})
    hub.forget_job("job-1")
    assert (hub.latest("uid-w0"), hub.job_of("uid-w0"), hub.publication("job-1")) == (None, None, None)


def test_binding_again_keeps_the_report_and_another_job_drops_it(hub: AgentHub) -> None:
    hub.record(POD, report())
    hub.bind("uid-w0", "job-1")
    assert hub.latest("uid-w0") is not None
    hub.bind("uid-w0", "job-2")
    assert hub.latest("uid-w0") is None


def test_the_answer_names_the_published_revision(hub: AgentHub) -> None:
    assert hub.record(POD, report(number=1)) == 0
    hub.publish("job-1", {"revision": 7})
    assert hub.record(POD, report(number=2)) == 7


def test_a_published_revision_never_falls(hub: AgentHub) -> None:
    assert hub.publish("job-1", {"revision": 7})
    assert not hub.publish("job-1", {"revision": 6})
    publication = hub.publication("job-1")
    assert publication is not None
    assert publication.revision == 7


def test_only_a_rising_revision_wakes_polls(hub: AgentHub) -> None:
    heard: list[str] = []
    hub.listen(heard.append)
    for revision in (1, 1, 2, 1):
        hub.publish("job-1", {"revision": revision})
    assert heard == ["job-1", "job-1"]


POINTS_AT_SIDECAR = b'{"version": 1, "sidecar": {"startId": "a", "number": 1}'
POINTS_AT_POD = POINTS_AT_SIDECAR + b', "pod": {"uid": "u"}'


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"version": 2}', "version 2 is not known"),
        (b'{"version": "1"}', "version str is not known"),
        (b'{"version": 1}', "sidecar.startId"),
        (b'{"version": 1, "sidecar": {"startId": "a", "number": true}}', "sidecar.number"),
        (b'{"version": 1, "sidecar": {"startId": "' + b"a" * 500_000 + b'", "number": 1}}', "longer than 128"),
        (POINTS_AT_SIDECAR + b', "pod": []}', "pod.uid"),
        (POINTS_AT_POD + b', "launcher": 5}', "neither null nor an object"),
        (POINTS_AT_POD + b', "launcher": {"version": 3}}', "launcher.version is not 1"),
        (POINTS_AT_POD + b', "launcher": {"version": 1, "podUID": "v"}}', "another pod's"),
    ],
)
def test_a_bad_report_is_refused_with_what_is_wrong(raw: bytes, says: str) -> None:
    error = refused(lambda: parse_body(raw))
    assert error.status == 400
    assert says in str(error)


def test_a_loss_that_is_not_a_number_becomes_null() -> None:
    raw = report(launcher={"loss": float("nan")})
    assert b"NaN" in raw
    assert parse_body(raw)["launcher"]["loss"] is None


def test_incomplete_character_is_replaced() -> None:
    """The API server would keep another letter than was written, and each pass would write it anew."""
    raw = report(launcher={"message": "half a smile: \ud83d", "phase": "\U0001f600 and \u2026"})
    launcher = parse_body(raw)["launcher"]
    assert launcher["message"] == "half a smile: ?"
    assert launcher["phase"] == "\U0001f600 and \u2026"


def test_unknown_fields_are_harmless_and_wake_nobody(hub: AgentHub, woken: list[str]) -> None:
    hub.record(POD, report(number=1))
    hub.record(POD, report(number=2, launcher={"fromTheFuture": {"x": 1}}))
    assert kept(hub) == ("a", 2)
    assert woken == ["job-1"]


@pytest.mark.parametrize("filler", ["{},", "[],", '"",', '{"podUID":"x"},'])
@pytest.mark.parametrize("field", ["unknown", "lostMembers", "incidents", "ranks", "notices"])
def test_whatever_a_report_is_filled_with_little_of_it_is_kept(hub: AgentHub, field: str, filler: str) -> None:
    raw = report()
    full = filler * ((256 * 1024 - len(raw)) // len(filler))
    stuffed = raw.replace(b'"launcher": {', f'"launcher": {{"{field}": [{full[:-1]}], '.encode(), 1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        hub.record(POD, stuffed)
        assert tracemalloc.get_traced_memory()[0] - before < 256 * 1024
    finally:
        tracemalloc.stop()


def test_what_of_a_report_is_too_much_to_be_heard_is_counted() -> None:
    unheard: list[int] = []
    hub = AgentHub(lambda _: POD, lambda _: None, on_unheard=unheard.append)
    hub.bind(POD.pod_uid, "job-1")
    hub.record(POD, report(number=1))
    attempt_ids = [{"generation": 1, "attempt": number} for number in range(100)]
    hub.record(POD, report(number=2, launcher={"incidents": attempt_ids, "foreignClaims": attempt_ids}))
    assert unheard == [0, 68 + 36]


# What checks come to is counted


def checked(number: int, **results: str) -> bytes:
    body = json.loads(report(number))
    body["preflight"] = {"checks": [{"name": n, "result": r, "message": ""} for n, r in results.items()]}
    return json.dumps(body).encode()


def test_each_check_of_a_pod_is_counted_when_it_passes_or_fails() -> None:
    counted: list[tuple[str, str]] = []
    hub = AgentHub(lambda _: POD, lambda _: None, on_check=lambda *found: counted.append(found))
    hub.bind(POD.pod_uid, "job-1")
    for number, result in enumerate(("Running", "Failed", "Failed", "Passed", "Passed"), start=1):
        hub.record(POD, checked(number, ObjectStore=result, GPU="Skipped", Moon="Failed"))
    hub.record(POD, checked(1, ObjectStore="Failed"))  # a repetition
    assert counted == [("ObjectStore", "Failed"), ("ObjectStore", "Passed")]


def test_earlier_checks_are_not_counted_again() -> None:
    """A restarted operator does not count checks that passed before."""
    counted: list[tuple[str, str]] = []
    hub = AgentHub(lambda _: POD, lambda _: None, on_check=lambda *found: counted.append(found))
    hub.bind(POD.pod_uid, "job-1")
    hub.record(POD, checked(7, Clock="Passed", Storage="Failed"))
    assert counted == [("Storage", "Failed")]


# Peers


def asking(uid: str, number: int = 1, *, network: str = "Running", **launcher: Any) -> bytes:
    body = json.loads(report(number=number))
    body["pod"] = {**body["pod"], "uid": uid, "name": f"pod-{uid}"}
    body["launcher"] = {**body["launcher"], "podUID": uid, "exit": None, **launcher}
    body["preflight"] = {"checks": [{"name": "Network", "result": network, "message": ""}]}
    return json.dumps(body).encode()


def identity(uid: str) -> PodIdentity:
    return PodIdentity(namespace="ml", pod=f"pod-{uid}", pod_uid=uid)


@pytest.fixture
def three(hub: AgentHub) -> AgentHub:
    for number, uid in enumerate(("a", "b", "c")):
        hub.bind(uid, "job-1", f"10.0.0.{number}")
        hub.record(identity(uid), asking(uid))
    hub.bind("d", "job-2", "10.0.0.9")
    hub.record(identity("d"), asking("d"))
    return hub


def names(hub: AgentHub, uid: str) -> list[str] | None:
    peers = hub.peers_of(uid)
    return None if peers is None else [peer["podUID"] for peer in peers]


def test_a_pod_is_told_of_the_ready_launchers_of_its_job(three: AgentHub) -> None:
    assert names(three, "a") == ["b", "c"]
    assert three.peers_of("d") == []
    peers = three.peers_of("a")
    assert peers is not None
    assert peers[0] == {"pod": "pod-b", "podUID": "b", "ip": "10.0.0.1", "port": 29401}


@pytest.mark.parametrize("launcher", [{"ready": False}, {"exit": {"code": 0}}])
def test_who_does_not_listen_is_no_peer(three: AgentHub, launcher: Any) -> None:
    three.record(identity("b"), asking("b", 2, **launcher))
    assert names(three, "a") == ["c"]


def test_who_ended_or_is_unknown_is_no_peer(three: AgentHub) -> None:
    three.bind("b", "job-1", "")
    three.forget_pod("c")
    assert names(three, "a") == []
    assert names(three, "x") is None


def test_of_very_many_each_asks_for_those_that_follow_it(hub: AgentHub) -> None:
    uids = [f"{number:03}" for number in range(300)]
    for uid in uids:
        hub.bind(uid, "job-1", "10.0.0.1")
        hub.record(identity(uid), asking(uid))
    asked = {uid: names(hub, uid) or [] for uid in ("000", "150", "299")}
    assert {len(found) for found in asked.values()} == {256}
    assert asked["150"][:2] == ["151", "152"]
    assert asked["299"][0] == "000"


def test_only_a_pod_that_asks_is_told(three: AgentHub) -> None:
    three.record(identity("a"), asking("a", 2, network="Passed"))
    assert names(three, "a") is None
    three.record(identity("a"), asking("a", 3, network="Failed"))
    assert names(three, "a") == ["b", "c"]
