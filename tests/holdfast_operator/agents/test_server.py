"""The agents' server on a real socket with real TLS, and the polls that it holds."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from agents_api import HELD, Api, wait_for

from holdfast_operator.agents.server import AgentServer


def held(api: Api) -> int:
    return api.server.polls_held


def test_a_forgotten_job_ends_its_polls(start: Callable[..., Api]) -> None:
    api = start(HELD)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(api.call, "GET", "/v1/membership?after=0")
        wait_for(lambda: held(api) == 1)
        api.hub.forget_job("job-1")
        assert poll.result(60)[0] == 404


def test_a_second_poll_of_a_pod_ends_its_first(start: Callable[..., Api]) -> None:
    api = start(HELD)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(api.call, "GET", "/v1/membership?after=0")
        wait_for(lambda: held(api) == 1)
        second = pool.submit(api.call, "GET", "/v1/membership?after=0")
        assert first.result(60)[0] == 204
        api.hub.publish("job-1", {"version": 1, "revision": 1})
        assert second.result(60)[0] == 200


def test_a_publication_reaches_every_held_poll(start: Callable[..., Api]) -> None:
    pods = [f"uid-{number}" for number in range(100)]
    api = start(replace(HELD, unproved_of_a_peer=len(pods)))  # all come at once, from one address
    for pod in pods:
        api.hub.bind(pod, "job-1")
    with ThreadPoolExecutor(len(pods)) as pool:
        polls = [pool.submit(api.call, "GET", "/v1/membership?after=0", token=f"pod:{pod}") for pod in pods]
        wait_for(lambda: held(api) == len(pods))
        api.hub.publish("job-1", {"version": 1, "revision": 1})
        assert [poll.result(60) for poll in polls] == [(200, {"version": 1, "revision": 1})] * len(pods)
    wait_for(lambda: held(api) == 0)


def test_plain_http_gets_nothing(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.server.port), timeout=120) as connection:
        connection.sendall(b"GET /v1/membership HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not connection.recv(64).startswith(b"HTTP")


def test_a_port_in_use_is_said_at_start(api: Api) -> None:
    second = AgentServer(api.hub, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), host="127.0.0.1", port=api.server.port)
    with pytest.raises(OSError, match="in use"):
        second.start()
    assert not second.alive()
