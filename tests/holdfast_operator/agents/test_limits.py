"""What one pod may send, and that other pods never pay for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from agents_api import GOLDEN, LIMITS, WORKER, Api, body, wait_for

from holdfast_operator.agents.limits import Limits
from holdfast_operator.cluster.agent_hub import PodIdentity
from holdfast_operator.runtime.rate_limit import RateLimit


def test_a_report_over_the_limit_is_refused(api: Api) -> None:
    assert api.call("POST", "/v1/report", body=b" " * (256 * 1024 + 1))[0] == 413
    exact = body(padding="x" * (256 * 1024 - len(body(padding=""))))
    assert len(exact) == 256 * 1024
    assert api.call("POST", "/v1/report", body=exact)[0] == 200
    assert ("POST /v1/report", 413) in api.answers


def test_the_largest_report_that_a_worker_may_have_is_taken(api: Api) -> None:
    """One of 1,024 that has lost all others, with as many ranks, incidents, GPU errors and checks as are told."""
    uids = [f"0b9d8c1e-5b1c-4c7e-9d55-6a1f2c3d{number:04x}" for number in range(1024)]
    one = {name: GOLDEN["launcher"][name][0] for name in ("ranks", "incidents", "lostMembers")}
    launcher = {
        **GOLDEN["launcher"],
        "ranks": [one["ranks"]] * 64,
        "incidents": [{**one["incidents"], "message": "m" * 1000}] * 32,
        "lostMembers": [{**one["lostMembers"], "podUID": uid} for uid in uids[1:]],
        "world": {**GOLDEN["launcher"]["world"], "members": uids},
    }
    checks = [{"name": "Network", "result": "Failed", "message": "m" * 300, "unreached": uids[:64]}]
    full = body(launcher=launcher, gpu=GOLDEN["gpu"] * 64, preflight={"checks": checks})
    assert len(full) > 200 * 1024
    assert api.call("POST", "/v1/report", body=full)[0] == 200


def test_a_pod_that_sends_many_bodies_at_once_is_put_off(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, bodies_of_a_pod=2))
    open_ = [api.connect() for _ in range(2)]
    for connection in open_:
        connection.putrequest("POST", "/v1/report")
        connection.putheader("Authorization", f"Bearer {WORKER}")
        connection.putheader("Content-Length", str(len(body())))
        connection.endheaders(body()[:10])
    wait_for(lambda: api.server.bodies_read == 2)
    assert api.call("POST", "/v1/report", body=body())[0] == 429
    assert api.call("POST", "/v1/report", token="pod:another", body=body())[0] != 429
    for connection in open_:
        connection.send(body()[10:])
        assert connection.getresponse().status == 200
        connection.close()
    assert api.call("POST", "/v1/report", body=body())[0] == 200


def test_a_pod_that_asks_too_often_costs_no_other_pod(start: Callable[..., Api]) -> None:
    api, began = start(replace(LIMITS, of_a_pod=RateLimit(a_second=0.001, at_once=3))), time.monotonic()
    asked = [api.call("POST", "/v1/report", body=body())[0] for _ in range(5)]
    assert asked == [200, 200, 200, 429, 429]
    connection = api.connect()
    connection.request("POST", "/v1/report", body=body(), headers={"Authorization": f"Bearer {WORKER}"})
    wait = int(connection.getresponse().headers["Retry-After"])
    assert 1000 - (time.monotonic() - began) <= wait <= 1000
    connection.close()
    api.hub.publish("job-1", {"version": 1, "revision": 4})
    assert api.call("GET", "/v1/membership?after=0")[0] == 200, "its polls have a bucket of their own"
    assert api.call("POST", "/v1/report", token="pod:another", body=body())[0] != 429
    assert api.answers.count(("POST /v1/report", 429)) == 3


@pytest.mark.parametrize(
    ("mebibytes", "connections", "unproved"),
    [(None, 20_000, 1_000), (64, 500, 125), (512, 3932, 983), (1024, 7864, 1_000), (65_536, 20_000, 1_000)],
)
def test_the_most_connections_follow_from_the_memory_limit(
    mebibytes: int | None, connections: int, unproved: int
) -> None:
    limits = Limits.within(None if mebibytes is None else mebibytes << 20)
    assert (limits.connections, limits.unproved) == (connections, unproved)


def test_a_pod_is_put_off_by_bytes_before_its_body_is_read(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, bytes_of_a_pod=RateLimit(a_second=1.0, at_once=2 * len(body()))))
    assert [api.call("POST", "/v1/report", body=body())[0] for _ in range(3)] == [200, 200, 429]
    assert api.call("POST", "/v1/report", token="pod:another", body=body())[0] != 429


def test_a_large_report_holds_up_no_other_job(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, report_bytes_at_once=len(body()) + 64))
    reading, over, record = threading.Event(), threading.Event(), api.hub.record

    def slow(identity: PodIdentity, raw: bytes) -> int:
        if len(raw) > len(body()) + 64:
            reading.set()
            assert over.wait(120)
        return record(identity, raw)

    api.hub.record = slow  # type: ignore[method-assign]
    api.hub.bind("uid-other", "job-2")
    api.hub.publish("job-2", {"version": 1, "revision": 4})
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(api.call, "POST", "/v1/report", body=body(more="x" * 4096))
        assert reading.wait(120)
        assert api.call("GET", "/v1/membership?after=0", token="pod:uid-other")[0] == 200
        over.set()
        assert large.result()[0] == 200
