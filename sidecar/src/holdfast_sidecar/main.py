"""The process: one thread per waiting part, and the main thread for the signal that ends it."""

import logging
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta

from prometheus_client.core import Metric

from holdfast_sidecar import __version__, interruptions
from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SettingsError
from holdfast_sidecar.gpu.error_log import notice_of
from holdfast_sidecar.gpu.monitor import GpuWatch, View
from holdfast_sidecar.interruptions.poller import InterruptionPoller
from holdfast_sidecar.interruptions.source import Source
from holdfast_sidecar.metrics import gpu as gpu_metrics
from holdfast_sidecar.metrics.exporter import Metrics
from holdfast_sidecar.metrics.server import Pages, Server, metrics_page, probe_page
from holdfast_sidecar.operator_api.client import OperatorApi, connect
from holdfast_sidecar.operator_api.membership import Membership
from holdfast_sidecar.operator_api.reporter import Reporter
from holdfast_sidecar.preflight.checks import GpuHealth
from holdfast_sidecar.preflight.runner import PreflightWatch
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher
from holdfast_sidecar.runtime import logs
from holdfast_sidecar.runtime.clock import Clock, SystemClock
from holdfast_sidecar.runtime.http import Connection, Response
from holdfast_sidecar.runtime.loop import Loop
from holdfast_sidecar.settings import PreflightSettings, Settings, read_environment

_log = logging.getLogger("holdfast_sidecar")


class Sidecar:
    """All parts of one sidecar: watchers, reporters and servers."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock, self._jitter = settings, clock, random.SystemRandom().uniform
        self._stop = threading.Event()
        self._launcher = LauncherStatusWatcher(settings.run_dir, clock)
        self._ledger = NoticeLedger(settings.run_dir)
        self._metrics = Metrics(clock, self._launcher.current, gpus=self._gpu_metrics, launched=settings.launched)
        self._gpus = self._new_gpu_watch() if settings.dcgm_url else None
        self._preflight = None if settings.preflight is None else self._new_preflight_watch(settings.preflight)
        self._membership = self._new_membership()
        self._report_connection, self._reporter = self._new_reporter()
        self._status_loop = self._loop("heartbeat", self._watch_status, c.STATUS_POLL_SECONDS)
        self._report_loop = self._loop("reports", self._reporter.step, c.REPORT_TIMEOUT_SECONDS)
        self._notice_loops = [self._notice_loop(source) for source in self._sources()]
        self._loops = [
            self._status_loop,
            self._report_loop,
            self._loop("membership", self._membership.step, c.MEMBERSHIP_TIMEOUT_SECONDS),
            *self._notice_loops,
        ]
        if self._gpus is not None:
            self._loops.append(self._loop("gpus", self._gpus.tick, c.SOURCE_BACKOFF_ABSENT_SECONDS))
        if self._preflight is not None:
            self._loops.append(self._loop("preflight", self._preflight.tick, c.PREFLIGHT_DONE_SECONDS))
        self._server = Server(settings.address, settings.port, self._pages())

    def start(self) -> int:
        """Start all threads and return the port of the metrics."""
        self._launcher.poll()  # first, so that the first report does not miss a running launcher
        for loop in self._loops:
            loop.thread.start()
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="http", daemon=True).start()
        return self._server.port

    def stop(self) -> bool:
        """Send the last report.

        The other threads end with the process, because their files are complete at any time.
        """
        self._stop.set()
        self._report_loop.wake()
        self._report_loop.thread.join(0.2)
        if self._report_loop.thread.is_alive():
            self._report_connection.abort()
            self._report_loop.thread.join(1.0)
        return self._reporter.send_final(self._connect()[0], time.sleep)

    def _loop(self, name: str, step: Callable[[], float], longest: float) -> Loop:
        return Loop(name=name, step=step, stop=self._stop, clock=self._clock, limit=longest + 30.0)

    # What it watches

    def _sources(self) -> list[Source]:
        return interruptions.build(
            self._settings, self._clock.monotonic, self._ledger.committed, self._metrics.poll_error
        )

    def _notice_loop(self, source: Source) -> Loop:
        poller = InterruptionPoller(
            source,
            self._ledger,
            self._clock,
            self._jitter,
            on_notice=self._noticed,
            on_error=self._metrics.poll_error,
        )
        return self._loop(source.name, poller.tick, c.SOURCE_BACKOFF_ABSENT_SECONDS + source.longest)

    def _request_checkpoint(self, error: GpuError) -> None:
        notice = notice_of(error, timedelta(seconds=self._settings.checkpoint_deadline_seconds))
        if self._ledger.publish(notice):
            self._noticed(notice)

    def _noticed(self, notice: Notice) -> None:
        self._metrics.notice(notice)
        self._report_loop.wake()

    def _new_gpu_watch(self) -> GpuWatch:
        return GpuWatch(
            Connection(self._settings.dcgm_url, self._clock.monotonic, max_bytes=c.MAX_EXPORTER_BYTES),
            self._settings.pod,
            self._settings.run_dir,
            self._clock,
            self._jitter,
            launcher_gpus=self._launcher.gpus,
            on_serious=self._request_checkpoint,
            on_news=self._wake_reports,
            on_error=self._metrics.poll_error,
        )

    def _new_preflight_watch(self, asked: PreflightSettings) -> PreflightWatch:
        gpus = self._gpus
        return PreflightWatch(
            asked,
            self._settings.run_dir,
            self._clock,
            gpus=None if gpus is None else lambda: gpu_health(gpus.view()),
            visible=self._launcher.gpus,
            launcher=self._launcher.current,
            on_news=self._wake_reports,
        )

    def _watch_status(self) -> float:
        if self._launcher.poll():
            self._report_loop.wake()
        if self._ledger.acknowledged():  # the trainer may leave soon, and a cloud waits for the approval
            for loop in self._notice_loops:
                loop.wake()
        return c.STATUS_POLL_SECONDS

    # What it reports

    def _connect(self) -> tuple[OperatorApi, Connection]:
        at = self._settings
        return connect(at.operator_url, at.token_file, at.ca_file, self._clock.monotonic)

    def _new_membership(self) -> Membership:
        api, connection = self._connect()
        return Membership(
            api,
            self._settings.run_dir,
            self._clock,
            self._jitter,
            abort=connection.abort,
            on_stored=self._metrics.stored,
        )

    def _new_reporter(self) -> tuple[Connection, Reporter]:
        api, connection = self._connect()
        return connection, Reporter(
            api=api,
            pod=self._settings.pod,
            start_id=secrets.token_hex(6),
            launcher=self._launcher,
            ledger=self._ledger,
            clock=self._clock,
            jitter=self._jitter,
            on_result=self._metrics.report,
            on_revision=self._membership.expect,
            gpu=lambda: () if self._gpus is None else self._gpus.view().errors,
            preflight=lambda: None if self._preflight is None else self._preflight.view(),
            on_answer=self._answered,
        )

    def _answered(self, answer: Response, elapsed: float, ready: bool) -> None:
        if self._preflight is not None:
            self._preflight.on_report_answer(answer, elapsed, ready=ready)

    def _wake_reports(self) -> None:
        self._report_loop.wake()

    # What it serves

    def _pages(self) -> Pages:
        return {
            "/metrics": metrics_page(self._metrics.render),
            "/healthz": probe_page(self._stuck),
            "/readyz": probe_page(self._unready),
        }

    def _gpu_metrics(self) -> Iterator[Metric]:
        if self._gpus is not None:
            yield from gpu_metrics.metrics(self._gpus.view(), self._clock)

    def _stuck(self) -> list[str]:
        return [problem for loop in self._loops if (problem := loop.problem())]

    def _unready(self) -> list[str]:
        """Ready when the launcher's status is watched.

        An unreachable operator does not matter, because training continues.
        """
        return self._stuck() or ([] if self._status_loop.rounds else ["heartbeat has not begun"])


def gpu_health(view: View) -> GpuHealth:
    """Return the GPU facts for the preflight checks."""
    return GpuHealth(count=len(view.gpus), answers=view.answers, faults=view.faults())


def _fatal(args: threading.ExceptHookArgs) -> None:
    """End the process if a thread fails unexpectedly. The kubelet restarts it."""
    name = args.thread.name if args.thread else "a thread"
    _log.critical("%s failed", name, exc_info=args.exc_value)
    os._exit(c.EXIT_FAULT)


def run(stopping: Collection[signal.Signals]) -> int:
    """Run until one of these signals, which the caller has blocked. SIGTERM arrives after the trainer has ended."""
    logs.set_up()
    try:
        settings = read_environment()
    except SettingsError as error:
        _log.critical("%s", error)
        return c.EXIT_SETTINGS
    logs.set_up(settings.pod)
    threading.excepthook = _fatal
    try:
        sidecar = Sidecar(settings, SystemClock())
    except OSError as error:
        _log.critical("cannot listen on port %d: %s", settings.port, error.strerror)
        return c.EXIT_FAULT
    port = sidecar.start()
    _log.info("holdfast-sidecar %s watches %s, metrics on port %d", __version__, settings.run_dir, port)
    received = signal.sigwait(stopping)
    _log.info("%s: sending the last report", signal.Signals(received).name)
    sidecar.stop()
    sys.stderr.flush()
    os._exit(0)  # daemon threads may be in a long poll; no data is left to flush
