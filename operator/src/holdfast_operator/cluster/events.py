"""Events of the API group events.k8s.io/v1."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.times import format_time


def event_manifest(
    regarding: Mapping[str, str],
    *,
    action: str,
    reason: str,
    message: str,
    warning: bool,
    now: datetime,
    identity: str,
    number: int = 0,
) -> dict[str, Any]:
    """Return one event about an object. ``number`` distinguishes events of the same time.

    The event of an object that has no namespace belongs to ``default``.
    """
    stamp = int(now.timestamp() * 1_000_000) + number
    name = regarding["name"][:230].rstrip(".-")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{stamp:x}", "namespace": regarding.get("namespace", "default")},
        "eventTime": format_time(now),
        "reportingController": c.REPORTING_CONTROLLER,
        "reportingInstance": identity[:128] or "unknown",
        "action": action,
        "type": "Warning" if warning else "Normal",
        "reason": reason[:128],
        "note": _note(message),
        "regarding": dict(regarding),
    }


def _note(message: str) -> str:
    """Return the end of a text that fits into an event, counted in bytes: a traceback has its error at the end."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= c.MAX_MESSAGE:
        return encoded.decode()
    start = "…".encode()
    return (start + encoded[len(encoded) - c.MAX_MESSAGE + len(start) :]).decode(errors="ignore")
