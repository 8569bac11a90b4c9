"""Connections that are slow, silent, too many or broken are dropped, and cost no other client."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from agents_api import AT_ONCE, LIMITS, WORKER, Api, body, drained, ended, tls, trickle, wait_for, works


def test_a_standby_keeps_no_connection(api: Api) -> None:
    """Otherwise its client would never reconnect to the leader."""
    api.hub.stand_by()
    connection = api.connect()
    connection.request("GET", "/v1/membership")
    assert connection.getresponse().getheader("Connection") == "close"
    connection.close()


def test_a_client_that_says_nothing_is_dropped(start: Callable[..., Api]) -> None:
    connection = tls(start(AT_ONCE))
    assert connection.recv(1) == b""


def test_a_client_that_trickles_its_headers_is_dropped(start: Callable[..., Api]) -> None:
    connection = tls(start(AT_ONCE))
    connection.sendall(b"GET /v1/membership HTTP/1.1\r\nHost: x\r\n")
    trickle(connection, b"X: y\r\n")
    assert drained(connection) in (b"", None)


def test_a_client_that_trickles_its_body_is_told_and_dropped(start: Callable[..., Api]) -> None:
    connection = tls(start(replace(LIMITS, body_seconds=0.5)))
    head = "POST /v1/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer pod:uid-w0\r\nContent-Length: 999\r\n\r\n"
    connection.sendall(head.encode())
    assert connection.recv(64).startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_during_its_request_logs_no_error(
    start: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    """As a sidecar that is killed."""
    api = start()
    connection = tls(api)
    head = f"POST /v1/report HTTP/1.1\r\nHost: o\r\nAuthorization: Bearer {WORKER}\r\nContent-Length: 9\r\n\r\n"
    connection.sendall(head.encode() + b"{")
    wait_for(lambda: api.server.bodies_read == 1)  # a client that leaves sooner gets no answer
    connection.close()
    wait_for(lambda: bool(api.answers))
    assert api.answers == [("POST /v1/report", 400)]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert works(api)


def test_connections_over_the_limit_of_one_peer_are_dropped(api: Api) -> None:
    crowd = [api.connect() for _ in range(LIMITS.connections_per_peer)]
    for connection in crowd:
        connection.request("POST", "/v1/report", body=body(), headers={"Authorization": f"Bearer {WORKER}"})
        assert connection.getresponse().read()
    assert not works(api)
    for connection in crowd:
        connection.close()
    wait_for(lambda: works(api))


@pytest.mark.parametrize(("path", "token", "status"), [("/nothing", WORKER, 404), ("/v1/membership", "bad", 401)])
def test_a_stranger_keeps_no_connection(api: Api, path: str, token: str, status: int) -> None:
    connection = api.connect()
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Connection")) == (status, "close")


@pytest.mark.parametrize("few", [{"unproved": 3}, {"unproved_of_a_peer": 3}, {"connections": 3}])
def test_silent_connections_keep_no_holder_of_a_token_out(start: Callable[..., Api], few: dict[str, int]) -> None:
    api = start(replace(LIMITS, **few))
    proved = api.connect()

    def report() -> int:
        proved.request("POST", "/v1/report", body=body(), headers={"Authorization": f"Bearer {WORKER}"})
        answer = proved.getresponse()
        answer.read()
        return answer.status

    assert report() == 200
    kept = proved.sock
    silent = [tls(api) for _ in range(8)]
    assert api.call("POST", "/v1/report", body=body())[0] == 200
    assert report() == 200
    assert proved.sock is kept, "who proved itself was cut off for those that did not"
    assert drained(silent[0]) in (b"", None), "the oldest silent one was kept"
    for connection in silent:
        connection.close()
    proved.close()


@pytest.mark.parametrize("few", [{"unproved": 3}, {"unproved_of_a_peer": 3}, {"connections": 3}])
def test_connections_without_a_handshake_keep_nobody_out(start: Callable[..., Api], few: dict[str, int]) -> None:
    api = start(replace(LIMITS, **few))
    silent = [socket.create_connection(("127.0.0.1", api.server.port), timeout=120) for _ in range(8)]
    assert api.call("POST", "/v1/report", body=body())[0] == 200
    assert all(ended(connection) for connection in silent[:5]), "more of them than are allowed were kept"
    for connection in silent:
        connection.close()


def test_a_handshake_that_does_not_end_is_cut_off_in_its_time(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, handshake_seconds=0.2))
    with socket.create_connection(("127.0.0.1", api.server.port), timeout=120) as silent:
        assert ended(silent)
    assert works(api)


def test_connections_in_their_handshake_count_for_their_peer(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, connections_per_peer=3))
    silent = [socket.create_connection(("127.0.0.1", api.server.port), timeout=120) for _ in range(4)]
    assert ended(silent[3])
    assert not works(api)
    for connection in silent:
        connection.close()
    wait_for(lambda: works(api))
