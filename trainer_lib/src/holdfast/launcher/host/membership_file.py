"""Watches `membership.json`, which the sidecar writes by rename."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.errors import DocumentError
from holdfast.launcher.host.run_dir import MEMBERSHIP_FILE, Stamp, read_json, stamp

_log = logging.getLogger("holdfast.launcher.membership_file")
_POLL_SECONDS = 0.05


class MembershipFile:
    """Passes on each new content. Unreadable content is logged and has no other effect."""

    def __init__(self, run_dir: Path, accept: Callable[[dict[str, Any]], None]) -> None:
        self._path = run_dir / MEMBERSHIP_FILE
        self._accept = accept
        self._seen: Stamp | None = None
        self.problem = ""

    async def watch(self) -> None:
        """Look every 50 ms until cancelled: one stat, and a read only after a change."""
        while True:
            self.read_if_changed()
            await asyncio.sleep(_POLL_SECONDS)

    def read_if_changed(self) -> bool:
        """Pass on the content if it changed. Return whether it changed."""
        now = stamp(self._path)
        if now is None or now == self._seen:
            return False
        self._seen = now
        try:
            self._accept(read_json(self._path))
        except DocumentError as error:
            self.problem = str(error)
            _log.error("membership refused: %s", error)
            return False
        self.problem = ""
        return True
