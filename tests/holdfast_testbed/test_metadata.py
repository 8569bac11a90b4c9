"""The metadata service answers as AWS documents IMDSv2."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast_testbed.metadata import (
    MAX_TTL_SECONDS,
    TOKEN_HEADER,
    TOKEN_PATH,
    TTL_HEADER,
    Announcement,
    Imds,
    MetadataServer,
    interruption,
    rebalance,
)

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
INSTANCE = "i-0123456789abcdef0"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class World:
    """A service with a clock and an announcement that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.announced = Announcement(instance_id=INSTANCE)
        self.imds = Imds(announced=lambda: self.announced, clock=lambda: self.now)

    def token(self, ttl: str = "60") -> str:
        answer = self.imds.put(TOKEN_PATH, {TTL_HEADER: ttl})
        assert answer.status == 200
        return answer.body

    def get(self, path: str) -> tuple[int, str]:
        answer = self.imds.get(path, {TOKEN_HEADER: self.token()})
        return answer.status, answer.body


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("ttl", ["1", "60", str(MAX_TTL_SECONDS)])
def test_a_token_is_given_and_its_life_is_told(world: World, ttl: str) -> None:
    answer = world.imds.put(TOKEN_PATH, {TTL_HEADER.lower(): ttl})
    assert answer.status == 200
    assert len(answer.body) > 40
    assert answer.headers[TTL_HEADER] == ttl


@pytest.mark.parametrize("ttl", ["", "0", "-1", str(MAX_TTL_SECONDS + 1), "ten", "1.5", "٣"])
def test_a_bad_life_is_refused(world: World, ttl: str) -> None:
    assert world.imds.put(TOKEN_PATH, {TTL_HEADER: ttl}).status == 400
    assert world.imds.put(TOKEN_PATH, {}).status == 400


def test_a_forwarded_request_gets_no_token(world: World) -> None:
    assert world.imds.put(TOKEN_PATH, {TTL_HEADER: "60", "X-Forwarded-For": "203.0.113.1"}).status == 403


def test_without_a_token_there_is_nothing_to_see(world: World) -> None:
    assert world.imds.get(ACTION, {}).status == 401
    assert world.imds.get(ACTION, {TOKEN_HEADER: "made-up"}).status == 401


def test_a_token_is_good_until_its_life_is_over(world: World) -> None:
    headers = {TOKEN_HEADER: world.token("60")}
    world.now = 59.9
    assert world.imds.get("/latest/meta-data/instance-id", headers).status == 200
    world.now = 60.0
    assert world.imds.get("/latest/meta-data/instance-id", headers).status == 401


def test_nothing_is_announced_at_first(world: World) -> None:
    assert world.get(ACTION)[0] == 404
    assert world.get(REBALANCE)[0] == 404
    assert world.get("/latest/meta-data/instance-id") == (200, INSTANCE)


def test_an_interruption_tells_action_and_time(world: World) -> None:
    world.announced = interruption(INSTANCE, action="terminate", seconds=120, now=NOW)
    status, body = world.get(ACTION)
    assert status == 200
    assert json.loads(body) == {"action": "terminate", "time": "2026-01-31T12:02:00Z"}
    assert world.get("/latest/meta-data/spot/termination-time") == (200, "2026-01-31T12:02:00Z")
    assert json.loads(world.get(REBALANCE)[1]) == {"noticeTime": "2026-01-31T12:00:00Z"}


def test_a_rebalance_recommendation_is_no_interruption(world: World) -> None:
    world.announced = rebalance(INSTANCE, now=NOW)
    assert world.get(ACTION)[0] == 404
    assert json.loads(world.get(REBALANCE)[1]) == {"noticeTime": "2026-01-31T12:00:00Z"}


def test_an_announcement_survives_the_file(tmp_path: Path) -> None:
    said = interruption(INSTANCE, action="stop", seconds=30, now=NOW)
    said.write(tmp_path / "announcement.json")
    assert Announcement.read(tmp_path / "announcement.json") == said


@pytest.fixture
def server(world: World) -> Iterator[MetadataServer]:
    with MetadataServer(world.imds) as running:
        yield running


def ask(server: MetadataServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.url + path, method=method, headers=named)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 — loopback
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_over_http(world: World, server: MetadataServer) -> None:
    status, token = ask(server, TOKEN_PATH, "PUT", **{TTL_HEADER: "60"})
    assert status == 200
    assert ask(server, ACTION, **{TOKEN_HEADER: token})[0] == 404
    world.announced = interruption(INSTANCE, action="terminate", seconds=120, now=NOW)
    assert ask(server, ACTION, **{TOKEN_HEADER: token})[0] == 200
    assert ask(server, ACTION)[0] == 401
    assert ask(server, ACTION, "PUT")[0] == 405
