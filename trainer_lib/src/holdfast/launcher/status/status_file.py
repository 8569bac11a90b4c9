"""Writes `status.json` if it changed, at most about five times per second, with a short delay after a transition.

Between changes the file is touched, so that readers can distinguish an idle launcher from one that ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.launcher.host.run_dir import STATUS_FILE, write_json
from holdfast.launcher.membership.state import State

_log = logging.getLogger("holdfast.launcher.status_file")
_INTERVAL_SECONDS = 0.2
# The response to a failure has priority over writing it down.
_MOMENT_SECONDS = 0.01
_TRANSITION = ("phase", "ready", "accepted", "started", "incidents", "foreign", "complete")


class StatusFile:
    """Writes the document that `build` returns, whenever it differs from the last one written."""

    def __init__(self, run_dir: Path, build: Callable[[], dict[str, Any]]) -> None:
        self._path = run_dir / STATUS_FILE
        self._build = build
        self._written: dict[str, Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._failed = False

    def changed(self) -> None:
        """Note a change that can wait for the next beat."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL_SECONDS, self.flush)

    def soon(self) -> None:
        """Note a change that must be written soon."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_MOMENT_SECONDS, self.flush)

    def show(self, before: State, after: State) -> None:
        """Write after an event: soon for changes that the sidecar needs, later for all others."""
        if after.world is not before.world or any(getattr(before, n) != getattr(after, n) for n in _TRANSITION):
            self.soon()
        elif before is not after:
            self.changed()

    def alive(self) -> None:
        """Touch the file as a sign of life without a change."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def flush(self) -> None:
        """Write now, if there is a change."""
        for timer in (self._timer, self._soon):
            if timer is not None:
                timer.cancel()
        self._timer = self._soon = None
        document = self._build()
        if document == self._written:
            return
        try:
            write_json(self._path, document)
        except OSError as error:
            if not self._failed:
                _log.error(
                    "cannot write %s: %s; the operator gets no reports of this worker", self._path, error.strerror
                )
            self._failed = True
            return
        self._written, self._failed = document, False
