"""Writes why the container ended to `/dev/termination-log`: at most 4 KiB, without secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.limits import MAX_TEXT
from holdfast.core.log_format import is_own_info
from holdfast.core.protocol import PROTOCOL_VERSION, ExitCode

_log = logging.getLogger("holdfast.launcher.termination")
_MAX_BYTES = 4000  # the kubelet cuts at 4096
_MAX_LINES = 12
# Lines of torch's C++ part. Some appear while the process ends, after the error that caused its end.
_TORCHS_WARNING = re.compile(r"(?:\[rank\d+\]:)?\[[IW]\d{4} [\d:.]+ [\w.]+:\d+\]")
_MAX_LINE = 300
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "[^"]+", line \d+')
_SECRET = re.compile(
    r"(?i)((?:token|secret|password|passwd|api[_-]?key|authorization|credential|x-amz-signature)\w*[\"']?\s*[=:]\s*)"
    r"(?:[\"']?(?:bearer|basic|token)\s+)?\S+"
)
_BARE = re.compile(r"(?i:\bbearer)\s+[\w.~+/=-]+|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")
_URL_USER = re.compile(r"(://)[^/\s@]+@")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How and why a launcher ends."""

    code: int
    cause: str = ""
    reason: str = ""
    message: str = ""
    traceback: tuple[str, ...] = ()
    final: bool = False

    def to_json(self) -> dict[str, Any]:
        """Wire form of `termination.json`."""
        return {
            "version": PROTOCOL_VERSION,
            "code": self.code,
            "cause": self.cause,
            "reason": self.reason,
            "message": redact(self.message)[:_MAX_LINE],
            "traceback": [redact(line)[:_MAX_LINE] for line in self.traceback[-_MAX_LINES:]],
            "final": self.final,
        }

    def to_status(self) -> dict[str, Any]:
        """Wire form of the status's `exit`."""
        body = self.to_json()
        return {key: body[key] for key in ("code", "cause", "reason", "message", "final")}


def redact(text: str) -> str:
    """Remove text that looks like a credential: everyone who can see the pod can read the termination log."""
    return _URL_USER.sub(r"\1***@", _SECRET.sub(r"\1***", _BARE.sub("***", text)))


def last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last informative lines, cut to a length that fits into messages to other launchers."""
    relevant = [line for line in lines if line.strip() and not is_own_info(line) and not _TORCHS_WARNING.match(line)]
    return tuple(line.rstrip()[:MAX_TEXT] for line in relevant)[-_MAX_LINES:]


def error_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last traceback including its exception; without a traceback, the last lines.

    A framework may print its own advice after the traceback, which is not the reason for the end of the process.
    """
    bare = [_RANK_PREFIX.sub("", line) for line in lines]
    frame = max((place for place, line in enumerate(bare) if _FRAME.match(line)), default=len(bare))
    for place in range(frame, len(bare)):
        if bare[place][:1].strip():
            return last_lines(lines[: place + 1])
    return last_lines(lines)


def final_message(ending: Ending) -> str:
    """Return the last message of the launcher: why the job failed; "" if it did not fail."""
    if not ending.final or ending.code == ExitCode.COMPLETE:
        return ""
    lines = [redact(line) for line in ending.traceback[-_MAX_LINES:] if not line.endswith(_HEADER)]
    return "\n".join([*lines, f"holdfast: the job has failed: {redact(ending.message)}", ""])


def write(path: Path, ending: Ending) -> None:
    """Write the termination log if the file exists: the kubelet creates it."""
    if not path.exists():
        return
    body = ending.to_json()
    while len(data := json.dumps(body).encode()) > _MAX_BYTES and body["traceback"]:
        body["traceback"] = body["traceback"][1:]
    try:
        path.write_bytes(data)
    except OSError as error:
        _log.warning("cannot write %s: %s", path, error.strerror)
