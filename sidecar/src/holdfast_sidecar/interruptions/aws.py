"""AWS EC2: spot interruptions, rebalance recommendations and scheduled maintenance, from the instance metadata
service, version 2. For pods, the instance's hop limit must be 2 or more: with 1 the answer never arrives."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import MalformedError, SourceError
from holdfast_sidecar.interruptions.metadata import (
    OnError,
    OptionalEndpoint,
    actionable,
    http_time,
    json_list,
    json_object,
    on_this_host,
    readable,
    successful,
)
from holdfast_sidecar.protocol.document import Document, parse_time
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.runtime.http import Response, Transport

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path
SPOT_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
MAINTENANCE_PATH = "/latest/meta-data/events/maintenance/scheduled"
TTL_HEADER = "x-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "x-aws-ec2-metadata-token"  # noqa: S105 - a header's name
_TOKEN = re.compile(r"[\x21-\x7e]{1,1024}")
_SPOT_ACTIONS = frozenset({"terminate", "stop", "hibernate"})
_MAINTENANCE_ACTIONS = {
    "instance-stop": "stop",
    "instance-retirement": "terminate",
    "instance-reboot": "reboot",
    "system-reboot": "reboot",
}
"""The effect of each event on the machine. Others, for example `system-maintenance`, disturb it only briefly."""


class AwsSource:
    """Requests the interruption first. If there is one, the other notices do not matter."""

    name = c.PROVIDER_AWS
    longest = 10 * c.METADATA_TIMEOUT_SECONDS

    def __init__(
        self,
        transport: Transport,
        monotonic: Callable[[], float],
        *,
        checkpoint_deadline: float,
        on_error: OnError = lambda _: None,
    ) -> None:
        self._transport = transport
        self._monotonic = monotonic
        self._checkpoint_deadline = timedelta(seconds=checkpoint_deadline)
        self._token = ""
        self._renew_at = 0.0
        self._scheduled: list[Notice] = []
        self._ask_scheduled_at = 0.0
        self._recommendation = OptionalEndpoint(self.name, REBALANCE_PATH, on_error)
        self._schedule = OptionalEndpoint(self.name, MAINTENANCE_PATH, on_error)
        self._shown: dict[str, Notice] = {}
        """By path, the notice that the service has shown since its last 404. Its times may change meanwhile."""

    @property
    def known(self) -> bool:
        """Whether the service has issued a token: only AWS issues them."""
        return bool(self._token)

    def poll(self, now: datetime) -> tuple[Notice, ...]:
        """Return the interruption, else near maintenance and the recommendation."""
        if (interruption := self._noticed(SPOT_PATH, self._interruption, now)) is not None:
            return (interruption,)
        found: list[Notice] = []
        with self._recommendation.question():
            if (recommendation := self._noticed(REBALANCE_PATH, self._rebalance, now)) is not None:
                found.append(recommendation)
        with self._schedule.question():
            self._ask_scheduled(now)
        found += (replace(notice, observed_at=now) for notice in self._scheduled)
        return actionable(found, now, self._checkpoint_deadline)

    def _noticed(self, path: str, read: Callable[[Response, datetime], Notice], now: datetime) -> Notice | None:
        """Return one notice until the service shows none or another action. The earliest deadline counts."""
        answer = self._get(path)
        if answer is None:
            self._shown.pop(path, None)
            return None
        notice = read(answer, now)
        first = self._shown.get(path)
        if first is None or first.action != notice.action:
            self._shown[path] = notice
            return notice
        return replace(notice, id=first.id, deadline=min(first.deadline, notice.deadline))

    def _interruption(self, answer: Response, now: datetime) -> Notice:
        said = json_object(answer.body, SPOT_PATH)
        action, when = said.get("action"), _time(said, "time", SPOT_PATH)
        if not isinstance(action, str) or action not in _SPOT_ACTIONS:
            raise SourceError(f"{SPOT_PATH} names an action that is not known: {str(action)[:40]!r}")
        return Notice(
            id=f"aws-spot-{when:%Y-%m-%dT%H:%M:%SZ}",
            reason=f"spot/instance-action {action}",
            source=self.name,
            action=action,
            deadline=on_this_host(when, answer, now),
            observed_at=now,
        )

    def _rebalance(self, answer: Response, now: datetime) -> Notice:
        when = _time(json_object(answer.body, REBALANCE_PATH), "noticeTime", REBALANCE_PATH)
        return Notice(
            id=f"aws-rebalance-{when:%Y-%m-%dT%H:%M:%SZ}",
            reason="events/recommendations/rebalance",
            source=self.name,
            action="rebalance",
            deadline=now + self._checkpoint_deadline,
            observed_at=now,
        )

    def _ask_scheduled(self, now: datetime) -> None:
        """Request maintenance at long intervals, because it is announced days ahead."""
        if self._monotonic() >= self._ask_scheduled_at:
            answer = self._get(MAINTENANCE_PATH)
            self._scheduled = [] if answer is None else self._events(answer, now)
            self._ask_scheduled_at = self._monotonic() + c.MAINTENANCE_POLL_SECONDS

    def _events(self, answer: Response, now: datetime) -> list[Notice]:
        entries = json_list(answer.body, MAINTENANCE_PATH)
        return readable(entries, lambda entry: self._event(entry, answer, now))

    def _event(self, entry: Any, answer: Response, now: datetime) -> Notice | None:
        said = entry if isinstance(entry, dict) else {}
        event, code, state = (said.get(field) for field in ("EventId", "Code", "State"))
        if not (isinstance(event, str) and isinstance(code, str) and isinstance(state, str)):
            raise SourceError(f"{MAINTENANCE_PATH} lists an event without EventId, Code or State")
        if state != "active":
            return None
        return Notice(
            id=f"aws-maintenance-{event[:80]}",
            reason=f"events/maintenance/scheduled {code[:40]}",
            source=self.name,
            action=_MAINTENANCE_ACTIONS.get(code, "maintenance"),
            deadline=self._within(said, answer, now),
            observed_at=now,
        )

    def _within(self, said: Document, answer: Response, now: datetime) -> datetime:
        """Return the start of the window. Once begun, return the checkpoint's deadline, at most the window's end."""

        def time(field: str) -> datetime:
            return on_this_host(http_time(said.get(field), f"{MAINTENANCE_PATH}'s {field}"), answer, now)

        begins, wanted = time("NotBefore"), now + self._checkpoint_deadline
        if begins > now:
            return begins
        return min(wanted, time("NotAfter")) if said.get("NotAfter") else wanted

    def _get(self, path: str) -> Response | None:
        """Return the answer, or None for 404, which means that there is no notice.

        A refused token is renewed once.
        """
        response = self._authorised(path)
        if response.status == 401:
            self._renew_at = 0.0
            response = self._authorised(path)
        if response.status == 404:
            return None
        return successful(response, path)

    def _authorised(self, path: str) -> Response:
        if self._monotonic() >= self._renew_at:
            self._renew_token()
        return self._send("GET", path, {TOKEN_HEADER: self._token})

    def _renew_token(self) -> None:
        response = self._send("PUT", TOKEN_PATH, {TTL_HEADER: str(c.METADATA_TOKEN_TTL_SECONDS)})
        token = response.body.decode("latin-1").strip()
        if response.status != 200 or not _TOKEN.fullmatch(token):
            raise SourceError(f"{TOKEN_PATH} gave no token, status {response.status}")
        try:
            lifetime = float(response.headers.get(TTL_HEADER, c.METADATA_TOKEN_TTL_SECONDS))
        except ValueError as error:
            raise SourceError(f"{TOKEN_PATH} gave no usable lifetime") from error
        self._token = token
        self._renew_at = self._monotonic() + 0.9 * max(lifetime, 0.0)

    def _send(self, method: str, path: str, headers: dict[str, str]) -> Response:
        return self._transport.request(method, path, headers=headers, body=None, timeout=c.METADATA_TIMEOUT_SECONDS)


def _time(answer: Document, field: str, path: str) -> datetime:
    try:
        return parse_time(str(answer.get(field)))
    except MalformedError as error:
        raise SourceError(f"{path} names no usable {field}: {error}") from error
