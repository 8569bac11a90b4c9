"""Polls one source of interruption notices, and forwards each new notice."""

import logging
from collections.abc import Callable

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SidecarError
from holdfast_sidecar.interruptions.source import Source
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.runtime.backoff import backoff
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)


class InterruptionPoller:
    """Polls one source, at an interval that depends on its answers."""

    def __init__(
        self,
        source: Source,
        ledger: NoticeLedger,
        clock: Clock,
        jitter: Callable[[float, float], float],
        *,
        on_notice: Callable[[Notice], None] = lambda _: None,
        on_error: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._ledger = ledger
        self._clock = clock
        self._jitter = jitter
        self._on_notice = on_notice
        self._on_error = on_error
        self._failures = 0
        self._state = Transitions(_log)

    def tick(self) -> float:
        """Poll once and return the seconds until the next poll, measured from the start of this one."""
        began = self._clock.monotonic()
        try:
            for notice in self._source.poll(self._clock.now()):
                if self._ledger.publish(notice):
                    self._on_notice(notice)
        except Exception as error:  # noqa: BLE001 - an unexpected error affects only this source
            return self._failed(error)
        self._failures = 0
        self._state(logging.INFO, "answers", f"{self._source.name}: the source of notices answers")
        pause = self._jitter(c.SOURCE_POLL_SECONDS / 2, c.SOURCE_POLL_SECONDS)
        return max(0.0, pause - (self._clock.monotonic() - began))

    def _failed(self, error: Exception) -> float:
        self._failures += 1
        self._on_error(self._source.name)
        known = self._source.known
        longest = c.SOURCE_BACKOFF_KNOWN_SECONDS if known else c.SOURCE_BACKOFF_ABSENT_SECONDS
        new = self._state(
            logging.WARNING if known else logging.INFO,
            "fails" if known else "absent",
            f"{self._source.name}: {'no notices for now' if known else 'no such service here'} ({error}); "
            f"asking again, at least every {longest:.0f} s",
        )
        if new and not isinstance(error, SidecarError | OSError):
            _log.error("%s: a fault of the sidecar's own", self._source.name, exc_info=error)
        return backoff(self._failures, first=c.SOURCE_POLL_SECONDS / 2, longest=longest, jitter=self._jitter)
