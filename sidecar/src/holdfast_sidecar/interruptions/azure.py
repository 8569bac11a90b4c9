"""Azure: Scheduled Events, from the instance metadata service.

Every machine of a set receives the events of all machines, so the sidecar selects those that name this one. It
approves an event (`StartRequests`) when the event's checkpoint is published, and only if the event concerns no other
machine: after an approval, Azure begins at once with all machines of the event
(`docs/decisions/0032-approve-azure-events.md`).
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SidecarError, SourceError
from holdfast_sidecar.interruptions.metadata import (
    actionable,
    http_time,
    json_object,
    on_this_host,
    readable,
    successful,
)
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.runtime.http import Response, Transport
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)

EVENTS_PATH = "/metadata/scheduledevents"
EVENTS = f"{EVENTS_PATH}?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name"
NAME = f"{NAME_PATH}?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_NAME = re.compile(r"[\w.()-]{1,128}", re.ASCII)
_ACTIONS = {
    "Preempt": "preempt",
    "Terminate": "terminate",
    "Redeploy": "redeploy",
    "Reboot": "reboot",
    "Freeze": "freeze",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of the document, with names in lower case: Azure's names have no case."""

    id: str
    type: str
    started: bool
    resources: tuple[str, ...]
    not_before: datetime | None
    """By Azure's clock; None once it has begun."""
    duration: int

    @property
    def notice_id(self) -> str:
        return f"azure-{self.id}"


def parse_event(entry: Any, machine: str) -> Event | None:
    """Parse an entry of `Events`; None for another machine. Raises `SourceError` if the entry is malformed."""
    said = entry if isinstance(entry, dict) else {}
    resources = said.get("Resources")
    if not isinstance(resources, list) or not all(isinstance(name, str) for name in resources):
        raise SourceError(f"{EVENTS_PATH} lists an event without Resources")
    names = tuple(name.casefold() for name in resources)
    if machine not in names:
        return None
    identity, kind, status = (_word(said, field) for field in ("EventId", "EventType", "EventStatus"))
    if kind not in _ACTIONS or status not in ("Scheduled", "Started"):
        raise SourceError(f"{EVENTS_PATH} lists an event that is not known: {kind[:40]!r}, {status[:40]!r}")
    when, duration = said.get("NotBefore"), said.get("DurationInSeconds")
    return Event(
        id=identity,
        type=kind,
        started=status == "Started",
        resources=names,
        not_before=http_time(when, f"{EVENTS_PATH}'s NotBefore") if when else None,
        duration=duration if isinstance(duration, int) else -1,
    )


def _word(said: Mapping[str, Any], field: str) -> str:
    word = said.get(field)
    if not isinstance(word, str) or not 0 < len(word) <= 128:
        raise SourceError(f"{EVENTS_PATH} lists an event without {field}")
    return word


class AzureSource:
    """Takes its machine's name from the service, because the node's name differs from it in a scale set."""

    name = c.PROVIDER_AZURE
    longest = c.AZURE_FIRST_ANSWER_SECONDS + 2 * c.METADATA_TIMEOUT_SECONDS

    def __init__(
        self, transport: Transport, *, checkpoint_deadline: float, committed: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._transport = transport
        self._checkpoint_deadline = timedelta(seconds=checkpoint_deadline)
        self._committed = committed
        self._machine = ""
        self._answered = False
        self._approved: set[str] = set()
        self._approval = Transitions(_log)

    @property
    def known(self) -> bool:
        """Whether the service has sent the machine's name."""
        return bool(self._machine)

    def poll(self, now: datetime) -> tuple[Notice, ...]:
        """Return the near events of this machine."""
        self._machine = self._machine or self._ask_name()
        response = self._ask_events()
        entries = json_object(response.body, EVENTS_PATH).get("Events")
        if not isinstance(entries, list):
            raise SourceError(f"{EVENTS_PATH} answered without Events")
        events = readable(entries, self._own)
        self._approve(events)
        return actionable((self._notice(event, response, now) for event in events), now, self._checkpoint_deadline)

    def _own(self, entry: Any) -> Event | None:
        event = parse_event(entry, self._machine)
        return None if event is None or _harmless(event) else event

    def _notice(self, event: Event, response: Response, now: datetime) -> Notice:
        deadline = now + self._checkpoint_deadline
        if event.not_before is not None:
            deadline = on_this_host(event.not_before, response, now)
        return Notice(
            id=event.notice_id,
            reason=f"scheduledevents {event.type}{' started' if event.started else ''}",
            source=self.name,
            action=_ACTIONS[event.type],
            deadline=deadline,
            observed_at=now,
        )

    def _approve(self, events: list[Event]) -> None:
        """Approve the events, so that Azure does not wait.

        A refusal is logged once and repeated. It hides no notice.
        """
        for event in events:
            alone = event.resources == (self._machine,)
            if event.started or not alone or event.id in self._approved or not self._committed(event.notice_id):
                continue
            try:
                self._start(event)
            except SidecarError as error:
                self._approval(logging.WARNING, event.id, f"{self.name}: {event.id} is not approved: {error}")
            else:
                self._approved.add(event.id)
                _log.info("%s: %s is approved, its checkpoint is complete", self.name, event.id)

    def _start(self, event: Event) -> None:
        body = json.dumps({"StartRequests": [{"EventId": event.id}]}).encode()
        successful(self._send("POST", EVENTS, c.METADATA_TIMEOUT_SECONDS, body), EVENTS_PATH)

    def _ask_events(self) -> Response:
        timeout = c.METADATA_TIMEOUT_SECONDS if self._answered else c.AZURE_FIRST_ANSWER_SECONDS
        response = successful(self._send("GET", EVENTS, timeout), EVENTS_PATH)
        self._answered = True
        return response

    def _ask_name(self) -> str:
        response = self._send("GET", NAME, c.METADATA_TIMEOUT_SECONDS)
        name = response.body.decode("latin-1").strip()
        if response.status != 200 or not _NAME.fullmatch(name):
            raise SourceError(f"{NAME_PATH} answered {response.status} {name[:40]!r}")
        return name.casefold()

    def _send(self, method: str, path: str, timeout: float, body: bytes | None = None) -> Response:
        headers = _HEADERS if body is None else {**_HEADERS, "Content-Type": "application/json"}
        return self._transport.request(method, path, headers=headers, body=body, timeout=timeout)


def _harmless(event: Event) -> bool:
    """Whether the pause ends before a checkpoint could be made, or interrupts nothing."""
    return event.type == "Freeze" and (event.started or event.duration == 0)
