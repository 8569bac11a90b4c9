"""AWS's IMDSv2. See "Use IMDSv2", "Spot interruption notices" and "Scheduled events" in AWS's user guide."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from holdfast_testbed.fakes.metadata.announcement import (
    MAINTENANCE_CODES,
    REBALANCE,
    SPOT_ACTIONS,
    Announcement,
    Event,
)
from holdfast_testbed.fakes.metadata.server import Answer, Request

TOKEN_PATH = "/latest/api/token"  # noqa: S105
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
MAX_TTL_SECONDS = 21600
ROOT = "/latest/meta-data"
_PAGE = '<?xml version="1.0" encoding="iso-8859-1"?>\n<html><head><title>{}</title></head></html>\n'
_MAINTENANCE = timedelta(minutes=17)


@dataclass(kw_only=True)
class Imds:
    """Answers requests. Tokens are valid while the instance runs."""

    announced: Callable[[], Announcement]
    clock: Callable[[], float] = time.monotonic
    name: ClassVar[str] = "EC2ws"
    _tokens: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The generation and expiry of each token."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: Request) -> Answer:
        """`PUT /latest/api/token` returns a session token, which is required for all other requests."""
        if request.method == "PUT":
            return self._put(request)
        if request.method != "GET":
            return Answer(status=405)
        if not self._valid(request.headers.get(TOKEN_HEADER.lower(), "")):
            return Answer(status=401, body="Unauthorized")
        if request.path == TOKEN_PATH:
            return Answer(status=405)
        found = _tree(self.announced()).get(request.path.rstrip("/"))
        return found or Answer(status=404, body=_PAGE.format("404 - Not Found"), content_type="text/html")

    def refusal(self, _: Request, status: int) -> Answer:
        """Return an error in the cloud's format."""
        return Answer(status=status, body=_PAGE.format(status), content_type="text/html")

    def expire_tokens(self) -> None:
        """Invalidate all tokens, as when the instance was stopped and started."""
        with self._lock:
            self._tokens.clear()

    def _put(self, request: Request) -> Answer:
        if request.path != TOKEN_PATH:
            return Answer(status=405)
        if "x-forwarded-for" in request.headers:
            return Answer(status=403)
        ttl = request.headers.get(TTL_HEADER.lower(), "")
        if not (ttl.isascii() and ttl.isdigit() and 1 <= int(ttl) <= MAX_TTL_SECONDS):
            return Answer(status=400, body="Bad Request")
        token = secrets.token_urlsafe(40) + "=="
        with self._lock:
            self._tokens[token] = (self.announced().tokens, self.clock() + int(ttl))
        return Answer(status=200, body=token, headers={TTL_HEADER: ttl})

    def _valid(self, token: str) -> bool:
        with self._lock:
            number, end = self._tokens.get(token, (0, float("-inf")))
        return self.clock() < end and number == self.announced().tokens


def _tree(announced: Announcement) -> dict[str, Answer]:
    """Return the content of each path. AWS recommends a rebalance with the interruption at the latest."""
    scheduled = [_maintenance(event) for event in announced.events if event.kind in MAINTENANCE_CODES]
    tree = {
        f"{ROOT}/instance-id": Answer(status=200, body=announced.instance_id),
        f"{ROOT}/instance-life-cycle": Answer(status=200, body="spot"),
        f"{ROOT}/placement/availability-zone": Answer(status=200, body="testbed-1a"),
        f"{ROOT}/events/maintenance/scheduled": _json(scheduled, content_type="text/plain"),
    }
    spot, advised = announced.of(*SPOT_ACTIONS), announced.of(REBALANCE, *SPOT_ACTIONS)
    if spot is not None:
        tree[f"{ROOT}/spot/instance-action"] = _json({"action": spot.kind, "time": spot.at})
    if spot is not None and spot.kind == "terminate":
        tree[f"{ROOT}/spot/termination-time"] = Answer(status=200, body=spot.at)
    if advised is not None:
        tree[f"{ROOT}/events/recommendations/rebalance"] = _json({"noticeTime": advised.announced})
    return tree


def _maintenance(event: Event) -> dict[str, str]:
    return {
        "NotBefore": _gmt(event),
        "Code": event.kind,
        "Description": event.kind.replace("-", " "),
        "EventId": f"instance-event-{event.id.lower()}",
        "NotAfter": _gmt(event, _MAINTENANCE),
        "State": "active",
    }


def _gmt(event: Event, later: timedelta = timedelta()) -> str:
    return (event.when + later).strftime("%d %b %Y %H:%M:%S GMT")


def _json(value: Any, content_type: str = "application/json") -> Answer:
    return Answer(status=200, body=json.dumps(value), content_type=content_type)
