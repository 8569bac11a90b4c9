"""Polls the node's exporter and keeps the errors: the only module of this folder with I/O.

Errors and counters are also stored in a file of the run directory. So a restarted sidecar neither forgets an error
nor counts it again.
"""

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast_sidecar import constants as c
from holdfast_sidecar.errors import ContractError, SidecarError, SourceError
from holdfast_sidecar.gpu import rules
from holdfast_sidecar.gpu.detector import GpuState, GpuStates, LastXid, XidCounts, judge
from holdfast_sidecar.gpu.error_log import merged, new_serious
from holdfast_sidecar.gpu.exposition import Sample, read
from holdfast_sidecar.protocol.document import Document, dump_document, parse_document
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.report import Pod
from holdfast_sidecar.run_dir.files import read_small, write_atomically
from holdfast_sidecar.runtime.backoff import backoff
from holdfast_sidecar.runtime.clock import Clock
from holdfast_sidecar.runtime.http import Transport
from holdfast_sidecar.runtime.logs import Transitions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of the pod's GPUs at one moment."""

    answers: bool | None = None
    """Whether the exporter's last answer could be used; None before the first."""
    sampled_at: float | None = None
    """Monotonic time of the last usable answer."""
    sample: Sample = field(default_factory=lambda: Sample(gpus=()))
    gpus: GpuStates = field(default_factory=dict)
    """The state of each GPU."""
    errors: tuple[GpuError, ...] = ()

    def faults(self) -> tuple[str, ...]:
        """Return the errors with the advice to leave the node, and memory errors that need a reset."""
        found = [error.message for error in self.errors if error.action == rules.REPLACE_NODE]
        for gpu in self.sample.gpus:
            count = next((gpu.values[name] for name in rules.VOLATILE_DOUBLE_BIT if name in gpu.values), 0.0)
            if count > 0:
                name = gpu.uuid if gpu.index is None else str(gpu.index)
                found.append(f"GPU {name}: {count:.0f} uncorrectable memory errors since its driver was loaded")
        return tuple(found)


class GpuWatch:
    """`tick` belongs to one thread, `view` to all.

    `launcher_gpus` gives the UUIDs that the launcher sees. `on_serious` gets each new error with the advice to leave
    the node.
    """

    def __init__(
        self,
        transport: Transport,
        pod: Pod,
        run_dir: Path,
        clock: Clock,
        jitter: Callable[[float, float], float],
        *,
        launcher_gpus: Callable[[], Collection[str]] = lambda: (),
        on_serious: Callable[[GpuError], None] = lambda _: None,
        on_news: Callable[[], None] = lambda: None,
        on_error: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._transport = transport
        self._pod = pod
        self._path = run_dir / c.GPU_FILE
        self._clock = clock
        self._jitter = jitter
        self._launcher_gpus = launcher_gpus
        self._on_serious = on_serious
        self._on_news = on_news
        self._on_error = on_error
        self._lock = threading.Lock()
        self._failures = 0
        self._unrequested: tuple[GpuError, ...] = ()
        self._state = Transitions(_log)
        self._written: Document | None = None
        self._view = self._remembered()

    def view(self) -> View:
        """Return the results so far."""
        with self._lock:
            return self._view

    def tick(self) -> float:
        """Poll once and return the seconds until the next poll."""
        try:
            self._take(self._ask())
            self._keep()
        except (SidecarError, OSError) as error:
            return self._failed(error)
        self._failures = 0
        return self._jitter(c.GPU_POLL_SECONDS * 0.8, c.GPU_POLL_SECONDS)

    def _ask(self) -> Sample:
        response = self._transport.request("GET", "", headers={}, body=None, timeout=c.EXPORTER_TIMEOUT_SECONDS)
        if response.status != 200:
            raise SourceError(f"the GPU exporter answered {response.status}")
        sample = read(response.body, self._pod, known=self._view.gpus.keys(), launcher_gpus=self._launcher_gpus())
        if not sample.present:
            raise SourceError("the GPU exporter's answer shows no GPU")
        return sample

    def _take(self, sample: Sample) -> None:
        now = self._clock.monotonic()
        gpus, findings = judge(self._view.gpus, sample, now)
        errors = merged(self._view.errors, findings, self._clock.now())
        self._unrequested += new_serious(self._view.errors, errors)
        with self._lock:
            self._view = View(answers=True, sampled_at=now, sample=sample, gpus=gpus, errors=errors)
        count = len(gpus)
        shown = (
            f"the GPU exporter shows {count} GPU(s) of this pod" if count else "the GPU exporter shows none of ours"
        )
        self._state(logging.INFO if count else logging.WARNING, f"{count}", shown)
        if findings:
            for error in errors[-len({(f.uuid, f.kind, f.xid) for f in findings}) :]:
                _log.warning("%s (%s; advice: %s)", error.message, error.gpu, error.action)
            self._on_news()
        # Before `_keep`, so a sidecar killed here finds the error again. If the request cannot be written, the next
        # poll repeats it, and the report contains the error already.
        while self._unrequested:
            self._on_serious(self._unrequested[0])
            self._unrequested = self._unrequested[1:]

    def _failed(self, error: Exception) -> float:
        self._failures += 1
        self._on_error(c.GPU_SOURCE)
        with self._lock:
            self._view = replace(self._view, answers=False)
        longest = c.SOURCE_BACKOFF_ABSENT_SECONDS if self._view.sampled_at is None else c.GPU_POLL_SECONDS
        self._state(logging.WARNING, "fails", f"nothing is known of the GPUs for now: {error}")
        return backoff(self._failures, first=1.0, longest=longest, jitter=self._jitter)

    # Memory

    def _keep(self) -> None:
        document: Document = {
            "version": c.VERSION,
            "errors": [error.as_report() for error in self._view.errors],
            "gpus": {track.uuid: _memory(track) for track in self._view.gpus.values()},
        }
        if document != self._written:
            write_atomically(self._path, dump_document(document))
            self._written = document

    def _remembered(self) -> View:
        try:
            data = read_small(self._path)
            if data is None:
                return View()
            document = parse_document(data, self._path.name)
            errors = tuple(GpuError.from_report(entry) for entry in document["errors"][-c.MAX_GPU_ERRORS :])
            now = self._clock.monotonic()
            gpus = {uuid: _track(uuid, memory, now) for uuid, memory in document["gpus"].items()}
        except (ContractError, KeyError, TypeError, ValueError, AttributeError, OSError, OverflowError) as error:
            _log.error("%s was not written by this sidecar and is recreated: %s", self._path.name, error)
            return View()
        return View(gpus=gpus, errors=errors)


def _memory(track: GpuState) -> Document:
    counts = track.xids.counts
    xids = None if counts is None else {str(xid): count for xid, count in counts.items()}
    return {
        "index": track.index,
        "fields": dict(track.fields),
        "xid": track.last_xid.xid,
        "xids": xids,
        "told": sorted(track.told),
    }


def _track(uuid: str, memory: Document, now: float) -> GpuState:
    xids = memory["xids"]
    return GpuState(
        uuid=uuid,
        index=None if memory["index"] is None else int(memory["index"]),
        fields={str(name): float(value) for name, value in memory["fields"].items()},
        last_xid=LastXid(int(memory["xid"])),
        xids=XidCounts(None if xids is None else {int(xid): float(count) for xid, count in xids.items()}),
        told=frozenset(map(str, memory["told"])),
        moved_at=now,
    )
