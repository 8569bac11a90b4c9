"""Jobs on simulated nodes (kwok): their creation, count and faults."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from _fleet.api import JOBS, MERGE, Api
from holdfast_testbed.build.programs import program
from holdfast_testbed.clock import stamp
from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.fakes.chart import account
from holdfast_testbed.node.processes import die_with_parent

ACCOUNT = account()
PODS_A_NODE = 110
JOBS_A_NAMESPACE = 100
PATIENCE = 900.0
_TIMES = ("requestReceived", "stage")
STAGES = Path(__file__).with_name("stages.yaml")


@contextmanager
def kwok(cluster: Cluster, file: Path) -> Iterator[None]:
    """Run kwok, which simulates all nodes: it renews Leases, and starts and deletes pods."""
    words = ("--manage-all-nodes=true", "--cidr=10.128.0.1/14", "--node-lease-duration-seconds=40")
    with file.open("wb") as log:
        process = subprocess.Popen(
            [program("kwok"), f"--kubeconfig={cluster.kubeconfig}", f"--config={STAGES}", *words],
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into libc
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def add_nodes(api: Api, count: int) -> None:
    """Create equal nodes like those of a cloud."""
    room = {"cpu": "128", "memory": "1Ti", "pods": str(PODS_A_NODE)}
    for number in range(count):
        name = f"kwok-{number}"
        labels = {"kubernetes.io/hostname": name, "type": "kwok"}
        status = {"capacity": room, "allocatable": room}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
        await api.call("POST", "/api/v1/nodes", body)
    end = time.monotonic() + PATIENCE
    while any("taints" in node["spec"] for node in (await api.call("GET", "/api/v1/nodes"))["items"]):
        if time.monotonic() > end:
            raise SystemExit("the nodes are not ready")
        await asyncio.sleep(0.5)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of the fleet."""

    namespace: str
    name: str
    workers: int

    @property
    def body(self) -> dict[str, Any]:
        """Return the manifest."""
        asked = {"requests": {"cpu": "100m", "memory": "1Gi"}}
        container = {"name": "trainer", "image": "train:1", "command": ["python", "train.py"], "resources": asked}
        template = {"spec": {"containers": [container]}}
        return {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "FaultTolerantJob",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"workers": {"replicas": self.workers, "template": template}},
        }


@dataclass(frozen=True, kw_only=True)
class Death:
    """A pod whose trainer ended by SIGKILL."""

    job: str
    pod: str
    at: float


@dataclass(kw_only=True)
class Fleet:
    """The applied jobs."""

    api: Api
    check: Callable[[], None]
    """Raises if the operator is not running."""
    jobs: list[Job] = field(default_factory=list)

    async def grow(self, jobs: Iterable[Job]) -> float:
        """Apply jobs. Return the seconds until all pods of all jobs run."""
        began, new = time.monotonic(), list(jobs)
        for namespace in sorted({job.namespace for job in new} - {job.namespace for job in self.jobs}):
            await self._add_namespace(namespace)
        self.jobs += new
        await asyncio.gather(*(self._apply(job) for job in new))
        await self.settled()
        return time.monotonic() - began

    async def _add_namespace(self, name: str) -> None:
        """Create a namespace with the service account that pods require."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self.api.call("POST", "/api/v1/namespaces", body)
        path = f"/api/v1/namespaces/{name}/serviceaccounts"
        while not (await self.api.call("GET", path))["items"]:
            await asyncio.sleep(0.1)

    async def _apply(self, job: Job) -> None:
        await self.api.call("POST", JOBS.format(namespace=job.namespace), job.body)

    async def settled(self) -> None:
        """Wait until all pods exist and run."""
        wanted = sum(job.workers for job in self.jobs)
        end = time.monotonic() + PATIENCE
        while (there := await self._running()) != wanted:
            self.check()
            if time.monotonic() > end:
                raise SystemExit(f"{there} of {wanted} pods run after {PATIENCE:.0f} s")
            await asyncio.sleep(2)

    async def told(self, reason: str) -> None:
        """Wait until all jobs have this reason."""
        end = time.monotonic() + PATIENCE
        while any((job.get("status") or {}).get("summary") != reason for job in await self._listed()):
            self.check()
            if time.monotonic() > end:
                raise SystemExit(f"not all jobs are {reason} after {PATIENCE:.0f} s")
            await asyncio.sleep(5)

    async def _listed(self) -> list[dict[str, Any]]:
        namespaces = sorted({job.namespace for job in self.jobs})
        lists = [await self.api.call("GET", JOBS.format(namespace=namespace)) for namespace in namespaces]
        return [job for listed in lists for job in listed["items"]]

    async def _running(self) -> int:
        """Return the number of pods if all run; otherwise -1 or less than the expected number."""
        idle = await self.api.call("GET", "/api/v1/pods", fieldSelector="status.phase!=Running", limit="1")
        if idle["items"]:
            return -1
        namespaces = sorted({job.namespace for job in self.jobs})
        return sum([await self._count(namespace) for namespace in namespaces])

    async def _count(self, namespace: str) -> int:
        listed = await self.api.call("GET", f"/api/v1/namespaces/{namespace}/pods", limit="1")
        return len(listed["items"]) + int(listed["metadata"].get("remainingItemCount") or 0)

    async def pod_bytes(self) -> int:
        """Return the size of one pod."""
        path = f"/api/v1/namespaces/{self.jobs[0].namespace}/pods"
        (pod,) = (await self.api.call("GET", path, limit="1"))["items"]
        return len(json.dumps(pod, separators=(",", ":")))

    async def kill(self, job: Job, pod: dict[str, Any]) -> Death:
        """Record that a pod's trainer ended by SIGKILL, as its kubelet would report."""
        meta = pod["metadata"]
        state = {"terminated": {"exitCode": 137, "reason": "Error", "finishedAt": stamp(), "startedAt": stamp()}}
        ended = [{**status, "ready": False, "state": state} for status in pod["status"]["containerStatuses"]]
        status = {"phase": "Failed", "containerStatuses": ended}
        at = time.time()
        path = f"/api/v1/namespaces/{job.namespace}/pods/{meta['name']}/status"
        await self.api.call("PATCH", path, {"metadata": {"uid": meta["uid"]}, "status": status}, MERGE)
        return Death(job=f"{job.namespace}/{job.name}", pod=str(meta["name"]), at=at)


def jobs_of(first: int, count: int, workers: int) -> list[Job]:
    """Return jobs by number, a hundred per namespace."""
    return [
        Job(namespace=f"fleet-{number // JOBS_A_NAMESPACE}", name=f"job-{number}", workers=workers)
        for number in range(first, first + count)
    ]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of the operator, from the API server's audit log."""

    at: float
    seconds: float
    verb: str
    resource: str
    key: str
    """Namespace and name of the object; for a list, its namespace and label selector."""


def requests(audit_log: Path, since: float, until: float) -> list[Request]:
    """Return the operator's requests within a time, from the audit log and the previous one."""
    found = []
    for file in sorted(audit_log.parent.glob("audit*.log")):
        with file.open() as lines:
            found += [request for line in lines if _is_ours(line) and (request := _request(line)) is not None]
    return sorted((r for r in found if since <= r.at < until), key=lambda request: request.at)


def _is_ours(line: str) -> bool:
    """Return whether the line is a request of the operator. The last line may be incomplete."""
    return ACCOUNT in line and line.endswith("\n")


def _request(line: str) -> Request | None:
    entry = json.loads(line)
    if entry["user"]["username"] != ACCOUNT or entry["verb"] == "watch":
        return None
    about = entry.get("objectRef") or {}
    began, ended = (datetime.fromisoformat(entry[f"{name}Timestamp"]).timestamp() for name in _TIMES)
    asked = parse_qs(urlsplit(entry["requestURI"]).query)
    name = about.get("name") or ",".join(asked.get("labelSelector", ()))
    resource = "/".join(filter(None, (about.get("resource", ""), about.get("subresource", ""))))
    return Request(
        at=began,
        seconds=ended - began,
        verb=entry["verb"],
        resource=resource,
        key=f"{about.get('namespace', '')}/{name}",
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The creation of the pod that replaces one that ended."""

    death: Death
    at: float

    @property
    def seconds(self) -> float:
        """Seconds since the end of the pod."""
        return self.at - self.death.at


def answers(deaths: Iterable[Death], asked: Iterable[Request]) -> list[Answer]:
    """Return the creation that answers each death. A job's deaths and creations match in their order."""
    created: dict[str, list[float]] = {}
    for request in asked:
        if (request.verb, request.resource) == ("create", "pods"):
            created.setdefault(request.key.rpartition("-w")[0], []).append(request.at)
    found = []
    for death in sorted(deaths, key=lambda death: death.at):
        times = created.get(death.job, [])
        while times and times[0] < death.at:
            times.pop(0)
        if times:
            found.append(Answer(death=death, at=times.pop(0)))
    return found


def story(answer: Answer, asked: Iterable[Request]) -> str:
    """Return the operator's requests about that job from a second before the death to its answer, for debugging."""
    namespace, _, name = answer.death.job.partition("/")
    of_job = re.compile(rf"{re.escape(namespace)}/(.*=)?{re.escape(name)}(-w.*)?$")
    lines = [
        f"  {request.at - answer.death.at:+.3f} s, for {request.seconds:.3f}: {request.verb} {request.resource}"
        for request in asked
        if answer.death.at - 1 <= request.at <= answer.at and of_job.match(request.key)
    ]
    return "\n".join([f"{answer.seconds:.3f} s for {answer.death.pod} of {answer.death.job}", *lines])
