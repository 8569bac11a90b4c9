"""The signals of a launcher: SIGTERM and SIGINT drain this worker, SIGUSR1 requests a checkpoint.

A second SIGINT ends the launcher and its ranks at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from holdfast.launcher.drain.requests import LEAST_DRAIN_SECONDS
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.membership.events import CheckpointRequested, DrainRequested
from holdfast.launcher.process.child import Reaper

_log = logging.getLogger("holdfast.launcher")
_LEAVE_SECONDS = 5.0


class Signals:
    """Turns signals into events, and records when the pod's grace period began."""

    def __init__(
        self, pump: EventPump, *, grace_seconds: float, finish: Callable[[Ending], None], kill: Callable[[], None]
    ) -> None:
        self._pump = pump
        self._grace_seconds = grace_seconds
        self._finish = finish
        self._kill = kill
        self._checkpoints = 0
        self._interrupts = 0
        self._terminated_at: float | None = None
        self.leaving = False
        """Whether the launcher is exiting already: SIGTERM then only limits its last upload."""

    def install(self, reaper: Reaper) -> None:
        """Handle the signals in the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGUSR1, self._checkpoint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # PID 1 blocks it until here (`__main__`)
        if os.getpid() == 1:
            loop.add_signal_handler(signal.SIGCHLD, reaper.reap)

    def left(self) -> float | None:
        """Return the seconds until the launcher must have ended; None without such a limit."""
        if self._interrupts > 1:
            return 0.0
        if self._terminated_at is None:
            return None
        return self._terminated_at + self._grace_seconds - self._pump.now()

    def _terminated(self) -> None:
        now = self._pump.now()
        self._terminated_at = self._terminated_at or now
        if self.leaving:
            return
        _log.info("SIGTERM: this worker leaves after an agreed checkpoint")
        until = now + max(LEAST_DRAIN_SECONDS, self._grace_seconds - _LEAVE_SECONDS)
        self._pump.feed(DrainRequested(id="sigterm", reason="SIGTERM", until=until))

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            _log.info("SIGINT again: this launcher ends at once")
            self._finish(Ending(code=128 + signal.SIGINT, reason="Interrupted", message="stopped by SIGINT"))
            self._kill()
            return
        _log.info("SIGINT: this worker leaves after an agreed checkpoint; a second SIGINT ends it at once")
        if not self.leaving:
            self._pump.feed(DrainRequested(id="sigint", reason="SIGINT"))

    def _checkpoint(self) -> None:
        self._checkpoints += 1
        self._pump.feed(CheckpointRequested(id=f"sigusr1-{self._checkpoints}", reason="SIGUSR1"))
