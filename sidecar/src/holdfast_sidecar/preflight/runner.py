"""Collects the facts until all checks passed: with `reachability`, the only module of this folder with I/O.

The success is stored in a file of the run directory, so a restarted sidecar does not block a pod that trains.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError
from holdfast_sidecar.preflight.checks import GpuHealth, Inputs, Skew, judge
from holdfast_sidecar.preflight.reachability import PeerDialer
from holdfast_sidecar.protocol.document import Document, dump_document, parse_document
from holdfast_sidecar.protocol.preflight import FAILED, RUNNING, Check, Peer, Preflight, answered_peers
from holdfast_sidecar.run_dir.files import read_small, write_atomically
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.http import Response
from holdfast_sidecar.settings import PreflightSettings

_log = logging.getLogger(__name__)


class PreflightWatch:
    """`tick` belongs to one thread, `view` and `on_report_answer` to all."""

    def __init__(
        self,
        asked: PreflightSettings,
        run_dir: Path,
        clock: Clock,
        *,
        gpus: Callable[[], GpuHealth] | None,
        visible: Callable[[], Collection[str]],
        launcher: Callable[[], LauncherStatus],
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._asked = asked
        self._told_path, self._own_path = run_dir / c.PREFLIGHT_FILE, run_dir / c.PREFLIGHT_OWN_FILE
        self._clock = clock
        self._gpus, self._visible, self._launcher = gpus, visible, launcher
        self._on_news = on_news
        self._begun: float | None = None
        self._lock = threading.Lock()
        self._skew: Skew | None = None
        self._dials = PeerDialer(clock)
        self._view = self._remembered() or judge(asked, Inputs(elapsed=0.0))
        _say(check for check in self._view.checks if check.result != RUNNING)

    def view(self) -> Preflight:
        """Return the results so far."""
        with self._lock:
            return self._view

    def on_report_answer(self, answer: Response, elapsed: float, *, ready: bool) -> None:
        """Record an answer to a report: its duration in seconds, and whether the launcher was ready."""
        if ready and not self.view().passed:
            self._dials.set_peers(_peers(answer))
        try:
            shown = parsedate_to_datetime(str(answer.headers.get("date")))
        except (ValueError, IndexError, OverflowError):
            return
        theirs = (shown if shown.tzinfo else shown.replace(tzinfo=UTC)) + timedelta(seconds=0.5)  # it is cut off
        ours = self._clock.now() - timedelta(seconds=elapsed / 2)
        with self._lock:
            self._skew = Skew(seconds=(ours - theirs).total_seconds(), error=0.5 + elapsed / 2)

    def tick(self) -> float:
        """Check once and return the seconds until the next time, many after all checks passed."""
        before = self.view()
        if before.passed:
            return c.PREFLIGHT_DONE_SECONDS
        self._dials.step()
        found = judge(self._asked, self._facts())
        if found != before:
            self._changed(before, found)
        return c.PREFLIGHT_POLL_SECONDS

    def _facts(self) -> Inputs:
        with self._lock:
            skew = self._skew
        now, launcher = self._clock.monotonic(), self._launcher().status is not None
        if launcher and self._begun is None:
            self._begun = now
        return Inputs(
            elapsed=0.0 if self._begun is None else now - self._begun,
            gpus=None if self._gpus is None else self._gpus(),
            visible=self._visible(),
            launcher=launcher,
            told=self._read(self._told_path),
            skew=skew,
            reach=self._dials.reach(),
        )

    def _changed(self, before: Preflight, found: Preflight) -> None:
        _say(check for check in found.checks if check not in before.checks)
        if found.passed:
            self._keep(found)
        with self._lock:
            self._view = found
        self._on_news()

    def _keep(self, found: Preflight) -> None:
        try:
            write_atomically(self._own_path, dump_document({"version": c.VERSION, **found.as_report()}))
        except OSError as error:
            _log.error("%s cannot be written: %s", self._own_path.name, error)

    def _remembered(self) -> Preflight | None:
        document = self._read(self._own_path)
        if document is None:
            return None
        try:
            found = Preflight.from_report(document)
        except ContractError as error:
            _log.error("%s is not ours: %s", self._own_path.name, error)
            return None
        return found if found.passed else None

    def _read(self, path: Path) -> Document | None:
        """Return None without a file, and an empty document for an unreadable one: its checks fail by their limit."""
        try:
            data = read_small(path)
            return None if data is None else parse_document(data, path.name)
        except (ContractError, OSError) as error:
            _log.debug("%s cannot be read: %s", path.name, error)
            return {"version": c.VERSION}


def _say(checks: Iterable[Check]) -> None:
    for check in checks:
        level = logging.WARNING if check.result == FAILED else logging.INFO
        _log.log(level, "preflight: %s: %s: %s", check.name, check.result, check.message)


def _peers(answer: Response) -> tuple[Peer, ...] | None:
    try:
        return answered_peers(answer.body)
    except ContractError as error:
        _log.debug("the peers cannot be read: %s", error)
        return None
