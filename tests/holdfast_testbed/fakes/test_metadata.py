"""The metadata services answer as AWS, GCP and Azure document theirs, and can be spoiled."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.errors import NoSuchEventError
from holdfast_testbed.fakes.metadata import (
    AWS,
    AZURE,
    CLOUDS,
    GCP,
    KINDS,
    AllClouds,
    Announcement,
    Answer,
    AzureMetadata,
    ComputeMetadata,
    Imds,
    Instance,
    MetadataServer,
    Request,
    Service,
)
from holdfast_testbed.fakes.metadata.aws import MAX_TTL_SECONDS, TOKEN_HEADER, TOKEN_PATH, TTL_HEADER
from holdfast_testbed.waiting import wait_for

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
MACHINE = "i-0123456789abcdef0"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
MAINTENANCE = "/latest/meta-data/events/maintenance/scheduled"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_EVENT = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"


class World:
    """The services of one machine, with a clock and announcements that the test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.said = {cloud: Announcement(instance_id=MACHINE, cloud=cloud) for cloud in CLOUDS}
        self.aws = Imds(announced=lambda: self.said[AWS], clock=lambda: self.seconds)
        self.gcp = ComputeMetadata(announced=lambda: self.said[GCP])
        self.azure = AzureMetadata(announced=lambda: self.said[AZURE], now=self.now)

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def announce(self, cloud: str, kind: str, **more: Any) -> str:
        more = {"seconds": 120, **more}
        self.said[cloud] = self.said[cloud].announce(kind, now=self.now(), **more)
        return self.said[cloud].events[-1].id

    def token(self, ttl: str = "60") -> str:
        answer = self.aws.answer(Request(method="PUT", path=TOKEN_PATH, headers={TTL_HEADER.lower(): ttl}))
        assert answer.status == 200
        return answer.body

    def get(self, path: str) -> tuple[int, str]:
        """As one who knows how each cloud wants to be asked."""
        headers = {TOKEN_HEADER.lower(): self.token(), "metadata-flavor": "Google", "metadata": "true"}
        version = {EVENTS: "2020-07-01", NAME: "2021-02-01"}.get(path, "")
        query = {"api-version": version, "format": "text"}
        service = AllClouds(self.aws, self.gcp, self.azure)
        answer = service.answer(Request(method="GET", path=path, query=query, headers=headers))
        return answer.status, answer.body


@pytest.fixture
def world() -> World:
    return World()


# AWS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", ["1", "60", str(MAX_TTL_SECONDS)])
def test_a_token_is_given_and_its_life_is_told(world: World, ttl: str) -> None:
    answer = world.aws.answer(Request(method="PUT", path=TOKEN_PATH, headers={TTL_HEADER.lower(): ttl}))
    assert answer.status == 200
    assert len(answer.body) > 40
    assert answer.headers[TTL_HEADER] == ttl


@pytest.mark.parametrize("ttl", ["", "0", "-1", str(MAX_TTL_SECONDS + 1), "ten", "1.5", "٣", None])
def test_a_bad_life_is_refused(world: World, ttl: str | None) -> None:
    headers = {} if ttl is None else {TTL_HEADER.lower(): ttl}
    assert world.aws.answer(Request(method="PUT", path=TOKEN_PATH, headers=headers)).status == 400


def test_a_forwarded_request_gets_no_token(world: World) -> None:
    headers = {TTL_HEADER.lower(): "60", "x-forwarded-for": "203.0.113.1"}
    assert world.aws.answer(Request(method="PUT", path=TOKEN_PATH, headers=headers)).status == 403


@pytest.mark.parametrize("headers", [{}, {TOKEN_HEADER.lower(): "made-up"}])
def test_without_a_token_there_is_nothing_to_see(world: World, headers: dict[str, str]) -> None:
    assert world.aws.answer(Request(method="GET", path=ACTION, headers=headers)).status == 401


def test_tokens_are_invalid_after_the_instance_was_stopped(world: World) -> None:
    request = Request(method="GET", path=ACTION, headers={TOKEN_HEADER.lower(): world.token()})
    assert world.aws.answer(request).status == 404
    world.said[AWS] = replace(world.said[AWS], tokens=1)
    assert world.aws.answer(request).status == 401
    assert world.get(ACTION)[0] == 404


def test_a_token_is_good_until_its_life_is_over(world: World) -> None:
    request = Request(
        method="GET", path="/latest/meta-data/instance-id", headers={TOKEN_HEADER.lower(): world.token("60")}
    )
    world.seconds = 59.9
    assert world.aws.answer(request).status == 200
    world.seconds = 60.0
    assert world.aws.answer(request).status == 401


def test_aws_has_nothing_to_announce_at_first(world: World) -> None:
    assert (world.get(ACTION)[0], world.get(REBALANCE)[0]) == (404, 404)
    assert world.get(MAINTENANCE) == (200, "[]")
    assert world.get("/latest/meta-data/instance-id") == (200, MACHINE)


def test_an_interruption_tells_action_and_time(world: World) -> None:
    world.announce(AWS, "terminate")
    status, body = world.get(ACTION)
    assert status == 200
    assert json.loads(body) == {"action": "terminate", "time": "2026-01-31T12:02:00Z"}
    assert world.get("/latest/meta-data/spot/termination-time") == (200, "2026-01-31T12:02:00Z")
    assert json.loads(world.get(REBALANCE)[1]) == {"noticeTime": "2026-01-31T12:00:00Z"}


def test_a_rebalance_recommendation_is_no_interruption(world: World) -> None:
    world.announce(AWS, "rebalance")
    assert world.get(ACTION)[0] == 404
    assert json.loads(world.get(REBALANCE)[1]) == {"noticeTime": "2026-01-31T12:00:00Z"}


def test_maintenance_is_listed_with_its_window(world: World) -> None:
    event = world.announce(AWS, "system-reboot", seconds=3600)
    (told,) = json.loads(world.get(MAINTENANCE)[1])
    assert told["EventId"] == f"instance-event-{event.lower()}"
    assert (told["Code"], told["State"]) == ("system-reboot", "active")
    assert (told["NotBefore"], told["NotAfter"]) == ("31 Jan 2026 13:00:00 GMT", "31 Jan 2026 13:17:00 GMT")


# GCP -------------------------------------------------------------------------------------------------------------


def gcp(world: World, path: str, **query: str) -> Answer:
    headers = {"metadata-flavor": "Google"}
    return world.gcp.answer(Request(method="GET", path=path, query=query, headers=headers))


@pytest.mark.parametrize(
    "headers", [{}, {"metadata-flavor": "Other"}, {"metadata-flavor": "Google", "x-forwarded-for": "203.0.113.1"}]
)
def test_gcp_answers_only_who_means_it(world: World, headers: dict[str, str]) -> None:
    assert world.gcp.answer(Request(method="GET", path=PREEMPTED, headers=headers)).status == 403


def test_gcp_says_who_it_is_and_gives_each_value_its_etag(world: World) -> None:
    answer = gcp(world, PREEMPTED)
    assert (answer.status, answer.body, answer.content_type) == (200, "FALSE", "application/text")
    assert answer.headers["Metadata-Flavor"] == "Google"
    world.announce(GCP, "preempted")
    taken = gcp(world, PREEMPTED)
    assert taken.body == "TRUE"
    assert taken.headers["ETag"] != answer.headers["ETag"]
    world.said[GCP] = world.said[GCP].withdraw()
    assert gcp(world, PREEMPTED).headers["ETag"] == answer.headers["ETag"]


@pytest.mark.parametrize("kind", ["TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"])
def test_host_maintenance_is_told(world: World, kind: str) -> None:
    assert gcp(world, MAINTENANCE_EVENT).body == "NONE"
    world.announce(GCP, kind)
    assert gcp(world, MAINTENANCE_EVENT).body == kind


def test_gcps_tree_has_listings_and_ends(world: World) -> None:
    assert gcp(world, "/computeMetadata/v1/instance").status == 301
    listing = gcp(world, "/computeMetadata/v1/instance/")
    assert "preempted\n" in listing.body
    assert "scheduling/\n" in listing.body
    assert gcp(world, f"{PREEMPTED}/").status == 404
    assert gcp(world, "/computeMetadata/v1/instance/moon").status == 404
    assert gcp(world, "/computeMetadata/v1/instance/", wait_for_change="true").status == 400


def test_another_etag_than_the_values_is_answered_at_once(world: World) -> None:
    assert gcp(world, PREEMPTED, wait_for_change="true", last_etag="0", timeout_sec="60").body == "FALSE"


def test_a_wait_for_a_change_ends_with_its_time(world: World) -> None:
    etag = gcp(world, PREEMPTED).headers["ETag"]
    answer = gcp(world, PREEMPTED, wait_for_change="true", last_etag=etag, timeout_sec="1")
    assert (answer.status, answer.body) == (200, "FALSE")


@pytest.mark.parametrize("known", [True, False], ids=["with its etag", "without one"])
def test_a_change_ends_the_wait(world: World, known: bool) -> None:
    query = {"wait_for_change": "true", "timeout_sec": "60"}
    query |= {"last_etag": gcp(world, PREEMPTED).headers["ETag"]} if known else {}
    announcing = threading.Timer(0.1, lambda: world.announce(GCP, "preempted"))
    announcing.start()
    assert gcp(world, PREEMPTED, **query).body == "TRUE"
    announcing.join()


# Azure -----------------------------------------------------------------------------------------------------------


def azure(world: World, method: str = "GET", body: bytes = b"") -> Answer:
    query, headers = {"api-version": "2020-07-01"}, {"metadata": "true"}
    return world.azure.answer(Request(method=method, path=EVENTS, query=query, headers=headers, body=body))


def document(world: World) -> dict[str, Any]:
    answer = azure(world)
    assert answer.status == 200
    found: dict[str, Any] = json.loads(answer.body)
    return found


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ({}, "2020-07-01"),
        ({"metadata": "false"}, "2020-07-01"),
        ({"metadata": "true", "x-forwarded-for": "203.0.113.1"}, "2020-07-01"),
        ({"metadata": "true"}, ""),
        ({"metadata": "true"}, "1999-01-01"),
    ],
)
def test_azure_wants_its_header_and_a_version(world: World, headers: dict[str, str], version: str) -> None:
    request = Request(method="GET", path=EVENTS, query={"api-version": version}, headers=headers)
    assert world.azure.answer(request).status == 400


def test_azure_tells_the_machines_name(world: World) -> None:
    assert world.get(NAME) == (200, MACHINE)
    assert world.get("/metadata/instance/compute/moon")[0] == 404


def test_an_event_is_listed_until_withdrawn_and_changes_count(world: World) -> None:
    first = document(world)
    assert first["Events"] == []
    event = world.announce(AZURE, "Preempt", seconds=30)
    second = document(world)
    assert second["Events"] == [
        {
            "EventId": event,
            "EventStatus": "Scheduled",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [MACHINE],
            "NotBefore": "Sat, 31 Jan 2026 12:00:30 GMT",
            "Description": "Virtual machine is being evicted.",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
    ]
    world.said[AZURE] = world.said[AZURE].withdraw()
    third = document(world)
    assert third["Events"] == []
    assert first["DocumentIncarnation"] < second["DocumentIncarnation"] < third["DocumentIncarnation"]
    assert document(world)["DocumentIncarnation"] == third["DocumentIncarnation"]


def test_an_event_starts_when_its_time_has_come(world: World) -> None:
    world.announce(AZURE, "Reboot", seconds=30)
    world.seconds = 30
    (event,) = document(world)["Events"]
    assert (event["EventStatus"], event["NotBefore"]) == ("Started", "")


def test_an_approved_event_starts(world: World) -> None:
    event = world.announce(AZURE, "Preempt")
    approval = json.dumps({"StartRequests": [{"EventId": event}]}).encode()
    assert [azure(world, "POST", approval).status for _ in range(2)] == [200, 200]
    assert world.azure.approved == [event]
    assert document(world)["Events"][0]["EventStatus"] == "Started"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"StartRequests": [{}]}', b'{"StartRequests": [{"EventId": "x"}]}']
)
def test_an_approval_of_another_form_is_refused(world: World, body: bytes) -> None:
    world.announce(AZURE, "Preempt")
    assert azure(world, "POST", body).status == 400
    assert world.azure.approved == []


# Announcements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", CLOUDS)
def test_an_announcement_survives_the_file(tmp_path: Path, cloud: str) -> None:
    said = Announcement(instance_id=MACHINE, cloud=cloud)
    for kind in KINDS[cloud]:
        said = said.announce(kind, now=NOW, seconds=30, resources=("one", "other"), duration=7)
    said.write(tmp_path / "announcement.json")
    assert Announcement.read(tmp_path / "announcement.json") == said


def test_what_a_cloud_does_not_say_is_refused_with_what_it_says() -> None:
    with pytest.raises(NoSuchEventError, match="GCP has no event 'Preempt': expected one of preempted, TERMINATE"):
        Announcement(instance_id=MACHINE, cloud=GCP).announce("Preempt", now=NOW, seconds=30)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_machine_has_the_service_of_its_own_cloud_alone(world: World, cloud: str) -> None:
    service = Instance(lambda: world.said[cloud])
    headers = {"metadata-flavor": "Google", "metadata": "true"}
    first = {AWS: TOKEN_PATH, GCP: PREEMPTED, AZURE: EVENTS}

    def ask(path: str) -> int:
        method = "PUT" if path == TOKEN_PATH else "GET"
        named = {**headers, TTL_HEADER.lower(): "60"}
        query = {"api-version": "2020-07-01"}
        return service.answer(Request(method=method, path=path, query=query, headers=named)).status

    assert [other for other in CLOUDS if ask(first[other]) == 200] == [cloud]


# Over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(world: World) -> Iterator[MetadataServer]:
    with MetadataServer(AllClouds(world.aws, world.gcp, world.azure), now=world.now) as running:
        yield running


def ask(server: MetadataServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.url + path, method=method, headers=named)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 — loopback
            return answer.status, answer.read().decode(), answer.headers["Date"]
    except urllib.error.HTTPError as error:
        return error.code, "", error.headers["Date"]


def test_over_http(world: World, server: MetadataServer) -> None:
    status, token, date = ask(server, TOKEN_PATH, "PUT", **{TTL_HEADER: "60"})
    assert (status, date) == (200, "Sat, 31 Jan 2026 12:00:00 GMT")
    assert ask(server, ACTION, **{TOKEN_HEADER: token})[0] == 404
    world.announce(AWS, "terminate")
    assert ask(server, ACTION, **{TOKEN_HEADER: token})[0] == 200
    assert ask(server, ACTION)[0] == 401
    assert ask(server, ACTION, "PUT")[0] == 405
    assert ask(server, f"{PREEMPTED}?wait_for_change=true&last_etag=0", Metadata_Flavor="Google")[1] == "FALSE"
    assert ask(server, f"{EVENTS}?api-version=2020-07-01", Metadata="true")[0] == 200


def test_a_stopped_server_comes_back_at_its_port(server: MetadataServer) -> None:
    server.stop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))
    with pytest.raises(urllib.error.URLError):
        ask(server, ACTION)
    server.start()
    assert ask(server, ACTION)[0] == 401


def test_a_fault_also_spoils_an_answer_that_was_held_back(world: World) -> None:
    faults: list[str] = []
    with (
        MetadataServer(world.gcp, told=lambda: "".join(faults[-1:])) as server,
        ThreadPoolExecutor() as pool,
    ):
        etag = gcp(world, PREEMPTED).headers["ETag"]
        held = pool.submit(
            ask, server, f"{PREEMPTED}?wait_for_change=true&last_etag={etag}", Metadata_Flavor="Google"
        )
        wait_for(lambda: bool(server.seen), what="the request", seconds=60)
        faults.append("503")
        world.announce(GCP, "preempted")
        assert held.result()[0] == 503


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_cloud_refuses_in_its_own_form(world: World, cloud: str) -> None:
    request = Request(method="GET", path=ACTION)
    service: Service = {AWS: world.aws, GCP: world.gcp, AZURE: world.azure}[cloud]
    refused = service.refusal(request, 429)
    assert refused.status == 429
    assert ("Google" in refused.headers.values()) == (cloud == GCP)
    assert refused.content_type.startswith("application/json" if cloud == AZURE else "text/html")


def test_a_redirect_leads_to_what_was_asked_for(world: World, server: MetadataServer) -> None:
    world.announce(GCP, "preempted")
    server.fault = "redirect"
    assert ask(server, PREEMPTED, Metadata_Flavor="Google")[1] == "TRUE", "urllib follows it"
    assert [request.path for request in server.seen] == [PREEMPTED, f"/elsewhere{PREEMPTED}"]


def test_a_hanging_service_lets_go_when_the_fault_is_over(world: World) -> None:
    faults, told = ["hang"], list[str]()

    def tell() -> str:
        told.append("".join(faults))
        return told[-1]

    with MetadataServer(world.aws, told=tell) as server, ThreadPoolExecutor() as pool:
        held = pool.submit(ask, server, ACTION)
        wait_for(lambda: len(told) > 1, what="a request that hangs", seconds=60)
        faults.clear()
        with pytest.raises(ConnectionError):
            held.result()


def test_a_fault_spoils_each_answer_until_it_is_over(server: MetadataServer) -> None:
    server.fault = "429"
    assert ask(server, ACTION)[0] == 429
    server.fault = "html"
    assert "log in" in ask(server, ACTION)[1]
    server.fault = ""
    assert ask(server, ACTION)[0] == 401
