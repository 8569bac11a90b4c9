"""Small files of the run directory: read completely, written by rename, checked for changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from holdfast.core.errors import DocumentError

# Files in the run directory.
MEMBERSHIP_FILE: Final = "membership.json"
STATUS_FILE: Final = "status.json"
PREFLIGHT_FILE: Final = "preflight.json"  # results for volume and object store, for the sidecar
TOUCH_FILE: Final = "emergency_checkpoint"
TOUCH_ACK_FILE: Final = "emergency_checkpoint.ack"
AGENT_SOCKET_FILE: Final = "agent.sock"
TIMELINE_FILE: Final = "timeline.jsonl"
STACKS_DIR: Final = "stacks"  # stacks of hung ranks and of the ranks that waited for them
MAX_DOCUMENT_BYTES: Final = 1 << 20

Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """Return a value that differs for each content of a file that is written by rename; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises `DocumentError` that names the file."""
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
    """Write by rename: a reader sees the old content or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.rename(path)


def clean(run_dir: Path) -> None:
    """Create the run directory, and delete partly written files of an earlier launcher."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for leftover in run_dir.glob(f".{STATUS_FILE}.*"):
        leftover.unlink(missing_ok=True)
