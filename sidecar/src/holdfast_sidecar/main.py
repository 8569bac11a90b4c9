"""The process: one thread for each thing that waits, and the main thread for the signal that ends it."""

import logging
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client.core import Metric

from holdfast_sidecar import __version__, interruptions
from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import SettingsError
from holdfast_sidecar.gpu import metrics
from holdfast_sidecar.gpu.monitor import GpuWatch, View
from holdfast_sidecar.interruptions.poller import InterruptionPoller
from holdfast_sidecar.interruptions.source import Source
from holdfast_sidecar.metrics.launcher import Metrics
from holdfast_sidecar.metrics.server import Pages, Server, metrics_page, probe_page
from holdfast_sidecar.operator_api.client import connect
from holdfast_sidecar.operator_api.membership import Membership
from holdfast_sidecar.operator_api.reporter import Reporter
from holdfast_sidecar.preflight.checks import GpuHealth
from holdfast_sidecar.preflight.runner import PreflightWatch
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.protocol.preflight import Preflight
from holdfast_sidecar.run_dir.emergency_checkpoint import NoticeLedger
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher
from holdfast_sidecar.runtime import logs
from holdfast_sidecar.runtime.clock import Clock, SystemClock
from holdfast_sidecar.runtime.http import Connection, Response
from holdfast_sidecar.runtime.loop import Loop
from holdfast_sidecar.settings import Settings, read_environment

_log = logging.getLogger("holdfast_sidecar")


class Sidecar:
    """All parts of one sidecar, put together."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock, self._uniform = clock, random.SystemRandom().uniform
        self._stop = threading.Event()
        self._heartbeat = LauncherStatusWatcher(settings.run_dir, clock)
        self._metrics = Metrics(clock, self._heartbeat.current, gpus=self._gpu_metrics, launched=settings.launched)
        self._gpu_watch = self._build_gpu_watch(settings)
        self._preflight_watch = self._build_preflight_watch(settings)
        self._ledger = ledger = NoticeLedger(settings.run_dir)
        self._where = (settings.operator_url, settings.token_file, settings.ca_file, clock.monotonic)
        membership_api, membership_connection = connect(*self._where)
        report_api, self._report_connection = connect(*self._where)
        membership = Membership(
            membership_api,
            settings.run_dir,
            clock,
            self._uniform,
            abort=membership_connection.abort,
            on_stored=self._metrics.stored,
        )
        self._reporter = Reporter(
            api=report_api,
            pod=settings.pod,
            start_id=secrets.token_hex(6),
            heartbeat=self._heartbeat,
            ledger=ledger,
            clock=clock,
            uniform=self._uniform,
            on_result=self._metrics.report,
            on_revision=membership.expect,
            gpu=self._gpu_errors,
            preflight=self._preflight,
            on_answer=self._answered,
        )
        self._reports = self._loop("reports", self._reporter.step, c.REPORT_TIMEOUT_SECONDS)
        self._loops = [
            self._loop("heartbeat", self._watch_status, c.STATUS_POLL_SECONDS),
            self._reports,
            self._loop("membership", membership.step, c.MEMBERSHIP_TIMEOUT_SECONDS),
        ]
        found = interruptions.build(settings, clock.monotonic, ledger.committed, self._metrics.poll_error)
        self._watches = [self._watch(source, ledger) for source in found]
        self._loops += self._watches
        if self._gpu_watch is not None:
            self._loops.append(self._loop("gpus", self._gpu_watch.tick, c.SOURCE_BACKOFF_ABSENT_SECONDS))
        if self._preflight_watch is not None:
            self._loops.append(self._loop("preflight", self._preflight_watch.tick, c.PREFLIGHT_DONE_SECONDS))
        self._server = Server(settings.address, settings.port, self._pages())

    def start(self) -> int:
        """Start all threads; returns the port of the metrics."""
        self._heartbeat.poll()  # or the first report may say of a launcher that is there that there is none
        for loop in self._loops:
            loop.thread.start()
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="http", daemon=True).start()
        return self._server.port

    def finish(self) -> bool:
        """Send the last report. The other threads end with the process: all that they write is whole at any time."""
        self._stop.set()
        self._reports.wake()
        self._reports.thread.join(0.2)
        if self._reports.thread.is_alive():
            self._report_connection.abort()
            self._reports.thread.join(1.0)
        return self._reporter.last(connect(*self._where)[0], time.sleep)

    def _pages(self) -> Pages:
        return {
            "/metrics": metrics_page(self._metrics.render),
            "/healthz": probe_page(self._stuck),
            "/readyz": probe_page(self._unready),
        }

    def _build_gpu_watch(self, settings: Settings) -> GpuWatch | None:
        if not settings.dcgm_url:
            return None
        return GpuWatch(
            Connection(settings.dcgm_url, self._clock.monotonic, max_bytes=c.MAX_EXPORTER_BYTES),
            settings.pod,
            settings.run_dir,
            self._clock,
            self._uniform,
            told=self._heartbeat.gpus,
            on_news=self._wake_reports,
            on_error=self._metrics.poll_error,
        )

    def _build_preflight_watch(self, settings: Settings) -> PreflightWatch | None:
        if settings.preflight is None:
            return None
        return PreflightWatch(
            settings.preflight,
            settings.run_dir,
            self._clock,
            gpus=None if self._gpu_watch is None else self._gpu_health,
            visible=self._heartbeat.gpus,
            beat=self._heartbeat.current,
            on_news=self._wake_reports,
        )

    def _gpu_health(self) -> GpuHealth:
        return GpuHealth() if self._gpu_watch is None else gpu_health(self._gpu_watch.view())

    def _preflight(self) -> Preflight | None:
        return None if self._preflight_watch is None else self._preflight_watch.view()

    def _answered(self, answer: Response, took: float, ready: bool) -> None:
        if self._preflight_watch is not None:
            self._preflight_watch.answered(answer, took, ready=ready)

    def _wake_reports(self) -> None:
        self._reports.wake()

    def _gpu_errors(self) -> Sequence[GpuError]:
        return () if self._gpu_watch is None else self._gpu_watch.view().errors

    def _gpu_metrics(self) -> Iterator[Metric]:
        if self._gpu_watch is not None:
            yield from metrics.metrics(self._gpu_watch.view(), self._clock.monotonic())

    def _watch(self, source: Source, ledger: NoticeLedger) -> Loop:
        watcher = InterruptionPoller(
            source,
            ledger,
            self._clock,
            self._uniform,
            on_notice=self._noticed,
            on_error=self._metrics.poll_error,
        )
        return self._loop(source.name, watcher.tick, c.SOURCE_BACKOFF_ABSENT_SECONDS + source.longest)

    def _loop(self, name: str, step: Callable[[], float], longest: float) -> Loop:
        return Loop(name=name, step=step, stop=self._stop, clock=self._clock, limit=longest + 30.0)

    def _watch_status(self) -> float:
        if self._heartbeat.poll():
            self._reports.wake()
        if self._ledger.acknowledged():  # the trainer may be about to leave, and a cloud waits for our word
            for watch in self._watches:
                watch.wake()
        return c.STATUS_POLL_SECONDS

    def _noticed(self, notice: Notice) -> None:
        self._metrics.notice(notice)
        self._reports.wake()

    def _stuck(self) -> list[str]:
        return [problem for loop in self._loops if (problem := loop.problem())]

    def _unready(self) -> list[str]:
        """Ready when the launcher's status is watched. The operator being away is no reason: training goes on."""
        return self._stuck() or ([] if self._loops[0].rounds else ["heartbeat has not begun"])


def gpu_health(view: View) -> GpuHealth:
    """What the preflight checks use of the GPUs' state."""
    return GpuHealth(count=len(view.known.tracks), answers=view.answers, faults=view.faults())


def _fatal(args: threading.ExceptHookArgs) -> None:
    """A thread that fails for a reason nobody thought of ends the process: the kubelet starts a whole one."""
    name = args.thread.name if args.thread else "a thread"
    _log.critical("%s failed", name, exc_info=args.exc_value)
    os._exit(c.EXIT_FAULT)


def run(stopping: Collection[signal.Signals]) -> int:
    """Run until one of these signals, which the caller has blocked. SIGTERM comes after the trainer has ended."""
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
    sidecar.finish()
    sys.stderr.flush()
    os._exit(0)  # daemon threads may sit in a long poll; nothing is left to be flushed
