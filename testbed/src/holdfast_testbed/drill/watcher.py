"""A watcher of one job. It reads the resource and the pods' metrics a few times per second and keeps the results."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from holdfast_testbed.drill.job_view import AttemptId, JobView, Progress, parse_job, parse_metrics, progress_of

if TYPE_CHECKING:
    from holdfast_testbed.cluster.cluster import Cluster

POLL_SECONDS = 0.3
METRICS_PORT = 9464
JOB_LABEL = "holdfast.dev/job-name"


@dataclass(frozen=True, kw_only=True)
class PodView:
    name: str
    uid: str
    node: str
    ip: str
    phase: str
    deleting: bool
    index: int | None


class Watcher:
    """Polls in its own thread; readers receive consistent snapshots. Use it as a context manager."""

    def __init__(self, cluster: Cluster, namespace: str, job: str) -> None:
        self.namespace = namespace
        self.job = job
        api = cluster.api_client()
        self._custom = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll_until_stopped, name="watcher", daemon=True)
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="metrics")
        self._progress: list[Progress] = []
        self._job = JobView()
        self._pods: tuple[PodView, ...] = ()
        self._ended_by: Exception | None = None

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def view(self) -> JobView:
        with self._lock:
            return self._job

    @property
    def pods(self) -> tuple[PodView, ...]:
        with self._lock:
            return self._pods

    def since(self, at: float) -> list[Progress]:
        with self._lock:
            return [p for p in self._progress if p.at >= at]

    def newest(self) -> Progress | None:
        """Return the most advanced report: the highest world, then the highest step."""
        with self._lock:
            recent = self._progress[-64:]
        return max(recent, key=lambda p: (p.attempt_id, p.step), default=None)

    def warm(self, pod: str) -> int:
        """Return the number of standby processes in the launcher's last report."""
        with self._lock:
            told = [progress.warm for progress in self._progress[-64:] if progress.pod == pod]
        return told[-1] if told else 0

    def wait(self, what: str, condition: Callable[[], bool], timeout: float) -> None:
        """Return as soon as the condition holds. Raises TimeoutError with `what`."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._ended_by is not None:
                raise RuntimeError("the watcher has ended and receives no more changes") from self._ended_by
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout:.0f} s still waiting for: {what} (job is {self._describe()})")
            self._stop.wait(0.1)

    def wait_for_step(self, above: int, timeout: float) -> None:
        def reached() -> bool:
            newest = self.newest()
            return newest is not None and newest.step > above

        self.wait(f"a step above {above}", reached, timeout)

    def wait_for_world(self, size: int, steps: int, timeout: float) -> None:
        """Wait until a world of `size` ranks has been observed to complete `steps` steps."""
        first: dict[AttemptId, int] = {}

        def settled() -> bool:
            newest = self.newest()
            if newest is None or newest.workers != size or time.monotonic() - newest.at > 2:
                return False
            return newest.step >= first.setdefault(newest.attempt_id, newest.step) + steps

        self.wait(f"{steps} steps of a world of {size} workers", settled, timeout)

    def _describe(self) -> str:
        view = self.view
        return f"{view.phase or 'without status'}, ready {view.ready or '?'}, generation {view.generation}"

    def _poll_until_stopped(self) -> None:
        try:
            while not self._stop.wait(POLL_SECONDS):
                self._poll()
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self._ended_by = error

    def _poll(self) -> None:
        try:
            resource = self._read_job()
            pods = self._read_pods()
        except (ApiException, HTTPError, OSError, ValueError):
            return  # the API server itself may be the target of the fault
        view = parse_job(resource)
        running = [pod for pod in pods if pod.ip and pod.phase == "Running"]
        seen = [p for p in self._pool.map(_read_progress, running) if p is not None]
        with self._lock:
            self._job, self._pods = view, pods
            self._progress.extend(seen)

    def _read_job(self) -> dict[str, Any]:
        resource: Any = self._custom.get_namespaced_custom_object(
            "holdfast.dev", "v1alpha1", self.namespace, "faulttolerantjobs", self.job, _request_timeout=5
        )
        return dict(resource)

    def _read_pods(self) -> tuple[PodView, ...]:
        response: Any = self._core.list_namespaced_pod(
            self.namespace,
            label_selector=f"{JOB_LABEL}={self.job}",
            _preload_content=False,
            _request_timeout=5,
        )
        return tuple(_pod(item) for item in json.loads(response.data)["items"])


def _pod(item: dict[str, Any]) -> PodView:
    metadata, status = item["metadata"], item.get("status", {})
    index = metadata.get("labels", {}).get("holdfast.dev/worker-index")
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        node=item["spec"].get("nodeName", ""),
        ip=status.get("podIP", ""),
        phase=status.get("phase", ""),
        deleting="deletionTimestamp" in metadata,
        index=int(index) if index not in (None, "") else None,
    )


def _read_progress(pod: PodView) -> Progress | None:
    url = f"http://{pod.ip}:{METRICS_PORT}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=0.5) as response:
            text = response.read().decode()
    except (OSError, HTTPException, urllib.error.URLError, ValueError):
        return None
    return progress_of(pod.name, parse_metrics(text), time.monotonic())
