"""Small files of the run directory: read whole, written by rename, noticed when they change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast.core.constants import MAX_DOCUMENT_BYTES, STATUS_FILE
from holdfast.core.errors import DocumentError

Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """What tells one content of a file that is written by rename from the next; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; raises `DocumentError` naming the file."""
    try:
        with path.open("rb") as source:
            data = source.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise DocumentError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError(f"{path.name} is larger than {MAX_DOCUMENT_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DocumentError(f"{path.name} is not a JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write by rename: a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.rename(path)


def clean(run_dir: Path) -> None:
    """Make the run directory, and take away what an earlier launcher left half written."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for leftover in run_dir.glob(f".{STATUS_FILE}.*"):
        leftover.unlink(missing_ok=True)
