"""Reports the launcher's state to the operator, which may be unreachable for any time."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SidecarError
from holdfast_sidecar.operator_api.client import OperatorApi, at_least, error_kind
from holdfast_sidecar.operator_api.report_schedule import NOTHING_REPORTED, ReportState, accepted, failed, report_due
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.preflight import Preflight
from holdfast_sidecar.protocol.report import Pod, Report, report_answer
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus, LauncherStatusWatcher
from holdfast_sidecar.runtime.backoff import backoff
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.http import Response
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)


class Reporter:
    """Sends the launcher's state. `step` belongs to one thread."""

    def __init__(
        self,
        *,
        api: OperatorApi,
        pod: Pod,
        start_id: str,
        launcher: LauncherStatusWatcher,
        ledger: NoticeLedger,
        clock: Clock,
        jitter: Callable[[float, float], float],
        on_result: Callable[[bool], None] = lambda _: None,
        on_revision: Callable[[int], bool] = lambda _: True,
        gpu: Callable[[], Sequence[GpuError]] = lambda: (),
        preflight: Callable[[], Preflight | None] = lambda: None,
        on_answer: Callable[[Response, float, bool], None] = lambda _answer, _took, _ready: None,
    ) -> None:
        self._api = api
        self._pod = pod
        self._start_id = start_id
        self._launcher = launcher
        self._ledger = ledger
        self._clock = clock
        self._jitter = jitter
        self._on_result = on_result
        self._on_revision = on_revision
        self._gpu = gpu
        self._preflight = preflight
        self._on_answer = on_answer
        self._number = 0
        self._report_state: ReportState = NOTHING_REPORTED
        self._contact = Transitions(_log)

    def step(self) -> float:
        """Send a report if one is due, and return the seconds until the next one if nothing changes."""
        launcher, notices = self._current(), len(self._ledger.notices())
        due, _ = report_due(self._report_state, launcher, notices)
        wait = due - self._clock.monotonic()
        if wait > 0:
            return wait
        self._send(launcher, c.REPORT_TIMEOUT_SECONDS)
        return 0.0

    def send_final(self, api: OperatorApi, sleep: Callable[[float], object]) -> bool:
        """Send the last report until it is accepted or its time is over, unless it has no news.

        It uses its own connection, because the usual one may hang.
        """
        self._api = api
        self._launcher.poll()
        launcher, state = self._current(), self._report_state
        told = (state.failures, state.sequence, state.notices) == (0, launcher.sequence, len(self._ledger.notices()))
        told = told and state.significance == launcher.significance
        if told and state.accepted_at is not None:
            return True
        end = self._clock.monotonic() + c.FINAL_REPORT_SECONDS
        while (left := end - self._clock.monotonic()) > 0:
            if self._send(launcher, left):
                return True
            sleep(min(self._report_state.pause, max(0.0, end - self._clock.monotonic())))
        _log.error("the last report did not reach the operator; only the pod's state shows how it ended")
        return False

    def _current(self) -> LauncherStatus:
        """Return the newest status.

        GPU errors and results of checks are as significant as the launcher's own changes.
        """
        launcher, errors, preflight = self._launcher.current(), self._gpu(), self._preflight()
        if not errors and preflight is None:
            return launcher
        return replace(launcher, significance=launcher.significance + repr((errors, preflight)).encode())

    def _send(self, launcher: LauncherStatus, timeout: float) -> bool:
        self._number += 1
        notices = self._ledger.notices()
        report = Report(
            start_id=self._start_id,
            number=self._number,
            pod=self._pod,
            launcher=launcher.status,
            launcher_silent_seconds=launcher.silent_seconds(self._clock.monotonic()),
            notices=notices,
            gpu=self._gpu(),
            preflight=self._preflight(),
        )
        asked_at = self._clock.monotonic()
        try:
            answer = self._api.send("POST", c.REPORT_PATH, body=report.encode(), timeout=timeout)
            revision = report_answer(answer.body)
        except (SidecarError, ValueError, RecursionError) as error:
            pause = at_least(error, self._pause(self._report_state.failures + 1))
            self._report_state = failed(self._report_state, self._clock.monotonic(), pause)
            self._contact(logging.WARNING, error_kind(error), f"reports do not reach the operator: {error}")
            self._on_result(False)
            return False
        ready = (launcher.status or {}).get("ready") is True
        self._on_answer(answer, self._clock.monotonic() - asked_at, ready)
        settled = self._on_revision(revision)
        self._report_state = accepted(launcher, len(notices), self._clock.monotonic(), settled=settled)
        self._contact(logging.INFO, "ok", "reports reach the operator")
        self._on_result(True)
        return True

    def _pause(self, failures: int) -> float:
        return backoff(failures, first=c.BACKOFF_FIRST_SECONDS, longest=c.BACKOFF_MAX_SECONDS, jitter=self._jitter)
