"""All metrics of one sidecar. `docs/reference/metrics.md` documents their names."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast_sidecar import __version__
from holdfast_sidecar.metrics import launcher
from holdfast_sidecar.metrics.families import gauge
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus
from holdfast_sidecar.runtime.clock import Clock


class Metrics:
    """Counts the sidecar's events and renders them with the newest launcher status. Thread-safe."""

    def __init__(
        self,
        clock: Clock,
        status: Callable[[], LauncherStatus],
        *,
        gpus: Callable[[], Iterator[Metric]] = lambda: iter(()),
        launched: bool = True,
    ) -> None:
        self._clock = clock
        self._status = status
        self._gpus = gpus
        self._launched = launched
        self._lock = threading.Lock()
        self._reports: Counter[str] = Counter({"ok": 0, "failed": 0})
        self._notices: Counter[tuple[str, str]] = Counter()
        self._errors: Counter[str] = Counter()
        self._accepted_at: float | None = None
        self._revision = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def report(self, ok: bool) -> None:
        """Count a report that the operator accepted, or one that failed."""
        with self._lock:
            self._reports["ok" if ok else "failed"] += 1
            if ok:
                self._accepted_at = self._clock.now().timestamp()

    def notice(self, notice: Notice) -> None:
        """Count a notice that was passed to the launcher."""
        with self._lock:
            self._notices[notice.source, notice.action] += 1

    def poll_error(self, source: str) -> None:
        """Count a request to a source without a valid response."""
        with self._lock:
            self._errors[source] += 1

    def stored(self, revision: int) -> None:
        """Set the revision of the stored membership."""
        with self._lock:
            self._revision = revision

    def render(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all families. The registry calls this method for each scrape."""
        with self._lock:
            yield from self._own()
        current = self._status()
        if self._launched:
            silent_seconds = current.silent_seconds(self._clock.monotonic())
            yield from launcher.liveness(current, self._clock.now().timestamp() - silent_seconds)
        yield from self._gpus()
        if current.status is not None:
            yield from launcher.metrics(current.status)

    def _own(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("holdfast_sidecar_info", "Version of the sidecar; always 1", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        reports = CounterMetricFamily(
            "holdfast_sidecar_reports", "Reports to the operator, by result", labels=["result"]
        )
        for result, count in self._reports.items():
            reports.add_metric([result], count)
        yield reports
        notices = CounterMetricFamily(
            "holdfast_sidecar_notices", "Notices passed to the launcher", labels=["source", "action"]
        )
        for (source, action), count in self._notices.items():
            notices.add_metric([source, action], count)
        yield notices
        errors = CounterMetricFamily(
            "holdfast_sidecar_poll_errors", "Requests to a source without a valid response", labels=["source"]
        )
        for source, count in self._errors.items():
            errors.add_metric([source], count)
        yield errors
        yield gauge("holdfast_membership_revision", "Revision of the stored membership", self._revision)
        if self._accepted_at is not None:
            text = "Unix time of the last report that the operator accepted"
            yield gauge("holdfast_sidecar_last_report_timestamp_seconds", text, self._accepted_at)
