"""JSON logs. Each line has its job and generation, and none has a secret."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from holdfast_operator.api.redaction import hide_secrets

_job: ContextVar[str | None] = ContextVar("holdfast_job", default=None)
_generation: ContextVar[int | None] = ContextVar("holdfast_generation", default=None)


@contextmanager
def about(job: str) -> Iterator[None]:
    """Add this job (``namespace/name``), and the generation that is set inside, to the lines that are logged."""
    job_token, generation_token = _job.set(job), _generation.set(None)
    try:
        yield
    finally:
        _job.reset(job_token)
        _generation.reset(generation_token)


def set_generation(generation: int | None) -> None:
    """Set the generation within ``about``, which removes it at its end."""
    if _job.get() is not None:
        _generation.set(generation)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": hide_secrets(record.getMessage()),
            "job": _job.get(),
            "generation": _generation.get(),
        }
        if record.exc_info:
            line["error"] = hide_secrets(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str = "INFO") -> None:
    """Log JSON on stderr for the whole process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their INFO level logs a line for each request; kopf's DEBUG level logs complete objects.
    for name in ("kubernetes", "urllib3", "aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
