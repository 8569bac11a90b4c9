"""What the sidecar exports. Names are documented in `docs/reference/sidecar.md`."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast_sidecar import __version__
from holdfast_sidecar.errors import MalformedError
from holdfast_sidecar.metrics import accounting
from holdfast_sidecar.protocol.document import Document, parse_time
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus
from holdfast_sidecar.runtime.clock import Clock

# The cause of what a launcher counts without one: an older release.
_UNTOLD: Final = "Unknown"


class Metrics:
    """Counts what happens and turns it, with the newest status, into Prometheus's text."""

    def __init__(
        self,
        clock: Clock,
        launcher: Callable[[], LauncherStatus],
        *,
        gpus: Callable[[], Iterator[Metric]] = lambda: iter(()),
        launched: bool = True,
    ) -> None:
        self._clock = clock
        self._launcher = launcher
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
        """A report was taken, or not."""
        with self._lock:
            self._reports["ok" if ok else "failed"] += 1
            if ok:
                self._accepted_at = self._clock.monotonic()

    def notice(self, notice: Notice) -> None:
        """A notice was passed on."""
        with self._lock:
            self._notices[notice.source, notice.action] += 1

    def poll_error(self, source: str) -> None:
        """A source gave no usable answer."""
        with self._lock:
            self._errors[source] += 1

    def stored(self, revision: int) -> None:
        """A membership was stored."""
        with self._lock:
            self._revision = revision

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        with self._lock:
            yield from self._own()
        launcher = self._launcher()
        if self._launched:
            yield from _silence(launcher, self._clock.monotonic())
        yield from self._gpus()
        if launcher.status is not None:
            yield from _launcher(launcher.status, self._clock.now())

    def _own(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("holdfast_sidecar_info", "The sidecar's version", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        reports = CounterMetricFamily(
            "holdfast_sidecar_reports", "Reports to the operator by result", labels=["result"]
        )
        for result, count in self._reports.items():
            reports.add_metric([result], count)
        yield reports
        notices = CounterMetricFamily(
            "holdfast_sidecar_notices", "Notices passed on to the launcher", labels=["source", "action"]
        )
        for (source, action), count in self._notices.items():
            notices.add_metric([source, action], count)
        yield notices
        errors = CounterMetricFamily(
            "holdfast_sidecar_poll_errors", "Questions to a source without a usable answer", labels=["source"]
        )
        for source, count in self._errors.items():
            errors.add_metric([source], count)
        yield errors
        yield _gauge("holdfast_membership_revision", "Revision of the stored membership", self._revision)
        if self._accepted_at is not None:
            age = self._clock.monotonic() - self._accepted_at
            yield _gauge("holdfast_sidecar_report_age_seconds", "Seconds since the operator took a report", age)


def _silence(launcher: LauncherStatus, monotonic: float) -> Iterator[Metric]:
    silent = launcher.silent_seconds(monotonic)
    yield _gauge("holdfast_launcher_silent_seconds", "Seconds since the launcher last wrote its status", silent)
    yield _gauge("holdfast_launcher_silent", "1 if the launcher has spoken and fell silent", float(launcher.silent))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _launcher(status: Document, now: datetime) -> Iterator[Metric]:
    """Gauges of the launcher's status; what the status does not say, or says strangely, is left out."""
    ranks = [rank for rank in _list(status.get("ranks")) if isinstance(rank, dict)]
    steps = [float(rank["step"]) for rank in ranks if _number(rank.get("step"))]
    numbers: dict[str, tuple[str, Any]] = {
        "holdfast_step": ("The highest step of a rank process here", max(steps, default=None)),
        "holdfast_committed_step": ("The last committed step", status.get("committedStep")),
        "holdfast_loss": ("The loss of the last committed step", status.get("loss")),
        "holdfast_gradient_norm": ("The norm of the last committed step's gradients", status.get("gradientNorm")),
        "holdfast_samples_per_second": ("Samples a second", status.get("throughput")),
        "holdfast_step_seconds": ("Seconds that a step takes", status.get("stepSeconds")),
        "holdfast_steps_per_second": ("Steps a second", _pace(status, now)),
        "holdfast_warm_processes": ("Processes that stand by for a lost rank", status.get("warmProcesses")),
    }
    for name, (text, value) in numbers.items():
        if value is not None and _number(value):
            yield _gauge(name, text, float(value))
    if isinstance(phase := status.get("phase"), str):
        family = GaugeMetricFamily("holdfast_launcher_phase", "1 for the launcher's phase", labels=["phase"])
        family.add_metric([_label(phase)], 1)
        yield family
    yield from _age_of_step(status.get("committedAt"), now)
    yield from _world(status.get("world"))
    yield from _checkpoints(status.get("checkpoints"), now)
    yield from _failing_checkpoints(status.get("checkpointsFailing"), now)
    yield from _failed_checkpoints(status.get("checkpointFailures"), status.get("checkpointFailureCauses"))
    yield from _written(status.get("checkpointWrites"))
    yield from _restores(status)
    yield from _uploads(status.get("uploads"))
    yield from _refused(status.get("refusedPeers"))
    yield from accounting.metrics(status.get("accounting"))


def _age_of_step(committed_at: object, now: datetime) -> Iterator[Metric]:
    """How long nothing was committed; nothing before the first step."""
    with contextlib.suppress(MalformedError):
        age = (now - parse_time(str(committed_at))).total_seconds()
        yield _gauge("holdfast_committed_step_age_seconds", "Seconds since the last committed step", max(0.0, age))


def _pace(status: Document, now: datetime) -> float | None:
    """Steps a second as they were made, or as few as the wait for the next one leaves."""
    seconds, at = status.get("stepSeconds"), status.get("committedAt")
    if seconds is None or not _number(seconds) or seconds <= 0 or not isinstance(at, str):
        return None
    try:
        waited = (now - parse_time(at)).total_seconds()
    except MalformedError:
        return None
    return 1.0 / max(float(seconds), waited)


def _world(world: object) -> Iterator[Metric]:
    """The world that runs here; no gauge at all while there is none."""
    if not isinstance(world, dict):
        return
    numbers = {
        "holdfast_world_generation": ("Generation of the world that runs here", world.get("generation")),
        "holdfast_world_attempt": ("Attempt of the world that runs here", world.get("attempt")),
        "holdfast_world_workers": ("Workers in the world that runs here", len(_list(world.get("members")))),
    }
    for name, (text, value) in numbers.items():
        if value is not None and _number(value):
            yield _gauge(name, text, float(value))


def _checkpoints(checkpoints: object, now: datetime) -> Iterator[Metric]:
    step = GaugeMetricFamily("holdfast_checkpoint_step", "Step of the newest durable commit", labels=["tier"])
    age = GaugeMetricFamily("holdfast_checkpoint_age_seconds", "Age of the newest durable commit", labels=["tier"])
    for tier, commit in checkpoints.items() if isinstance(checkpoints, dict) else ():
        if not isinstance(commit, dict):
            continue
        if _number(commit.get("step")):
            step.add_metric([_label(tier)], commit["step"])
        try:
            age.add_metric([_label(tier)], (now - parse_time(str(commit.get("time")))).total_seconds())
        except MalformedError:
            continue
    yield step
    yield age


def _failing_checkpoints(tiers: object, now: datetime) -> Iterator[Metric]:
    """Tiers on which the last commit failed; none while they are durable."""
    text = "Seconds since the first of the commits that failed in a row, by tier and the last one's cause"
    family = GaugeMetricFamily("holdfast_checkpoint_failing_seconds", text, labels=["tier", "cause"])
    for tier, failing in tiers.items() if isinstance(tiers, dict) else ():
        with contextlib.suppress(MalformedError):
            if isinstance(failing, dict):
                seconds = (now - parse_time(str(failing.get("since")))).total_seconds()
                family.add_metric([_label(tier), _label(str(failing.get("cause")))], max(0.0, seconds))
    yield family


def _failed_checkpoints(failures: object, by_cause: object) -> Iterator[Metric]:
    """Commits that failed on any rank; training went on from the one before. Older launchers tell no causes."""
    if not isinstance(failures, dict):
        return
    text = "Commits that failed, by tier and cause"
    family = CounterMetricFamily("holdfast_checkpoint_failures", text, labels=["tier", "cause"])
    for tier, count in failures.items():
        if not _number(count):
            continue
        told = by_cause.get(tier) if isinstance(by_cause, dict) else None
        causes = told if isinstance(told, dict) else {_UNTOLD: count}
        for cause, some in causes.items():
            if _number(some):
                family.add_metric([_label(tier), _label(cause)], some)
    yield family


def _written(writes: object) -> Iterator[Metric]:
    """Commits of which ranks here wrote a part, by tier."""
    if not isinstance(writes, dict):
        return
    texts = {
        "commits": ("holdfast_checkpoint_commits", "Commits that are durable, by tier"),
        "bytes": ("holdfast_checkpoint_bytes", "Bytes of them that ranks here wrote, by tier"),
        "seconds": ("holdfast_checkpoint_write_seconds", "Seconds from their beginning to their end, by tier"),
    }
    for field, (name, text) in texts.items():
        family = CounterMetricFamily(name, text, labels=["tier"])
        for tier, written in writes.items():
            if isinstance(written, dict) and _number(written.get(field)):
                family.add_metric([_label(tier)], written[field])
        yield family


def _restores(status: Document) -> Iterator[Metric]:
    """Every byte of a checkpoint that is restored is verified: what failed is a fallback."""
    found = status.get("restores")
    if isinstance(found, dict):
        family = CounterMetricFamily(
            "holdfast_restores", "Attempts whose state was there, by origin", labels=["origin"]
        )
        for origin, count in found.items():
            if _number(count):
                family.add_metric([_label(origin)], count)
        yield family
    if _number(status.get("fallbacks")):
        text = "Commits, or copies of them, that restores found damaged and passed by"
        yield CounterMetricFamily("holdfast_checkpoint_fallbacks", text, value=status["fallbacks"])


def _refused(count: object) -> Iterator[Metric]:
    """Who did not hold the job's key."""
    if isinstance(count, int) and _number(count):
        text = "Connections turned away before they proved that they hold the job's key"
        yield CounterMetricFamily("holdfast_refused_peers", text, value=count)


def _uploads(uploads: object) -> Iterator[Metric]:
    """Commits that this launcher copied to a store of objects; nothing where none is wanted."""
    if not isinstance(uploads, dict):
        return
    texts = {
        "commits": ("holdfast_upload_commits", "Commits copied to the object store"),
        "bytes": ("holdfast_upload_bytes", "Bytes copied to the object store"),
        "seconds": ("holdfast_upload_seconds", "Seconds of uploads that arrived"),
    }
    for field, (name, text) in texts.items():
        if _number(uploads.get(field)):
            yield CounterMetricFamily(name, text, value=uploads[field])
    failures = CounterMetricFamily("holdfast_upload_failures", "Uploads that failed, by cause", labels=["cause"])
    found = uploads.get("failures")
    for cause, count in found.items() if isinstance(found, dict) else ():
        if _number(count):
            failures.add_metric([_label(cause)], count)
    yield failures


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _label(text: str) -> str:
    """A label that any scraper takes, whatever the launcher wrote."""
    return text[:64].encode(errors="replace").decode()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
