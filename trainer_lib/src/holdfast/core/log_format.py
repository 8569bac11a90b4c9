"""Log output: text on a terminal, and JSON in a container. Transitions are logged, ticks are not."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER_NAME = "holdfast"
_MAX_WAITING_LINES = 10_000
_FLUSH_SECONDS = 1.0
_OWN_INFO = re.compile(
    r'\{"ts": "[^"]+", "level": "info"|\d\d:\d\d:\d\d\.\d{3} holdfast(?!.*  (?:debug|warning|error|critical): )'
)


def rfc3339(moment: float) -> str:
    """Format a Unix time as in the protocol: UTC, microseconds, trailing Z."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def is_own_info(line: str) -> bool:
    """Return whether a line of these logs has level info, and so does not explain why its process ended."""
    return _OWN_INFO.match(line) is not None


@dataclass(kw_only=True)
class LogContext:
    """The fields of every line of this process. The owner updates them when the world changes."""

    fields: dict[str, Any] = field(default_factory=dict)

    def update(self, **values: Any) -> None:
        """Set fields for all later lines."""
        self.fields.update(values)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ts, level, msg, the context, then the line's own fields."""

    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": rfc3339(record.created),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
            **self._context.fields,
            **_own_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 holdfast gpt-w0 g2.a1  the message  key=value`."""

    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        extra = "".join(f"  {key}={value}" for key, value in _own_fields(record).items())
        text = f"{moment} holdfast{_where(self._context.fields)}  {level}{record.getMessage()}{extra}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def _where(fields: Mapping[str, Any]) -> str:
    attempt_id = f" g{fields['generation']}.a{fields['attempt']}" if fields.get("attempt") else ""
    rank = f" rank {fields['rank']}" if "rank" in fields else ""
    return f" {fields['pod']}{attempt_id}{rank}" if fields.get("pod") else f"{attempt_id}{rank}"


def _own_fields(record: logging.LogRecord) -> dict[str, Any]:
    own = getattr(record, "fields", None)
    return dict(own) if isinstance(own, Mapping) else {}


class BackgroundHandler(logging.Handler):
    """Writes on a separate thread, so that a full pipe does not block an event loop that must answer heartbeats."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._write, name="holdfast-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Format now and write later. Lines that do not fit the queue are dropped."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def close(self) -> None:
        """Write the queued lines, within a short time limit."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_FLUSH_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            # A full disk may accept the next line; a closed stream accepts none.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line + "\n")
                self._stream.flush()


def configure(context: LogContext, *, stream: TextIO | None = None, background: bool = False) -> logging.Logger:
    """Send the package's log to `stream` (standard error by default), as text for a terminal and
    otherwise as JSON.
    """
    target = sys.stderr if stream is None else stream
    handler = BackgroundHandler(target) if background else logging.StreamHandler(target)
    handler.setFormatter(TextFormatter(context) if target.isatty() else JsonFormatter(context))
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
