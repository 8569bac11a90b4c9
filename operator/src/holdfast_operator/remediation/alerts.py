"""Alertmanager's webhook body as facts about nodes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from holdfast_operator.api.json import Json, loads, number
from holdfast_operator.api.node_mark import Mode, mark_of
from holdfast_operator.api.times import parse_time
from holdfast_operator.errors import AgentRequestError
from holdfast_operator.remediation.settings import RemediationSettings

VERSION = "4"
RELEASE_LABEL = "release"
UNTIL_REBOOT = "reboot"
_SUMMARY = 200
_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert about one node, by its last notification."""

    node: str
    fingerprint: str
    name: str
    mode: Mode
    firing: bool
    started: datetime
    heard: datetime
    """The time of its newest notification, including repeated ones."""
    until_reboot: bool = False
    """Only a reset of the GPU ends the problem, so a resolved alert proves nothing."""
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The content of a body. ``unmatched``: alerts without a rule; ``nowhere``: alerts without a known node."""

    alerts: tuple[Alert, ...]
    unmatched: int
    nowhere: int
    malformed: int
    truncated: int


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Look-ups of nodes: the node of a name (``named``), and the alerts of a node's mark (``marked_for``)."""

    named: Callable[[str], str | None]
    marked_for: Callable[[str], Collection[str]]


def parse_body(raw: bytes, rules: RemediationSettings, nodes: Nodes, now: datetime) -> Parsed:
    """Return the alerts of a body. Raises ``AgentRequestError`` if it is not Alertmanager's."""
    try:
        body = loads(raw)
    except ValueError as error:
        raise AgentRequestError(400, "the body is not JSON") from error
    if not isinstance(body, dict) or body.get("version") != VERSION or not isinstance(body.get("alerts"), list):
        raise AgentRequestError(400, f"the body is not of Alertmanager's webhook, version {VERSION}")
    found: list[Alert] = []
    counts = {"unmatched": 0, "nowhere": 0, "malformed": 0}
    for item in body["alerts"]:
        alert = _alert(item, rules, nodes, now)
        if isinstance(alert, str):
            counts[alert] += 1
        else:
            found.append(alert)
    return Parsed(alerts=tuple(found), truncated=min(max(number(body.get("truncatedAlerts")), 0), _MOST), **counts)


def _alert(item: Any, rules: RemediationSettings, nodes: Nodes, now: datetime) -> Alert | str:
    if not isinstance(item, dict) or not isinstance(item.get("labels"), dict):
        return "malformed"
    labels, status, started = item["labels"], item.get("status"), parse_time(item.get("startsAt"))
    if status not in ("firing", "resolved") or started is None:
        return "malformed"
    firing, matched, fingerprint = status == "firing", rules.action(labels), fingerprint_of(labels)
    if matched is None and firing:
        return "unmatched"
    told = (labels[name] for name in rules.node_labels if isinstance(labels.get(name), str))
    node = next(filter(None, map(nodes.named, told)), None)
    # An action for an alert ends with the alert, even if no rule covers the alert any more.
    if matched is None and (node is None or fingerprint not in nodes.marked_for(node)):
        return "unmatched"
    if node is None:
        return "nowhere"
    name, mode = (matched[0].alert, matched[1]) if matched else (str(labels.get("alertname")), Mode.OBSERVE)
    annotations = item.get("annotations")
    summary = annotations.get("summary") if isinstance(annotations, dict) else None
    return Alert(
        node=node,
        fingerprint=fingerprint,
        name=name,
        mode=mode,
        firing=firing,
        # If the sender's clock is ahead, the end must not appear to be earlier than the start.
        started=min(started, now),
        heard=now,
        until_reboot=labels.get(RELEASE_LABEL) == UNTIL_REBOOT,
        summary=" ".join(str(summary or "").split())[:_SUMMARY],
    )


def fingerprint_of(labels: Json) -> str:
    """Return an alert's identity by its labels. A sender's own identity is not trusted."""
    text = json.dumps(sorted((str(key), str(value)) for key, value in labels.items()))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def node_finder(nodes: Callable[[], list[Json]], exists: Callable[[str], bool]) -> Callable[[str], str | None]:
    """Map the names that exporters use (name, host name or address, with or without a port) to the node's name."""
    addresses = cache(lambda: _addresses(nodes()))

    def find(told: str) -> str | None:
        bare = told.partition("]")[0].removeprefix("[") if told.startswith("[") else told.rpartition(":")[0]
        named = next((name for name in (told, bare) if name and exists(name)), None)
        return named or addresses().get(told) or addresses().get(bare)

    return find


def mark_reader(nodes: Callable[[], list[Json]]) -> Callable[[str], Collection[str]]:
    """Map a node's name to the fingerprints of the alerts for which it is marked."""
    marks = cache(lambda: {str(body["metadata"]["name"]): mark.alerts for body in nodes() if (mark := mark_of(body))})
    return lambda node: marks().get(node, ())


def _addresses(nodes: list[Json]) -> dict[str, str]:
    found: dict[str, str] = {}
    for body in nodes:
        for address in (body.get("status") or {}).get("addresses") or ():
            found.setdefault(str(address.get("address")), str(body["metadata"]["name"]))
    return found
