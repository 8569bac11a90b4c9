"""Alertmanager's webhook: who is heard, what is taken, and what a storm costs."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.routes import ServerMetrics
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.agents.tls import TlsKeeper
from holdfast_operator.api.names import ANNOTATION_REMEDIATION
from holdfast_operator.api.node_mark import Mark, Mode
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.secrets import StoredSecret
from holdfast_operator.errors import AgentRequestError
from holdfast_operator.remediation.alerts import fingerprint_of, node_finder
from holdfast_operator.remediation.decide import remedy
from holdfast_operator.remediation.fleet import FleetSnapshot
from holdfast_operator.remediation.inbox import ALERTS_PER_NODE, RESOLVED_KEPT, STALE_FOR, Inbox, tokens_in
from holdfast_operator.remediation.observe import machine_of
from holdfast_operator.remediation.plan import SetMark
from holdfast_operator.remediation.settings import AlertRule, RemediationSettings

TOKEN = "good"
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
RULES = RemediationSettings(
    mode=Mode.DRAIN,
    alerts=(
        AlertRule(alert="Xid", action=Mode.REPLACE, labels=(("xid", "79"),)),
        AlertRule(alert="Xid", action=Mode.CORDON),
        AlertRule(alert="Hot", action=Mode.DRAIN),
    ),
)


def node(name: str, *addresses: str) -> dict[str, Any]:
    listed = [{"type": "InternalIP", "address": address} for address in addresses]
    return {"metadata": {"name": name}, "status": {"addresses": listed}}


NODES = [node("n0", "10.0.0.1", "fd00::1"), node("n1", "10.0.0.2", "host-1")]


def told(status: str = "firing", *, started: datetime = NOW, summary: str = "", **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": "Hot", "node": "n0", **labels},
        "annotations": {"summary": summary} if summary else {},
        "startsAt": started.isoformat(),
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph",
        "fingerprint": "f" * 16,
    }


def body(*alerts: Any, **change: Any) -> bytes:
    return json.dumps({"version": "4", "groupKey": "{}", "truncatedAlerts": 0, "alerts": alerts, **change}).encode()


@dataclass
class Box:
    """An inbox and what it told others, which carry it out at once, or ``idle`` not at all."""

    now: datetime = NOW
    idle: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    woken: int = 0
    nodes: list[dict[str, Any]] = field(default_factory=lambda: list(NODES))
    tokens: tuple[bytes, ...] = (TOKEN.encode(),)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.inbox = Inbox(
            RULES,
            nodes=lambda: list(self.nodes),
            exists=lambda name: any(body["metadata"]["name"] == name for body in self.nodes),
            tokens=lambda: self.tokens,
            wake=self._wake,
            counted=self._count,
            clock=lambda: self.now,
        )

    def _wake(self) -> None:
        self.woken += 1
        if not self.idle:
            self.inbox.carried_out(self.inbox.words())

    def _count(self, result: str, number: int) -> None:
        with self._lock:
            self.counts[result] += number

    def send(self, *alerts: Any, **change: Any) -> list[tuple[str, str, str, bool]]:
        self.inbox.receive(body(*alerts, **change))
        return sorted((a.node, a.name, a.mode.word, a.firing) for a in self.inbox.alerts())


@pytest.fixture
def box() -> Box:
    return Box()


# What an alert means


def test_an_alert_that_a_rule_names_is_about_its_node(box: Box) -> None:
    assert box.send(told()) == [("n0", "Hot", "Drain", True)]
    assert (box.woken, box.counts) == (1, {"firing": 1})


def test_the_first_rule_whose_labels_match_holds_bounded_by_the_mode(box: Box) -> None:
    alerts = [told(alertname="Xid", xid=xid) for xid in ("79", "13")]
    assert box.send(*alerts) == [("n0", "Xid", "Cordon", True), ("n0", "Xid", "Drain", True)]


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        ({"node": "n1"}, "n1"),
        ({"node": "elsewhere", "instance": "10.0.0.2:9100"}, "n1"),
        ({"node": "", "instance": "[fd00::1]:9400"}, "n0"),
        ({"node": "", "Hostname": "host-1"}, "n1"),
        ({"node": "elsewhere"}, None),
        ({"node": "", "instance": "10.0.0.9:9100"}, None),
    ],
)
def test_a_node_is_found_by_name_host_name_or_address(box: Box, labels: dict[str, str], named: str | None) -> None:
    assert [found[0] for found in box.send(told(**labels))] == ([named] if named else [])
    assert box.counts["nowhere"] == (0 if named else 1)


def test_what_no_rule_names_is_counted_and_wakes_nobody(box: Box) -> None:
    assert box.send(told(alertname="Watchdog")) == []
    assert (box.woken, box.counts) == (0, {"unmatched": 1})


def marked(name: str, *alerts: dict[str, Any]) -> dict[str, Any]:
    """A node that was taken out of service for these."""
    named = tuple(fingerprint_of(alert["labels"]) for alert in alerts)
    mark = Mark(mode=Mode.DRAIN, message="alert Old", since=NOW, alerts=named)
    return {"metadata": {"name": name, "annotations": {ANNOTATION_REMEDIATION: mark.to_json()}}}


def test_the_end_of_an_alert_that_no_rule_names_any_more_is_taken_where_a_node_bears_its_mark(box: Box) -> None:
    gone, gone_elsewhere = told("resolved", alertname="Old"), told("resolved", alertname="Old", node="n1")
    box.nodes = [marked("n0", gone), marked("n1", gone)]
    assert box.send(gone, gone_elsewhere, told("resolved", alertname="Watchdog")) == [("n0", "Old", "Observe", False)]
    assert (box.woken, box.counts) == (1, {"resolved": 1, "unmatched": 2})
    assert box.send(told(alertname="Old", started=NOW + timedelta(hours=1))) == [("n0", "Old", "Observe", False)]
    machine = replace(machine_of(box.nodes[0]), unschedulable=True)
    (action,) = remedy(FleetSnapshot(rules=RULES, alerts=box.inbox.alerts(), machines=(machine,)), NOW).actions
    assert isinstance(action, SetMark)
    assert (action.mark.alerts, action.mark.clear_since) == ((), NOW), "it is released after a while"


def test_half_a_letter_in_a_summary_is_replaced(box: Box) -> None:
    """It goes into a node's annotation, where the API server would keep another one than was written."""
    box.send(told(summary="half a smile: \ud83d"))
    (alert,) = box.inbox.alerts()
    assert alert.summary == "half a smile: ?"


def test_a_summary_is_one_short_line(box: Box) -> None:
    box.send(told(summary="line\n" * 500))
    (alert,) = box.inbox.alerts()
    assert "\n" not in alert.summary
    assert len(alert.summary) <= 200


# What is new


def test_an_alert_told_again_is_no_news(box: Box) -> None:
    for _ in range(3):
        box.send(told())
    assert (box.woken, box.counts) == (1, {"firing": 1, "repeated": 2})


def test_an_alerts_end_is_kept_and_an_older_word_does_not_start_it_anew(box: Box) -> None:
    box.send(told())
    assert box.send(told("resolved")) == [("n0", "Hot", "Drain", False)]
    assert box.send(told()) == [("n0", "Hot", "Drain", False)]
    assert box.send(told(started=NOW - timedelta(hours=1))) == [("n0", "Hot", "Drain", False)]
    assert box.counts["replayed"] == 2
    box.now += timedelta(minutes=5)
    assert box.send(told(started=box.now)) == [("n0", "Hot", "Drain", True)], "it came back"


def test_an_alert_that_ended_for_want_of_word_fires_again_with_its_old_beginning(box: Box) -> None:
    """Alertmanager takes what Prometheus could not tell it for minutes for ended; Prometheus knows better."""
    box.send(told(), told("resolved"))
    box.now += STALE_FOR - timedelta(seconds=1)
    assert box.send(told()) == [("n0", "Hot", "Drain", False)], "it may have been under way"
    box.now += timedelta(seconds=1)
    assert box.send(told()) == [("n0", "Hot", "Drain", True)]
    assert box.send(told("resolved")) == [("n0", "Hot", "Drain", False)]
    assert box.counts == {"firing": 2, "resolved": 2, "replayed": 1}


def test_a_start_in_the_future_does_not_outlive_the_alerts_end(box: Box) -> None:
    ahead = NOW + timedelta(hours=5)
    box.send(told(started=ahead))
    box.now += timedelta(minutes=1)
    assert box.send(told("resolved", started=ahead)) == [("n0", "Hot", "Drain", False)]


def test_ends_are_forgotten_after_a_while_and_nodes_when_they_go(box: Box) -> None:
    box.send(told(), told(node="n1"), told("resolved", xid="1"))
    box.now += RESOLVED_KEPT
    assert [alert.firing for alert in box.inbox.alerts()] == [True, True]
    box.nodes.pop()
    assert [alert.node for alert in box.inbox.alerts()] == ["n0"]


def test_one_alert_with_endless_labels_is_bounded(box: Box) -> None:
    box.send(*(told(gpu=str(number)) for number in range(ALERTS_PER_NODE + 50)))
    assert len(box.inbox.alerts()) == ALERTS_PER_NODE
    assert box.counts["overflow"] == 50


@given(st.permutations([told(), told("resolved"), told(started=NOW - timedelta(hours=1))]))
def test_the_latest_word_holds_in_whatever_order_they_come(alerts: list[dict[str, Any]]) -> None:
    box = Box()
    for alert in alerts:
        box.send(alert)
    assert [alert.firing for alert in box.inbox.alerts()] == [False]


def test_a_sender_cannot_give_two_alerts_one_identity() -> None:
    assert fingerprint_of({"a": "b"}) != fingerprint_of({"a": "c"})
    assert fingerprint_of({"a": "b", "c": "d"}) == fingerprint_of({"c": "d", "a": "b"})


# What is refused


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff\xfe", b"[]", b"{}", b'{"version": "3", "alerts": []}', b'{"version": "4"}', b"[" * 100_000],
)
def test_a_body_that_is_none_is_refused_and_counted(box: Box, raw: bytes) -> None:
    with pytest.raises(AgentRequestError):
        box.inbox.receive(raw)
    assert (box.counts, box.woken) == ({"malformed": 1}, 0)


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(JUNK | st.builds(lambda key, value: {**told(), key: value}, st.sampled_from(sorted(told())), JUNK)))
def test_no_alert_however_odd_keeps_a_good_one_from_being_taken(odd: list[Any]) -> None:
    box = Box()
    box.send(*odd, told(node="n1", alertname="Hot", mark="good"))
    assert any(alert.node == "n1" for alert in box.inbox.alerts())


def test_tokens_are_lines_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    read = tokens_in(str(path))
    assert read() == ()
    path.write_text("old\n\nnew \n")
    assert read() == (b"old", b"new")


def test_either_token_of_an_exchange_is_good_and_no_other(box: Box) -> None:
    box.tokens = (b"old", b"new")
    assert [box.inbox.allowed(token) for token in ("old", "new", "ol", "oldnew", "", "nöw")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    box.tokens = ()
    assert not box.inbox.allowed("")


def test_addresses_with_and_without_ports() -> None:
    find = node_finder(lambda: NODES, lambda name: name in ("n0", "n1"))
    assert [find(name) for name in ("n0", "n0:9100", "10.0.0.1", "[fd00::1]:1", "fd00::1", "")] == ["n0"] * 5 + [None]


# On the wire


class MemorySecrets:
    """A ``SecretStore`` without a cluster."""

    def __init__(self) -> None:
        self.content: dict[str, dict[str, bytes]] = {}

    def read(self, name: str) -> StoredSecret | None:
        return StoredSecret(data=self.content[name], version="1") if name in self.content else None

    def create(self, name: str, data: Any) -> bool:
        self.content[name] = dict(data)
        return True

    def replace(self, name: str, data: Any, version: str) -> bool:
        self.content[name] = dict(data)
        return True


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
        keeper = TlsKeeper(MemorySecrets(), ["127.0.0.1"], clock=lambda: datetime.now(UTC))
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
        trust = ssl.create_default_context(cadata=keeper.bundle)
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


def test_what_is_no_body_too_large_or_another_method_is_refused(serve: Callable[..., Wire], box: Box) -> None:
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


def test_alertmanager_has_its_answer_once_what_follows_is_written(serve: Callable[..., Wire], box: Box) -> None:
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


def test_alertmanager_is_to_try_again_what_nobody_has_carried_out(serve: Callable[..., Wire], box: Box) -> None:
    box.idle = True
    wire = serve(box.inbox, replace(PATIENT, alerts_seconds=0.1))
    assert [wire.post(body(told())) for _ in range(2)] == [503, 503]
    assert wire.post(body(told(status="resolved"))) == 503
    box.inbox.carried_out(box.inbox.words())
    assert wire.post(body(told(status="resolved"))) == 200
    assert box.counts["resolved"] == 1


def test_without_a_token_of_ours_there_is_no_webhook(serve: Callable[..., Wire]) -> None:
    assert serve(None).post(body(told())) == 404


@pytest.mark.parametrize(("odd", "counted"), [(-1, 0), (True, 0), ("7", 0), (10**400, 10**9), (7, 7)])
def test_an_alert_is_acted_on_whatever_number_is_said_to_be_left_out(box: Box, odd: object, counted: int) -> None:
    box.inbox.receive(body(told(), truncatedAlerts=odd))
    assert box.woken == 1
    assert box.counts["truncated"] == counted


def test_an_alert_is_acted_on_though_it_cannot_be_counted(box: Box) -> None:
    def fails(_result: str, _number: int) -> None:
        raise ValueError("counters can only be incremented by non-negative amounts")

    box.inbox._counted = fails
    with pytest.raises(ValueError, match="counters"):
        box.inbox.receive(body(told()))
    assert box.woken == 1


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
