"""The effects of a cloud's notice: touch file, agreed checkpoint, and the end of the worker.

They are observed from outside: the files in the pod's run directory, the checkpoint on the volume, and the pod's
status. Times are those of the files, each of which is written once and completely. All nodes share this machine's
clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from holdfast_testbed.drill.job_view import AttemptId
from holdfast_testbed.drill.script_log import COMMIT, Note

if TYPE_CHECKING:
    from holdfast_testbed.drill.faults import DrillJob
    from holdfast_testbed.drill.watcher import PodView

RUN_DIR = "/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/holdfast-run"
NOTICES_FILE = "sidecar-notices.json"
"""The sidecar writes this file right after the touch file, which a launcher may remove at once."""
ACK_FILE = "emergency_checkpoint.ack"
COMMITTED = "Committed"
LEFT_ON_REQUEST = 75
_LOOK_SECONDS = 0.02
_SLACK = 1.0
"""The time of a file may be that of the clock's last tick. Files of other trials are much older."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """One worker that had to leave, in Unix times. None: the event did not occur."""

    noticed: float
    deadline: float
    """The cloud's deadline."""
    touched: float | None = None
    """The time at which the sidecar had forwarded the notice."""
    answered: float | None = None
    """The time at which the launcher had acknowledged the checkpoint, which is published then."""
    result: str = ""
    step: int = 0
    shards: int = 0
    """The ranks whose part is on the volume."""
    exit_code: int | None = None


def complaints(seen: Departure, world: AttemptId, workers: int, told: Iterable[Note]) -> tuple[str, ...]:
    """Return why this was no agreed checkpoint: it needs all ranks, in time, and no later step of that world."""
    if seen.touched is None:
        return ("the notice never reached the pod's touch-file",)
    found = []
    if seen.answered is None or seen.result != COMMITTED:
        found.append(f"the checkpoint was not acknowledged: {seen.result or 'no answer'}")
    elif seen.answered > seen.deadline:
        found.append(f"the checkpoint was acknowledged {seen.answered - seen.deadline:.1f} s after the deadline")
    if seen.shards != workers:
        found.append(f"{seen.shards} of {workers} ranks are in the checkpoint of step {seen.step}")
    last = max((note.step for note in told if note.do == COMMIT and note.attempt_id == world), default=0)
    if last != seen.step:
        found.append(f"the attempt's last step is {last}, its checkpoint is of step {seen.step}")
    if seen.exit_code != LEFT_ON_REQUEST:
        found.append(f"the worker ended with {seen.exit_code}, not {LEFT_ON_REQUEST}")
    return tuple(found)


def exit_code(pod: Mapping[str, Any]) -> int | None:
    """Return the exit code of the pod's trainer; None while it runs."""
    for status in pod.get("status", {}).get("containerStatuses", ()):
        ended = status.get("state", {}).get("terminated") if status["name"] == "trainer" else None
        if ended is not None:
            return int(ended["exitCode"])
    return None


class Witness:
    """Observes one leaving worker, starting before the notice, because its files are deleted with its pod."""

    def __init__(self, job: DrillJob, pod: PodView, world: AttemptId) -> None:
        self._job, self._pod = job, pod
        self._run_dir = job.cluster.node(job.node_number(pod)).inside(RUN_DIR.format(uid=pod.uid))
        self._commit_suffix = f"g{world.generation}.a{world.attempt}"
        self._began = time.time()
        self._touched: float | None = None
        self._answered: float | None = None
        self._answer: dict[str, Any] = {}
        self._shards = 0
        self._exit: int | None = None
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=target.__name__, daemon=True)
            for target in (self._look_at_files, self._await_end)
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, *, noticed: float, deadline: float, patience: float) -> Departure:
        """Return all observations once the worker has ended; wait for this at most `patience` seconds."""
        end = time.monotonic() + patience
        while self._exit is None and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        self._stop.set()
        self._threads[0].join()
        return Departure(
            noticed=noticed,
            deadline=deadline,
            touched=self._touched,
            answered=self._answered,
            result=str(self._answer.get("result", "")),
            step=int(self._answer.get("step", 0)),
            shards=self._shards,
            exit_code=self._exit,
        )

    def _look_at_files(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._touched = self._touched or self._written(NOTICES_FILE)
            if self._answered is None and (written := self._written(ACK_FILE)) is not None:
                self._take_answer(written)

    def _take_answer(self, written: float) -> None:
        try:
            self._answer = json.loads((self._run_dir / ACK_FILE).read_text())
        except FileNotFoundError:
            return
        commit: Path = self._job.checkpoints / f"step-{self._answer['step']}.{self._commit_suffix}"
        whole = (commit / "MANIFEST.json").exists()
        self._shards = len(list(commit.glob("rank-*.safetensors"))) if whole else 0
        self._answered = written

    def _written(self, name: str) -> float | None:
        """Return the time of the file's write, if it is later than the beginning."""
        try:
            written = (self._run_dir / name).stat().st_mtime
        except FileNotFoundError:
            return None
        return written if written > self._began - _SLACK else None

    def _await_end(self) -> None:
        """Watch the pod, because the operator may delete an ended pod between two polls."""
        core = client.CoreV1Api(self._job.cluster.api_client())
        while not self._stop.is_set() and self._exit is None:
            try:
                self._watch_once(core)
            except (ApiException, HTTPError, OSError):
                self._stop.wait(_LOOK_SECONDS)

    def _watch_once(self, core: client.CoreV1Api) -> None:
        source: Any = watch.Watch  # the library's class has no types
        events = source().stream(
            core.list_namespaced_pod,
            self._job.watcher.namespace,
            field_selector=f"metadata.name={self._pod.name}",
            timeout_seconds=10,
        )
        for event in events:
            self._exit = exit_code(event["raw_object"])
            if self._exit is not None:
                return
