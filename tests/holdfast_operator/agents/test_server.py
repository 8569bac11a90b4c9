"""The agents' API on a real socket with real TLS: every status code, every limit, and the speed of a wake-up."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.routes import ServerMetrics
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.agents.tls import TlsKeeper
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_operator.errors import AuthenticationUnavailableError
from holdfast_operator.runtime.rate_limit import RateLimit

GOLDEN = json.loads((Path(__file__).parents[2] / "contract" / "report.json").read_text())
WORKER = "pod:uid-w0"
# A client that does its part must be served on a busy machine too: each short limit is set where one runs into it.
LIMITS = Limits(
    hold_seconds=0.5,
    body_seconds=120,
    first_request_seconds=120,
    idle_seconds=120,
    handshake_seconds=120,
    connections_per_peer=40,
)
HELD = replace(LIMITS, hold_seconds=240, connections_per_peer=200)
AT_ONCE = replace(LIMITS, body_seconds=0.5, first_request_seconds=0.5)


class MemorySecrets:
    """A ``SecretStore`` without a cluster."""

    def __init__(self) -> None:
        self.content: dict[str, dict[str, bytes]] = {}

    def read(self, name: str) -> Any:
        from holdfast_operator.cluster.secrets import StoredSecret

        return StoredSecret(data=self.content[name], version="1") if name in self.content else None

    def create(self, name: str, data: Any) -> bool:
        self.content[name] = dict(data)
        return True

    def replace(self, name: str, data: Any, version: str) -> bool:
        self.content[name] = dict(data)
        return True


def identify(token: str) -> PodIdentity | None:
    """Tokens are `pod:<uid>`; `down` is a token during an outage of the API server."""
    if token == "down":
        raise AuthenticationUnavailableError("no API server")
    if not token.startswith("pod:"):
        return None
    return PodIdentity(namespace="ml", pod="p", pod_uid=token.removeprefix("pod:"))


@dataclass
class Api:
    """A running server and a client for it."""

    hub: AgentHub
    server: AgentServer
    client_context: ssl.SSLContext
    answers: list[tuple[str, int]]

    def connect(self, timeout: float = 120) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.server.port, timeout=timeout, context=self.client_context
        )

    def call(self, method: str, path: str, token: str | None = WORKER, body: bytes | None = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.getheader("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(content) if is_json else None
        finally:
            connection.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Api]]:
    servers: list[AgentServer] = []

    def make(limits: Limits = LIMITS) -> Api:
        keeper = TlsKeeper(MemorySecrets(), ["127.0.0.1"], clock=lambda: datetime.now(UTC))
        keeper.refresh()
        answers: list[tuple[str, int]] = []
        hub = AgentHub(identify, lambda _job: None)
        hub.bind("uid-w0", "job-1")
        server = AgentServer(
            hub,
            keeper.context,
            host="127.0.0.1",
            port=0,
            limits=limits,
            observer=ServerMetrics(answered=lambda route, code: answers.append((route, code))),
        )
        servers.append(server)
        server.start()
        trust = ssl.create_default_context(cadata=keeper.bundle)
        return Api(hub=hub, server=server, client_context=trust, answers=answers)

    yield make
    for server in servers:
        server.stop(60)
        assert not server.alive()


@pytest.fixture
def api(start: Callable[..., Api]) -> Api:
    return start()


def body(**change: Any) -> bytes:
    return json.dumps({**GOLDEN, **change}).encode()


def test_a_pod_that_is_known_is_heard_while_no_token_can_be_reviewed(api: Api) -> None:
    assert api.call("POST", "/v1/report", "down", body())[0] == 503
    api.hub.recall = {"down": identify(WORKER)}.get
    assert api.call("POST", "/v1/report", "down", body())[0] == 200


class SlowReviews:
    """Reviews that wait until they are let go."""

    def __init__(self, api: Api) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        api.hub.authenticate = self

    def __call__(self, token: str) -> PodIdentity | None:
        self.asked.append(token)
        self.go.wait(120)
        return identify(token)


def test_of_one_token_there_is_one_question_at_a_time(api: Api) -> None:
    reviews = SlowReviews(api)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(api.call, "POST", "/v1/report", body=body()) for _ in range(4)]
        wait_for(lambda: bool(reviews.asked))
        time.sleep(0.5)
        reviews.go.set()
        assert [answer.result()[0] for answer in answers] == [200] * 4
    assert reviews.asked == [WORKER]


def test_a_verdict_serves_while_it_is_renewed_in_the_background(api: Api) -> None:
    reviews = SlowReviews(api)
    api.hub.recall, api.hub.due = identify, lambda _token: True
    for _ in range(3):
        assert api.call("POST", "/v1/report", body=body())[0] == 200
    wait_for(lambda: reviews.asked == [WORKER])
    reviews.go.set()


def test_a_flood_of_unknown_tokens_from_one_address_leaves_threads_to_others(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, authentications_of_a_peer=2, authentications_waiting_of_a_peer=4))
    reviews = SlowReviews(api)
    with ThreadPoolExecutor(4) as pool:
        flood = [pool.submit(api.call, "GET", "/v1/membership", f"bad{number}") for number in range(4)]
        wait_for(lambda: api.server.reviews_waiting == 4)
        assert api.call("GET", "/v1/membership", "bad5")[0] == 503
        assert len(reviews.asked) == 2
        api.hub.recall, api.hub.due = {WORKER: identify(WORKER)}.get, lambda _token: True
        assert api.call("POST", "/v1/report", body=body())[0] == 200
        wait_for(lambda: WORKER in reviews.asked)
        reviews.go.set()
        assert [answer.result()[0] for answer in flood] == [401] * 4
    assert api.call("GET", "/v1/membership", "bad6")[0] == 401


def test_a_report_is_answered_with_the_revision(api: Api) -> None:
    assert api.call("POST", "/v1/report", body=body()) == (200, {"version": 1, "revision": 0})
    api.hub.publish("job-1", {"version": 1, "revision": 4})
    assert api.call("POST", "/v1/report", body=body()) == (200, {"version": 1, "revision": 4})
    assert api.answers == [("POST /v1/report", 200)] * 2


def test_a_newer_membership_is_answered_at_once_and_unchanged(api: Api) -> None:
    document = json.loads((Path(__file__).parents[2] / "contract" / "membership.json").read_text())
    api.hub.publish("job-1", document)
    assert api.call("GET", "/v1/membership?after=0") == (200, document)
    assert api.call("GET", "/v1/membership") == (200, document)


def test_no_newer_membership_is_no_content_after_the_hold(api: Api) -> None:
    api.hub.publish("job-1", {"version": 1, "revision": 4})
    assert api.call("GET", "/v1/membership?after=4") == (204, None)


@pytest.mark.parametrize("token", [None, "", "nonsense", "x" * 9000, "pod:uid-w0\xff"])
def test_without_a_good_token_nothing_is_said(api: Api, token: str | None) -> None:
    status, _ = api.call("GET", "/v1/membership", token=token)
    assert status in (400, 401)  # 400: the header itself is too long


def test_the_token_of_another_pod_is_refused(api: Api) -> None:
    api.hub.bind("uid-x", "job-1")
    status, content = api.call("POST", "/v1/report", token="pod:uid-x", body=body())
    assert status == 403
    assert "another pod" in content["error"]


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


def test_a_report_over_the_limit_is_refused_and_the_server_lives(api: Api) -> None:
    assert api.call("POST", "/v1/report", body=b" " * (256 * 1024 + 1))[0] == 413
    exact = body(padding="x" * (256 * 1024 - len(body(padding=""))))
    assert len(exact) == 256 * 1024
    assert api.call("POST", "/v1/report", body=exact)[0] == 200
    assert ("POST /v1/report", 413) in api.answers


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
    wait_for(lambda: api.call("POST", "/v1/report", body=body())[0] == 429)
    assert api.call("POST", "/v1/report", token="pod:another", body=body())[0] != 429
    for connection in open_:
        connection.send(body()[10:])
        assert connection.getresponse().status == 200
        connection.close()
    assert api.call("POST", "/v1/report", body=body())[0] == 200


def test_a_pod_that_asks_too_often_is_put_off_and_costs_no_other_pod(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, of_a_pod=RateLimit(a_second=0.001, at_once=3)))
    asked = [api.call("POST", "/v1/report", body=body())[0] for _ in range(5)]
    assert asked == [200, 200, 200, 429, 429]
    connection = api.connect()
    connection.request("POST", "/v1/report", body=body(), headers={"Authorization": f"Bearer {WORKER}"})
    assert connection.getresponse().headers["Retry-After"] == "1000"
    connection.close()
    api.hub.publish("job-1", {"version": 1, "revision": 4})
    assert api.call("GET", "/v1/membership?after=0")[0] == 200, "its polls have a bucket of their own"
    assert api.call("POST", "/v1/report", token="pod:another", body=body())[0] != 429
    assert api.answers.count(("POST /v1/report", 429)) == 3


def test_while_the_api_server_is_away_agents_are_asked_to_come_again(api: Api) -> None:
    assert api.call("GET", "/v1/membership", token="down") == (503, {"version": 1, "leader": None})


def test_a_standby_names_the_leader(api: Api) -> None:
    api.hub.stand_by("https://10.0.0.9:8443")
    assert api.call("POST", "/v1/report", body=body()) == (
        503,
        {"version": 1, "leader": "https://10.0.0.9:8443"},
    )
    api.hub.take_over()
    assert api.call("POST", "/v1/report", body=body())[0] == 200


def test_a_standby_keeps_no_connection_or_its_client_would_never_come_to_the_leader(api: Api) -> None:
    api.hub.stand_by()
    connection = api.connect()
    connection.request("GET", "/v1/membership")
    assert connection.getresponse().getheader("Connection") == "close"
    connection.close()


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


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error_of_ours(
    start: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    """As a sidecar that is killed."""
    api = start(replace(LIMITS, body_seconds=120.0))
    connection = tls(api)
    head = f"POST /v1/report HTTP/1.1\r\nHost: o\r\nAuthorization: Bearer {WORKER}\r\nContent-Length: 9\r\n\r\n"
    connection.sendall(head.encode() + b"{")
    time.sleep(0.3)
    connection.close()
    wait_for(lambda: bool(api.answers))
    assert api.answers == [("POST /v1/report", 400)]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert works(api)


def test_connections_over_the_limit_of_one_peer_are_dropped_and_room_comes_back(api: Api) -> None:
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
def test_connections_that_never_begin_their_handshake_keep_nobody_out(
    start: Callable[..., Api], few: dict[str, int]
) -> None:
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


def test_connections_in_their_handshake_count_as_any_other_of_their_peer(start: Callable[..., Api]) -> None:
    api = start(replace(LIMITS, connections_per_peer=3))
    silent = [socket.create_connection(("127.0.0.1", api.server.port), timeout=120) for _ in range(4)]
    assert ended(silent[3])
    assert not works(api)
    for connection in silent:
        connection.close()
    wait_for(lambda: works(api))


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


def test_a_large_report_that_is_being_read_holds_up_no_other_job(start: Callable[..., Api]) -> None:
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


def test_plain_http_gets_nothing(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.server.port), timeout=120) as connection:
        connection.sendall(b"GET /v1/membership HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not connection.recv(64).startswith(b"HTTP")


def test_a_port_in_use_is_said_at_start(api: Api) -> None:
    second = AgentServer(api.hub, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), host="127.0.0.1", port=api.server.port)
    with pytest.raises(OSError, match="in use"):
        second.start()
    assert not second.alive()


def ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it, or does so now."""
    try:
        return connection.recv(64) == b""
    except ConnectionError:
        return True


def works(api: Api) -> bool:
    try:
        return api.call("GET", "/nothing")[0] == 404
    except (OSError, http.client.HTTPException):
        return False


def held(api: Api) -> int:
    return api.server.polls_held


def tls(api: Api) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", api.server.port), timeout=120)
    return api.client_context.wrap_socket(raw, server_hostname="127.0.0.1")


def trickle(connection: ssl.SSLSocket, piece: bytes) -> None:
    """Send piece after piece until the other side has had enough."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.05):
            try:
                connection.sendall(piece)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(120)
    over.set()
    assert not sender.is_alive(), "the server went on to read"


def drained(connection: ssl.SSLSocket) -> bytes | None:
    try:
        return connection.recv(64)
    except OSError:
        return None


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
