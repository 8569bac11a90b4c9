"""Alerts: which are taken, what each means for which node, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from alertmanager import NODES, NOW, RULES, Box, body, told
from hypothesis import given
from hypothesis import strategies as st

from holdfast_operator.api.names import ANNOTATION_REMEDIATION
from holdfast_operator.api.node_mark import Mark, Mode
from holdfast_operator.errors import AgentRequestError
from holdfast_operator.remediation.alerts import fingerprint_of, node_finder
from holdfast_operator.remediation.decide import remedy
from holdfast_operator.remediation.fleet import FleetSnapshot
from holdfast_operator.remediation.inbox import ALERTS_PER_NODE, RESOLVED_KEPT, STALE_FOR, tokens_in
from holdfast_operator.remediation.observe import machine_of
from holdfast_operator.remediation.plan import SetMark


def test_an_alert_that_a_rule_names_is_about_its_node(box: Box) -> None:
    assert box.send(told()) == [("n0", "Hot", "Drain", True)]
    assert (box.woken, box.counts) == (1, {"firing": 1})


def test_the_first_matching_rule_holds_bounded_by_the_mode(box: Box) -> None:
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


def test_a_marks_alert_may_end_though_no_rule_names_it_any_more(box: Box) -> None:
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


def test_an_alert_told_again_is_no_news(box: Box) -> None:
    for _ in range(3):
        box.send(told())
    assert (box.woken, box.counts) == (1, {"firing": 1, "repeated": 2})


def test_an_older_word_does_not_start_an_ended_alert_again(box: Box) -> None:
    box.send(told())
    assert box.send(told("resolved")) == [("n0", "Hot", "Drain", False)]
    assert box.send(told()) == [("n0", "Hot", "Drain", False)]
    assert box.send(told(started=NOW - timedelta(hours=1))) == [("n0", "Hot", "Drain", False)]
    assert box.counts["replayed"] == 2
    box.now += timedelta(minutes=5)
    assert box.send(told(started=box.now)) == [("n0", "Hot", "Drain", True)], "it came back"


def test_an_alert_that_went_stale_fires_again_with_its_old_start(box: Box) -> None:
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


def test_ends_are_forgotten_in_time_and_nodes_when_they_go(box: Box) -> None:
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
def test_no_odd_alert_keeps_a_good_one_from_being_taken(odd: list[Any]) -> None:
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


@pytest.mark.parametrize(("odd", "counted"), [(-1, 0), (True, 0), ("7", 0), (10**400, 10**9), (7, 7)])
def test_an_odd_number_of_truncated_alerts_stops_nothing(box: Box, odd: object, counted: int) -> None:
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
