"""Alertmanager's webhook on a real socket with real TLS."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from agents_api import MemorySecrets
from alertmanager import TOKEN, Box, body, node, told

from holdfast_operator.agents.certificate_authority import BuiltInAuthority
from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.routes import ServerMetrics
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.agents.tls import TlsKeeper
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.remediation.inbox import Inbox

PATIENT = Limits(
    alerts_bytes=8 * 1024 * 1024, body_seconds=120, first_request_seconds=120, idle_seconds=120, handshake_seconds=120
)


@dataclass
class Wire:
    """A running server, and Alertmanager's part."""

    port: int
    context: ssl.SSLContext
    hub: AgentHub
    answers: list[tuple[str, int]]

    def post(self, raw: bytes, token: str | None = TOKEN, method: str = "POST") -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=120, context=self.context)
        try:
            headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
            connection.request(method, "/v1/alerts", body=raw, headers=headers)
            return connection.getresponse().status
        except BrokenPipeError:
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Wire]]:
    servers: list[AgentServer] = []

    def make(inbox: Inbox | None, limits: Limits = PATIENT) -> Wire:
        keeper = TlsKeeper(BuiltInAuthority(MemorySecrets(), ["127.0.0.1"]))
        keeper.refresh()
        hub = AgentHub(lambda _token: None, lambda _job: None)
        answers: list[tuple[str, int]] = []
        server = AgentServer(
            hub,
            keeper.context,
            host="127.0.0.1",
            port=0,
            limits=limits,
            observer=ServerMetrics(answered=lambda route, code: answers.append((route, code))),
            alerts=inbox,
        )
        servers.append(server)
        server.start()
        trust = ssl.create_default_context(cadata=keeper.credentials.bundle)
        return Wire(port=server.port, context=trust, hub=hub, answers=answers)

    yield make
    for server in servers:
        server.stop(60)


def test_alertmanager_is_heard_over_tls_with_the_token(serve: Callable[..., Wire], box: Box) -> None:
    wire = serve(box.inbox)
    assert wire.post(body(told())) == 200
    assert [alert.node for alert in box.inbox.alerts()] == ["n0"]
    assert wire.answers == [("POST /v1/alerts", 200)]


@pytest.mark.parametrize("token", [None, "", "bad", "goo", "x" * 7000])
def test_without_the_token_nothing_is_read(serve: Callable[..., Wire], box: Box, token: str | None) -> None:
    wire = serve(box.inbox)
    assert wire.post(body(told()), token) == 401
    assert (box.inbox.alerts(), box.counts) == ((), {})
    assert wire.answers == [("POST /v1/alerts", 401)], "and it is counted"


def test_bad_bodies_and_other_methods_are_refused(serve: Callable[..., Wire], box: Box) -> None:
    wire = serve(box.inbox)
    assert wire.post(b"no") == 400
    assert wire.post(b"x" * (8 * 1024 * 1024 + 1)) == 413
    assert wire.post(b"", method="GET") == 405
    assert wire.post(body(told())) == 200, "and it goes on"


def test_a_standby_sends_alertmanager_away_to_try_again(serve: Callable[..., Wire], box: Box) -> None:
    wire = serve(box.inbox)
    wire.hub.stand_by()
    assert wire.post(body(told())) == 503
    assert box.inbox.alerts() == ()


def test_alertmanager_is_answered_once_its_alert_is_carried_out(serve: Callable[..., Wire], box: Box) -> None:
    box.idle = True
    wire = serve(box.inbox)
    with ThreadPoolExecutor(2) as pool:
        # The second finds the word of the first known, and not carried out.
        answers = [pool.submit(wire.post, body(told())) for _ in range(2)]
        until = time.monotonic() + 120
        while box.counts["repeated"] == 0:
            assert not any(answer.done() for answer in answers)
            assert time.monotonic() < until
            time.sleep(0.01)
        box.inbox.carried_out(box.inbox.words() - 1)
        assert box.inbox.receive(body(told())).done() is False
        box.inbox.carried_out(box.inbox.words())
        assert [answer.result() for answer in answers] == [200, 200]
    assert wire.post(body(told())) == 200, "what is carried out is answered at once"


def test_alertmanager_retries_what_nobody_has_carried_out(serve: Callable[..., Wire], box: Box) -> None:
    box.idle = True
    wire = serve(box.inbox, replace(PATIENT, alerts_seconds=0.1))
    assert [wire.post(body(told())) for _ in range(2)] == [503, 503]
    assert wire.post(body(told(status="resolved"))) == 503
    box.inbox.carried_out(box.inbox.words())
    assert wire.post(body(told(status="resolved"))) == 200
    assert box.counts["resolved"] == 1


def test_without_a_token_of_ours_there_is_no_webhook(serve: Callable[..., Wire]) -> None:
    assert serve(None).post(body(told())) == 404


def test_a_storm_of_ten_thousand_alerts_is_absorbed(serve: Callable[..., Wire], box: Box) -> None:
    """All in one body, then by the hundred at once, then all again: one word each, and no more than asked for."""
    box.nodes = [node(f"n{number}") for number in range(500)]
    wire = serve(box.inbox)
    storm = [told(node=f"n{number % 500}", gpu=str(number // 500), summary="x" * 150) for number in range(10_000)]
    assert wire.post(body(*storm)) == 200
    assert len(box.inbox.alerts()) == 10_000
    with ThreadPoolExecutor(8) as pool:
        pieces = [body(*storm[start : start + 100]) for start in range(0, 10_000, 100)]
        assert set(pool.map(wire.post, pieces)) == {200}
    assert len(box.inbox.alerts()) == 10_000
    assert (box.counts["firing"], box.counts["repeated"], box.woken) == (10_000, 10_000, 1)
