"""Each route of the agents' API, with every status code."""

from __future__ import annotations

import json

import pytest
from agents_api import CONTRACT, Api, body, tls, wait_for


def test_a_report_is_answered_with_the_revision(api: Api) -> None:
    assert api.call("POST", "/v1/report", body=body()) == (200, {"version": 1, "revision": 0})
    api.hub.publish("job-1", {"version": 1, "revision": 4})
    assert api.call("POST", "/v1/report", body=body()) == (200, {"version": 1, "revision": 4})
    assert api.answers == [("POST /v1/report", 200)] * 2


def test_a_newer_membership_is_answered_at_once_and_unchanged(api: Api) -> None:
    document = json.loads((CONTRACT / "membership.json").read_text())
    api.hub.publish("job-1", document)
    assert api.call("GET", "/v1/membership?after=0") == (200, document)
    assert api.call("GET", "/v1/membership") == (200, document)


def test_no_newer_membership_is_no_content_after_the_hold(api: Api) -> None:
    api.hub.publish("job-1", {"version": 1, "revision": 4})
    assert api.call("GET", "/v1/membership?after=4") == (204, None)


def test_a_pod_of_no_job_is_not_found(api: Api) -> None:
    assert api.call("GET", "/v1/membership", token="pod:uid-x")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/report", 405),
        ("POST", "/v1/membership", 405),
        ("GET", "/", 404),
        ("GET", "/v1/membership?after=-1", 400),
        ("GET", "/v1/membership?after=" + "9" * 30, 400),
        ("POST", "/v1/report", 400),
    ],
)
def test_other_requests_are_refused(api: Api, method: str, path: str, status: int) -> None:
    assert api.call(method, path, body=b"{}" if method == "POST" else None)[0] == status


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/report HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
        b"POST /v1/report HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_counted(api: Api, sent: bytes) -> None:
    with tls(api) as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith(b"HTTP/1.")
    wait_for(lambda: ("other", 400) in api.answers)


def test_a_standby_names_the_leader(api: Api) -> None:
    api.hub.stand_by("https://10.0.0.9:8443")
    assert api.call("POST", "/v1/report", body=body()) == (
        503,
        {"version": 1, "leader": "https://10.0.0.9:8443"},
    )
    api.hub.take_over()
    assert api.call("POST", "/v1/report", body=body())[0] == 200
