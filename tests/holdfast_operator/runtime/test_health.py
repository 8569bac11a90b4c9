"""Probes and scrapes over real HTTP."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast_operator.runtime import health
from holdfast_operator.runtime.health import HealthServer


@pytest.fixture
def start() -> Iterator[Callable[..., HealthServer]]:
    servers: list[HealthServer] = []

    def make(**checks: dict[str, Callable[[], bool]]) -> HealthServer:
        server = HealthServer(
            lambda: b"holdfast_jobs 1\n",
            live=checks.get("live", {}),
            ready=checks.get("ready", {}),
            host="127.0.0.1",
            port=0,
        )
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.stop()


def get(server: HealthServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_all_checks_hold(start: Callable[..., HealthServer]) -> None:
    server = start(live={"agents": lambda: True}, ready={"cache": lambda: True})
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/readyz") == (200, "ok\n")


def test_a_failed_check_is_named_on_its_page_only(start: Callable[..., HealthServer]) -> None:
    server = start(live={"agents": lambda: True}, ready={"cache": lambda: False, "tls": lambda: True})
    assert get(server, "/readyz") == (503, "cache: failed\n")
    assert get(server, "/healthz") == (200, "ok\n")


def test_a_check_that_raises_has_failed(start: Callable[..., HealthServer]) -> None:
    server = start(live={"agents": lambda: bool(1 // 0)})
    assert get(server, "/healthz") == (503, "agents: failed\n")


def test_metrics_are_served(start: Callable[..., HealthServer]) -> None:
    assert get(start(), "/metrics") == (200, "holdfast_jobs 1\n")


def test_other_paths_are_not_found(start: Callable[..., HealthServer]) -> None:
    assert get(start(), "/secrets")[0] == 404


def silent(server: HealthServer, number: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", server.port)) for _ in range(number)]


def lives(connection: socket.socket) -> bool:
    try:
        return connection.send(b"G") == 1
    except OSError:
        return False


def test_a_probe_is_answered_though_others_hold_all_connections(
    start: Callable[..., HealthServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_ROOM_SECONDS", 60)  # a busy machine takes longer to end a connection that is cut
    server = start()
    crowd = silent(server, 40)
    for _ in range(40):
        assert get(server, "/healthz")[0] == 200
    for connection in crowd:
        connection.close()


def test_who_drips_its_request_is_cut_off_in_the_end(start: Callable[..., HealthServer]) -> None:
    server = start()
    began = time.monotonic()
    (slow,) = silent(server, 1)
    slow.settimeout(0.1)
    while time.monotonic() - began < 30 and lives(slow):
        time.sleep(0.1)
    assert 4 < time.monotonic() - began < 15
    assert get(server, "/healthz")[0] == 200


def test_silent_clients_do_not_keep_a_probe_waiting(start: Callable[..., HealthServer]) -> None:
    server = start()
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    assert get(server, "/healthz")[0] == 200
    for connection in crowd:
        connection.close()
