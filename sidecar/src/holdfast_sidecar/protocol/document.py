"""Common parts of all JSON objects of `docs/reference/protocol.md`: version and times."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from holdfast_sidecar.constants import VERSION
from holdfast_sidecar.errors import MalformedError, UnknownVersionError

Document = dict[str, Any]


def format_time(when: datetime) -> str:
    """RFC 3339 in UTC with microseconds and a trailing Z."""
    return when.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def parse_time(text: str) -> datetime:
    """The reverse of `format_time`. Any precision is valid; a time without a zone is not."""
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is None:
            raise MalformedError(f"{text[:40]!r} has no time zone")
        return when.astimezone(UTC)
    except (ValueError, OverflowError) as error:  # the latter: beyond the years 1 to 9999 of UTC
        raise MalformedError(f"{text[:40]!r} is not a time") from error


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def parse_document(data: bytes, name: str) -> Document:
    """Parse a JSON object of the known version. NaN and infinities, which JSON lacks, become null."""
    try:
        document = json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise MalformedError(f"{name} is not a JSON object")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise UnknownVersionError(f"{name} has version {version!r}; this sidecar understands {VERSION}")
    return document


def dump_document(document: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
