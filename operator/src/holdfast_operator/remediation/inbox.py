"""The alerts from Alertmanager: authentication, and removal of repeated ones.

Invariants:

- Only a later notification of an alert replaces an earlier one.
- The memory is bounded by the cluster's nodes.
- A sender gets its answer only after a pass with its alerts was carried out. Alertmanager sends the end of an alert
  only once, and the leader's memory is lost with the leader.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from holdfast_operator.api.json import Json
from holdfast_operator.errors import AgentRequestError
from holdfast_operator.remediation.alerts import Alert, Nodes, Parsed, mark_reader, node_finder, parse_body
from holdfast_operator.remediation.settings import RemediationSettings

logger = logging.getLogger(__name__)

ALERTS_PER_NODE = 1000
# How long an end is remembered: a start before it must not start the alert again.
RESOLVED_KEPT = timedelta(hours=1)
# How long after an end an older notification of the same alert may arrive: Alertmanager's replicas wait 15 s each for
# each other. Later, the alert fires again: it had ended only for lack of notifications, and Prometheus keeps its
# start.
STALE_FOR = timedelta(minutes=1)


class Inbox:
    """The alerts in memory. Thread-safe. ``wake`` is called for a new alert, ``counted`` with each alert's result."""

    def __init__(
        self,
        rules: RemediationSettings,
        *,
        nodes: Callable[[], list[Json]],
        exists: Callable[[str], bool],
        tokens: Callable[[], tuple[bytes, ...]],
        wake: Callable[[], None],
        counted: Callable[[str, int], None],
        clock: Callable[[], datetime],
    ) -> None:
        self._rules = rules
        self._nodes = nodes
        self._exists = exists
        self._tokens = tokens
        self._wake = wake
        self._counted = counted
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, dict[str, tuple[Alert, datetime]]] = {}
        self._words = 0  # number of new notifications
        self._carried_out = 0
        self._waiting: dict[int, Future[None]] = {}  # by the number of the newest notification that they wait for

    def allowed(self, token: str) -> bool:
        """Return whether this is one of the tokens, compared in constant time."""
        given, good = token.encode(errors="replace"), False
        for known in self._tokens():
            good |= hmac.compare_digest(given, known)
        return good

    def receive(self, raw: bytes) -> Future[None]:
        """Take one body.

        If it raises ``AgentRequestError``, nothing of the body was taken. The future completes when all alerts so far
        were carried out, and never if this process ends first.
        """
        now = self._clock()
        try:
            nodes = Nodes(named=node_finder(self._nodes, self._exists), marked_for=mark_reader(self._nodes))
            parsed = parse_body(raw, self._rules, nodes, now)
        except AgentRequestError:
            self._counted("malformed", 1)
            raise
        counts = self._keep(parsed, now)
        # This comes first: a notification that is sent again is not new.
        if counts["firing"] or counts["resolved"]:
            self._wake()
        for result, number in counts.items():
            self._counted(result, number)
        if parsed.truncated:
            logger.warning("Alertmanager left out %d alerts: raise max_alerts of its receiver", parsed.truncated)
        return self._answer()

    def words(self) -> int:
        """Return the number of the newest notification, for ``carried_out``. Call it before ``alerts``."""
        with self._lock:
            return self._words

    def carried_out(self, word: int) -> None:
        """Complete the answers for all notifications up to this one, because their results are written."""
        with self._lock:
            self._carried_out = max(self._carried_out, word)
            done = [self._waiting.pop(number) for number in list(self._waiting) if number <= word]
        for answer in done:
            answer.set_result(None)

    def alerts(self) -> tuple[Alert, ...]:
        """Return the alerts of existing nodes."""
        now, exist = self._clock(), {str(body["metadata"]["name"]) for body in self._nodes()}
        with self._lock:
            for node, told in list(self._told.items()):
                kept = {
                    key: (alert, at) for key, (alert, at) in told.items() if alert.firing or now - at < RESOLVED_KEPT
                }
                if kept and node in exist:
                    self._told[node] = kept
                else:
                    del self._told[node]
            return tuple(alert for told in self._told.values() for alert, _at in told.values())

    def _keep(self, parsed: Parsed, now: datetime) -> Tally[str]:
        """Return the number of alerts by result."""
        counts = Tally({name: getattr(parsed, name) for name in ("unmatched", "nowhere", "malformed", "truncated")})
        with self._lock:
            for alert in parsed.alerts:
                told = self._told.setdefault(alert.node, {})
                result = _result(told, alert, now)
                counts[result] += 1
                if result in ("firing", "resolved"):
                    told[alert.fingerprint] = (alert, now)
                    self._words += 1
                elif result == "repeated":
                    known, at = told[alert.fingerprint]
                    told[alert.fingerprint] = (replace(known, heard=now), at)
        return +counts

    def _answer(self) -> Future[None]:
        """Return one answer for all that wait for the same notification.

        A repeated notification waits as well, because the first one may still be in progress.
        """
        with self._lock:
            if self._words > self._carried_out:
                return self._waiting.setdefault(self._words, Future())
        done = Future[None]()
        done.set_result(None)
        return done


RESULTS = (
    "firing",
    "resolved",
    "repeated",
    "replayed",
    "overflow",
    "unmatched",
    "nowhere",
    "malformed",
    "truncated",
)


def _result(told: Mapping[str, tuple[Alert, datetime]], alert: Alert, now: datetime) -> str:
    if alert.fingerprint not in told:
        full = len(told) >= ALERTS_PER_NODE
        return "overflow" if full else ("firing" if alert.firing else "resolved")
    known, at = told[alert.fingerprint]
    if (known.started, known.firing) == (alert.started, alert.firing):
        return "repeated"
    same = alert.started == known.started
    if alert.started < known.started or (same and alert.firing and now - at < STALE_FOR):
        return "replayed"
    return "firing" if alert.firing else "resolved"


def tokens_in(path: str) -> Callable[[], tuple[bytes, ...]]:
    """Return the tokens of a mounted Secret, one per line.

    It is read each time, because it changes with the token.
    """

    def read() -> tuple[bytes, ...]:
        try:
            lines = Path(path).read_bytes().splitlines()
        except OSError as error:
            logger.warning("the alerts' token cannot be read: %s", error.strerror)
            return ()
        return tuple(line.strip() for line in lines if line.strip())

    return read
