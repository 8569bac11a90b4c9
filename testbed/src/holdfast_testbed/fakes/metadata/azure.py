"""Azure's instance metadata service. See "Azure Instance Metadata Service" and "Scheduled Events" in Azure's docs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, ClassVar

from holdfast_testbed.fakes.metadata.announcement import AZURE as CLOUD
from holdfast_testbed.fakes.metadata.announcement import KINDS, Announcement, Event
from holdfast_testbed.fakes.metadata.server import Answer, Request

EVENTS_PATH = "/metadata/scheduledevents"
NAME_PATH = "/metadata/instance/compute/name"
_VERSIONS = {EVENTS_PATH: ("2019-08-01", "2020-07-01"), NAME_PATH: ("2020-09-01", "2021-02-01")}
_JSON = "application/json; charset=utf-8"
_DESCRIPTION = {
    "Preempt": "Virtual machine is being evicted.",
    "Terminate": "Virtual machine is going to be deleted.",
    "Redeploy": "The virtual machine is being redeployed.",
    "Reboot": "Host server is undergoing maintenance.",
    "Freeze": "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
}


@dataclass(kw_only=True)
class AzureMetadata:
    """Answers requests. An event starts when it is approved or at its time."""

    announced: Callable[[], Announcement]
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    first_answer_seconds: float = 0.0
    """Delay of the first answer about events, which enables them: up to two minutes by Azure's documentation."""
    approved: list[str] = field(default_factory=list)
    name: ClassVar[str] = "IMDS/150.870.65.1854"
    _enabled: bool = False
    _incarnation: int = 1
    _told: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: Request) -> Answer:
        """Return events or the machine's name, for requests with `Metadata: true` and a version."""
        if request.headers.get("metadata", "").lower() != "true" or "x-forwarded-for" in request.headers:
            return _error(400, "Bad request. Required metadata header not specified")
        if request.path not in _VERSIONS:
            return _error(404, "Not found")
        if request.query.get("api-version") not in _VERSIONS[request.path]:
            return _error(400, "Bad request. api-version is invalid or was not specified in the request.")
        if request.path == NAME_PATH:
            return self._machine(request)
        if request.method == "POST":
            return self._start(request)
        return self._events(request) if request.method == "GET" else _error(405, "Method not allowed")

    def refusal(self, _: Request, status: int) -> Answer:
        """Return an error in the cloud's format."""
        return _error(status, "The request is not served")

    def _machine(self, request: Request) -> Answer:
        if request.method != "GET":
            return _error(405, "Method not allowed")
        name = self.announced().instance_id
        if request.query.get("format") == "text":
            return Answer(status=200, body=name, content_type="text/plain; charset=utf-8")
        return Answer(status=200, body=json.dumps(name), content_type=_JSON)

    def _events(self, request: Request) -> Answer:
        with self._lock:
            first, self._enabled = not self._enabled, True
        end = time.monotonic() + (self.first_answer_seconds if first else 0.0)
        while time.monotonic() < end and not request.closing():
            time.sleep(0.01)
        announced = self.announced()
        events = [self._event(event, announced) for event in announced.events if event.kind in KINDS[CLOUD]]
        with self._lock:
            self._incarnation += events != self._told
            self._told = events
            document = {"DocumentIncarnation": self._incarnation, "Events": events}
        return Answer(status=200, body=json.dumps(document), content_type=_JSON)

    def _event(self, event: Event, announced: Announcement) -> dict[str, Any]:
        started = event.id in self.approved or self.now() >= event.when
        return {
            "EventId": event.id,
            "EventStatus": "Started" if started else "Scheduled",
            "EventType": event.kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(event.resources or (announced.instance_id,)),
            "NotBefore": "" if started else format_datetime(event.when.astimezone(UTC), usegmt=True),
            "Description": _DESCRIPTION[event.kind],
            "EventSource": "Platform",
            "DurationInSeconds": event.duration,
        }

    def _start(self, request: Request) -> Answer:
        """Approve an event; any machine may, and a second approval changes nothing."""
        known = {event.id for event in self.announced().events}
        try:
            wanted = [str(start["EventId"]) for start in json.loads(request.body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return _error(400, "Bad request")
        if not set(wanted) <= known:
            return _error(400, "Bad request")
        with self._lock:
            self.approved += [event for event in wanted if event not in self.approved]
        return Answer(status=200, content_type=_JSON)


def _error(status: int, message: str) -> Answer:
    return Answer(status=status, body=json.dumps({"error": message}), content_type=_JSON)
