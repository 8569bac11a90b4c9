"""The timeline of a job as one launcher records it, for `holdfast timeline` and for other programs.

It is a bounded file of JSON lines. Rare events are always written. Of the steps, one per second and the first one
after each change are written. A full file is renamed to FILE.1, which replaces the previous FILE.1.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger("holdfast.launcher.timeline")

MAX_BYTES: Final = 4 << 20
_STEP_SECONDS: Final = 1.0


class Timeline:
    """Appends to the timeline. If the file cannot be written, it logs one line and stops."""

    def __init__(self, path: Path, now: Callable[[], float], *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._now = now
        self._max_bytes = max_bytes
        self._sampled_at = float("-inf")
        self._step: int | None = None
        self._failed = False

    def write(self, kind: str, **fields: Any) -> None:
        if self._failed:
            return
        if kind != "step":
            self._sampled_at = float("-inf")
        line = json.dumps({"t": round(self._now(), 6), "kind": kind, **fields}, separators=(",", ":")) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            self._failed = True
            _log.error("cannot write %s: %s; the timeline ends here", self._path, error.strerror)

    def sample(self, step: int, **fields: Any) -> None:
        """Write a step, once for all ranks, if the last one is at least a second old."""
        now = self._now()
        if step != self._step and now - self._sampled_at >= _STEP_SECONDS:
            self.write("step", step=step, **fields)
            self._sampled_at, self._step = now, step

    def _append(self, line: bytes) -> None:
        incomplete = self._rotate(len(line))
        with self._path.open("ab") as file:
            file.write(b"\n" + line if incomplete else line)

    def _rotate(self, needed: int) -> bool:
        """Rotate the file if necessary. Return whether the last line of an earlier writer lacks its line end."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                return False
            if size + needed <= self._max_bytes:
                file.seek(-1, 2)
                return file.read(1) != b"\n"
        self._path.replace(rotated(self._path))
        return False


def rotated(path: Path) -> Path:
    """Return the path of the older part of a timeline."""
    return path.with_name(f"{path.name}.1")
