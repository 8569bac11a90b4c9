"""The operator's mark on a node: an annotation with the reason why, and how far, the node is taken out of service.

The mark contains everything that must survive a restart of the operator. The operator acts only on marked nodes. One
write sets mark and cordon: if the cordon disappears while the mark stays, somebody else removed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any

from holdfast_operator.api.json import Json
from holdfast_operator.api.names import ANNOTATION_REMEDIATION, PROTOCOL_VERSION
from holdfast_operator.api.times import format_time, parse_time

ALERTS_KEPT = 32
_MESSAGE = 300


class Mode(IntEnum):
    """What is done with a node; each mode includes all before it."""

    OBSERVE = 0
    CORDON = 1
    DRAIN = 2
    REPLACE = 3

    @property
    def word(self) -> str:
        """The mode as in Helm's values."""
        return self.name.capitalize()


_MODES = {mode.word: mode for mode in Mode}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A mark. ``alerts``: fingerprints of alerts that still fire. ``draining_since``: the start of the drain's
    deadline.

    ``boot_id`` and ``gpus`` are those of the node when it was marked.
    """

    mode: Mode
    message: str
    since: datetime
    alerts: tuple[str, ...] = ()
    clear_since: datetime | None = None
    draining_since: datetime | None = None
    terminating_since: datetime | None = None
    overruled: bool = False
    until_reboot: bool = False
    boot_id: str = ""
    gpus: int = 0

    @property
    def drains(self) -> bool:
        """Return whether pods are to leave the node now."""
        return self.mode >= Mode.DRAIN and not self.overruled and self.clear_since is None

    def to_json(self) -> str:
        """Return the value of the annotation."""
        times = {
            "since": self.since,
            "clearSince": self.clear_since,
            "drainingSince": self.draining_since,
            "terminatingSince": self.terminating_since,
        }
        value: dict[str, Any] = {
            "version": PROTOCOL_VERSION,
            "mode": self.mode.word,
            "message": self.message[:_MESSAGE],
            "alerts": list(self.alerts),
            "overruled": self.overruled,
            "untilReboot": self.until_reboot,
            "bootID": self.boot_id,
            "gpus": self.gpus,
            **{key: format_time(time) for key, time in times.items() if time is not None},
        }
        return json.dumps(value, separators=(",", ":"), sort_keys=True)


def mark_of(node: Json) -> Mark | None:
    """Return the mark of a node from the API's JSON; None if it cannot be read. Such a node is left unchanged."""
    annotations = (node.get("metadata") or {}).get("annotations") or {}
    try:
        value = json.loads(annotations.get(ANNOTATION_REMEDIATION) or "null")
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(value, Mapping) or value.get("version") != PROTOCOL_VERSION:
        return None
    mode, since, alerts = _MODES.get(str(value.get("mode"))), parse_time(value.get("since")), value.get("alerts")
    if mode is None or since is None or not isinstance(alerts, list):
        return None
    return Mark(
        mode=mode,
        message=str(value.get("message") or ""),
        since=since,
        alerts=tuple(map(str, alerts)),
        clear_since=parse_time(value.get("clearSince")),
        draining_since=parse_time(value.get("drainingSince")),
        terminating_since=parse_time(value.get("terminatingSince")),
        overruled=value.get("overruled") is True,
        until_reboot=value.get("untilReboot") is True,
        boot_id=str(value.get("bootID") or ""),
        gpus=int(gpus) if isinstance(gpus := value.get("gpus"), int) else 0,
    )


def marked(node: Json) -> bool:
    """Return whether there is any mark, readable or not."""
    return ANNOTATION_REMEDIATION in ((node.get("metadata") or {}).get("annotations") or {})


def kept(fingerprints: Iterable[str]) -> tuple[str, ...]:
    """Return the fingerprints that a mark can hold, each once."""
    return tuple(dict.fromkeys(fingerprints))[:ALERTS_KEPT]
