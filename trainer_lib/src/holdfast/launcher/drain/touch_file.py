"""The touch file: creating `emergency_checkpoint` requests a checkpoint, and with `drain` also that the worker
leaves.

The launcher consumes the file by rename, so a request takes effect once. The answer is `emergency_checkpoint.ack`.
"""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.core.attempt import check_version
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import PROTOCOL_VERSION
from holdfast.launcher.host.run_dir import TOUCH_ACK_FILE, TOUCH_FILE, read_json, write_json

_log = logging.getLogger("holdfast.launcher.touchfile")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for a checkpoint at a step on which all ranks agree."""

    id: str
    reason: str
    drain: bool = False
    source: str = ""
    deadline: str | None = None
    requested_at: str | None = None
    document: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def node_leaves(self) -> bool:
        """Whether the sidecar reports that the whole machine goes away. A source name identifies the sidecar."""
        return self.drain and bool(self.source)

    def ends_at(self) -> float | None:
        """The deadline as Unix time; None if there is none or it is not valid."""
        if self.deadline is None:
            return None
        try:
            moment = datetime.fromisoformat(self.deadline)
        except ValueError:
            _log.warning("the deadline of %s is not a time and is ignored: %.40r", self.id, self.deadline)
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class TouchFile:
    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / TOUCH_FILE
        self._taken = run_dir / f".{TOUCH_FILE}.taken"
        self._ack = run_dir / TOUCH_ACK_FILE
        self._numbers = itertools.count(1)
        self._problem = ""

    def take(self) -> Request | None:
        """Return the pending request, or None. A request with unreadable content still requests a checkpoint."""
        try:
            self._file.rename(self._taken)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(f"cannot rename {self._file}: {error.strerror}")
            return None
        number = f"touch-{os.getpid()}-{next(self._numbers)}"
        if self._taken.stat().st_size == 0:
            return Request(id=number, reason="touch-file")
        try:
            return _parse(read_json(self._taken), number)
        except DocumentError as error:
            return Request(id=number, reason=f"touch-file ({error})")

    def acknowledge(self, *, request_id: str, step: int, tier: str, result: str, seconds: float) -> None:
        """Write that the requested checkpoint is durable, or that it failed."""
        answer = {"id": request_id, "step": step, "tier": tier, "result": result, "seconds": seconds}
        try:
            write_json(self._ack, {"version": PROTOCOL_VERSION, **answer})
        except OSError as error:
            self._complain(f"cannot write {self._ack}: {error.strerror}")

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            _log.error("%s", problem)
        self._problem = problem


def _parse(value: dict[str, Any], number: str) -> Request:
    check_version(value, TOUCH_FILE)
    return Request(
        id=str(value.get("id") or number),
        reason=str(value.get("reason") or "touch-file"),
        drain=value.get("drain") is True,
        source=str(value.get("source") or ""),
        deadline=_text(value.get("deadline")),
        requested_at=_text(value.get("requestedAt")),
        document=value,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
