"""Watches the launcher's `status.json`: what it says, and when it last said anything."""

import logging
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError
from holdfast_sidecar.protocol.document import Document, parse_document
from holdfast_sidecar.protocol.report import significant
from holdfast_sidecar.run_dir.files import Stamp, read_small, stamp
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LauncherStatus:
    """What is known of the launcher at one moment."""

    status: Document | None
    """Its last readable status; None until there is one."""
    changed_at: float
    """Monotonic time of the last change of the file (of the sidecar's start, while there is none)."""
    significance: bytes
    sequence: int
    """Rises with every status that says something else than the one before."""
    silent: bool = False
    """The launcher has spoken before, and says nothing any more."""

    def silent_seconds(self, monotonic: float) -> float:
        """How long the launcher has said nothing."""
        return max(0.0, monotonic - self.changed_at)


class LauncherStatusWatcher:
    """Reads the status when its stamp changes. `poll` belongs to one thread, `current` to all."""

    def __init__(self, run_dir: Path, clock: Clock) -> None:
        self._path = run_dir / c.STATUS_FILE
        self._clock = clock
        self._stamp: Stamp | None = None
        self._lock = threading.Lock()
        self._current = LauncherStatus(status=None, changed_at=clock.monotonic(), significance=b"", sequence=0)
        self._state = Transitions(_log)

    def current(self) -> LauncherStatus:
        with self._lock:
            return self._current

    def gpus(self) -> frozenset[str]:
        """UUIDs of the GPUs that the launcher sees."""
        status = self.current().status or {}
        told = status.get("gpus")
        return frozenset(uuid for uuid in told if isinstance(uuid, str)) if isinstance(told, list) else frozenset()

    def poll(self) -> bool:
        """Look at the file once; True when it says something new."""
        with self._lock:
            found = stamp(self._path)
            if found is None or found == self._stamp:
                return self._falls_silent()
            before, self._stamp = self._stamp, found
            changed_at = self._clock.monotonic()
            if before is None:
                changed_at -= self._age(found)
            status, significance = self._read()
            speaks_again = self._current.silent
            if speaks_again:
                _log.info("the launcher speaks again")
            if status == self._current.status:  # a sign of life, without news
                self._current = replace(self._current, changed_at=changed_at, silent=False, significance=significance)
                return speaks_again
            self._current = LauncherStatus(
                status=status,
                changed_at=changed_at,
                significance=significance,
                sequence=self._current.sequence + 1,
            )
            return True

    def _falls_silent(self) -> bool:
        """Whether it does so now. Its silence is significant: whoever decides about it is to know at once."""
        current = self._current
        seconds = current.silent_seconds(self._clock.monotonic())
        if current.silent or current.status is None or seconds < c.LAUNCHER_SILENT_SECONDS:
            return False
        _log.warning("the launcher has written no status for %.0f s", seconds)
        self._current = replace(current, silent=True, significance=b"silent " + current.significance)
        return True

    def _age(self, found: Stamp) -> float:
        """Age of a status that was there before the sidecar was."""
        written = datetime.fromtimestamp(found[1] / 1e9, UTC)
        return max(0.0, (self._clock.now() - written).total_seconds())

    def _read(self) -> tuple[Document | None, bytes]:
        try:
            data = read_small(self._path)
            status = None if data is None else parse_document(data, c.STATUS_FILE)
            significance = significant(status)
        except (ContractError, OSError, RecursionError) as error:
            self._state(logging.ERROR, "unreadable", f"the launcher's status cannot be read: {error}")
            return None, b""
        self._state(logging.INFO, "readable", "the launcher's status can be read")
        return status, significance
