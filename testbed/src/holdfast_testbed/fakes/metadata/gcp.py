"""Compute Engine's metadata server. See "About VM metadata", "Watch metadata" and "Host maintenance" in its docs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from holdfast_testbed.fakes.metadata.announcement import HOST_MAINTENANCE, PREEMPTED, Announcement
from holdfast_testbed.fakes.metadata.server import Answer, Request

ROOT = "/computeMetadata/v1"
FLAVOR_HEADER = "Metadata-Flavor"
_STANDARD = {FLAVOR_HEADER: "Google", "X-XSS-Protection": "0", "X-Frame-Options": "SAMEORIGIN"}
_LONGEST_SECONDS = 3600.0
_TICK_SECONDS = 0.01


@dataclass(kw_only=True)
class ComputeMetadata:
    """Answers requests. An answer may be held until a value changes."""

    announced: Callable[[], Announcement]
    name: ClassVar[str] = "Metadata Server for VM"

    def answer(self, request: Request) -> Answer:
        """Return a value or a listing, for requests with Google's header."""
        if request.headers.get(FLAVOR_HEADER.lower()) != "Google" or "x-forwarded-for" in request.headers:
            return _page(403)
        if request.method != "GET":
            return _page(405)
        values = _values(self.announced())
        if any(path.startswith(f"{request.path}/") for path in values):
            moved = {"Location": f"{request.path}/"}
            return Answer(status=301, body=f"{request.path}/\n", content_type="text/html", headers=moved | _STANDARD)
        listed = request.path.endswith("/") and any(path.startswith(request.path) for path in values)
        if listed:
            return self._listing(request, values)
        if request.path not in values:
            return _page(404)
        return self._value(request)

    def refusal(self, _: Request, status: int) -> Answer:
        """Return an error in the cloud's format."""
        return _page(status)

    def _listing(self, request: Request, values: dict[str, str]) -> Answer:
        if request.query.get("wait_for_change") == "true":  # a directory is watched only with recursive=true
            return _page(400)
        names = {path[len(request.path) :].partition("/") for path in values if path.startswith(request.path)}
        return _text("".join(sorted(f"{name}{slash}\n" for name, slash, _ in names)))

    def _value(self, request: Request) -> Answer:
        """Return the value: at once, when it differs from that of `last_etag` (by default: the present one), or at
        the time limit. The ETag depends only on the value, so an earlier value has its earlier ETag."""
        found = _text(_values(self.announced())[request.path])
        if request.query.get("wait_for_change") != "true":
            return found
        known = request.query.get("last_etag") or found.headers["ETag"]
        limit = request.query.get("timeout_sec", "")
        end = time.monotonic() + (float(limit) if limit.isdigit() else _LONGEST_SECONDS)
        while found.headers["ETag"] == known and time.monotonic() < end and not request.closing():
            time.sleep(_TICK_SECONDS)
            found = _text(_values(self.announced())[request.path])
        return found


def _values(announced: Announcement) -> dict[str, str]:
    maintenance = announced.of(*HOST_MAINTENANCE)
    number = int(hashlib.sha256(announced.instance_id.encode()).hexdigest()[:15], 16)
    return {
        f"{ROOT}/instance/id": str(number),
        f"{ROOT}/instance/name": announced.instance_id,
        f"{ROOT}/instance/zone": "projects/1/zones/testbed-1a",
        f"{ROOT}/instance/preempted": "TRUE" if announced.of(PREEMPTED) else "FALSE",
        f"{ROOT}/instance/maintenance-event": maintenance.kind if maintenance else "NONE",
        f"{ROOT}/instance/scheduling/preemptible": "TRUE",
    }


def _text(body: str) -> Answer:
    etag = hashlib.sha256(body.encode()).hexdigest()[:16]
    return Answer(status=200, body=body, content_type="application/text", headers={"ETag": etag, **_STANDARD})


def _page(status: int) -> Answer:
    body = f"<!DOCTYPE html>\n<html lang=en>\n<title>Error {status}</title>\n<p><b>{status}.</b>\n"
    return Answer(status=status, body=body, content_type="text/html; charset=UTF-8", headers=dict(_STANDARD))
