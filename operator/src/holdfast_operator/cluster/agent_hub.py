"""The exchange between the operator and its agents, the sidecars.

``AgentHub`` holds the newest report of each pod and the membership document of each job. It depends on neither HTTP
nor an event loop, and any thread may call it. ``agents`` serves it on the network.

Invariants:
- A report is kept only for a pod that is bound to a job.
- Within one sidecar process, only a report with a higher number replaces a report.
- A report of an earlier process never replaces one of a later process.
- The revision of a published document never decreases.
"""

from __future__ import annotations

import json
import logging
import threading
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import attrgetter
from typing import Any

from holdfast_operator.api.json import loads
from holdfast_operator.api.names import PORT_CONTROL, PROTOCOL_VERSION
from holdfast_operator.api.spec.preflight import NETWORK
from holdfast_operator.errors import AgentRequestError
from holdfast_operator.views import Report, parse_report
from holdfast_operator.views.preflight_changes import news

logger = logging.getLogger(__name__)

SILENT_LAUNCHER_SECONDS = 5.0
REMEMBERED_STARTS = 8
START_ID_LENGTH = 128
PEER_FRESH = timedelta(seconds=10)
MAX_POD_NAME = 253
MAX_PEERS = 256
# These change with every training step. They are kept, but do not wake a reconciliation.
_VOLATILE = frozenset(
    {
        "received_at",
        "silent_seconds",
        "committed_step",
        "committed_at",
        "loss",
        "throughput",
        "checkpointing",
        "books",
    }
)
steady = attrgetter(*(field.name for field in fields(Report) if field.name not in _VOLATILE))


@dataclass(frozen=True, kw_only=True)
class PodIdentity:
    """The pod that a token belongs to, according to the API server."""

    namespace: str
    pod: str
    pod_uid: str


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """The newest report of one pod. Unknown fields are not kept."""

    start_id: str
    number: int
    pod: str
    content: Report


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A membership document, serialized once for all pods of its job."""

    revision: int
    payload: bytes


@dataclass(kw_only=True)
class _KnownPod:
    job_uid: str
    ip: str = ""
    report: AgentReport | None = None
    past_starts: list[str] = field(default_factory=list)


class AgentHub:
    """Takes reports, and serves memberships. Thread-safe.

    ``authenticate`` maps a bearer token to a pod, or None. It may block, and raises
    ``AuthenticationUnavailableError`` if no result is available. ``recall`` returns the known result at once; None:
    call ``authenticate``. ``due`` returns whether to renew a known result.

    Callbacks:
    - ``on_report`` gets the UID of a job when a pod reports a change that a decision may depend on.
    - ``on_repeat`` is called for a report that was answered but not taken: it, or a later one, was taken before.
    - ``on_check`` is called for each check of a preflight that passed or failed since the pod's last report.
    - ``on_unheard`` gets the number of list entries in a report that exceed the limit and are ignored.
    """

    def __init__(
        self,
        authenticate: Callable[[str], PodIdentity | None],
        on_report: Callable[[str], None],
        *,
        recall: Callable[[str], PodIdentity | None] = lambda _token: None,
        due: Callable[[str], bool] = lambda _token: False,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        on_repeat: Callable[[], None] = lambda: None,
        on_check: Callable[[str, str], None] = lambda _check, _result: None,
        on_unheard: Callable[[int], None] = lambda _entries: None,
    ) -> None:
        self.authenticate = authenticate
        self.recall = recall
        self.due = due
        self._on_report = on_report
        self._clock = clock
        self._on_repeat = on_repeat
        self._on_check = on_check
        self._on_unheard = on_unheard
        self._lock = threading.Lock()
        self._pods: dict[str, _KnownPod] = {}
        self._jobs: dict[str, set[str]] = {}
        self._publications: dict[str, Publication] = {}
        self._listener: Callable[[str], None] | None = None
        self._standby = False
        self._leader: str | None = None

    def latest(self, pod_uid: str) -> AgentReport | None:
        """Return the newest report of a pod, or None."""
        with self._lock:
            pod = self._pods.get(pod_uid)
            return pod.report if pod else None

    def bind(self, pod_uid: str, job_uid: str, ip: str = "") -> None:
        """Accept this pod's reports as those of a worker of this job. Peers reach it at ``ip``. Idempotent."""
        with self._lock:
            pod = self._pods.get(pod_uid)
            if pod is None or pod.job_uid != job_uid:
                self._drop(pod_uid)
                pod = self._pods[pod_uid] = _KnownPod(job_uid=job_uid)
                self._jobs.setdefault(job_uid, set()).add(pod_uid)
            pod.ip = ip

    def forget_pod(self, pod_uid: str) -> None:
        """Drop the report of a pod that is gone, and refuse further ones."""
        with self._lock:
            self._drop(pod_uid)

    def forget_job(self, job_uid: str) -> None:
        """Drop the document and all pods of a job that is gone."""
        with self._lock:
            self._publications.pop(job_uid, None)
            for uid in self._jobs.pop(job_uid, set()):
                self._pods.pop(uid, None)
        self._notify(job_uid)

    def publish(self, job_uid: str, document: Mapping[str, Any]) -> bool:
        """Serve this document to the job's pods. Held polls return if its revision rose. False: it is outdated."""
        publication = Publication(
            revision=int(document["revision"]),
            payload=json.dumps(document, separators=(",", ":"), allow_nan=False).encode(),
        )
        with self._lock:
            known = self._publications.get(job_uid)
            if known is not None and publication.revision < known.revision:
                logger.warning("membership of job %s not published: its revision fell", job_uid)
                return False
            self._publications[job_uid] = publication
        if known is None or publication.revision > known.revision:
            self._notify(job_uid)
        return True

    def stand_by(self, leader: str | None = None) -> None:
        """Answer agents with 503 and the leader's address, because this process does not decide, or not yet."""
        with self._lock:
            self._standby, self._leader = True, leader

    def take_over(self) -> None:
        with self._lock:
            self._standby, self._leader = False, None

    def listen(self, listener: Callable[[str], None] | None) -> None:
        """Call ``listener(job_uid)``, from any thread, when a held poll may have an answer."""
        self._listener = listener

    def standby(self) -> tuple[bool, str | None]:
        """Return whether to answer 503, and the leader's address if known."""
        with self._lock:
            return self._standby, self._leader

    def job_of(self, pod_uid: str) -> str | None:
        """Return the UID of the job that the pod belongs to."""
        with self._lock:
            pod = self._pods.get(pod_uid)
            return pod.job_uid if pod else None

    def publication(self, job_uid: str) -> Publication | None:
        """Return the published document of a job."""
        with self._lock:
            return self._publications.get(job_uid)

    def record(self, identity: PodIdentity, raw: bytes) -> int:
        """Take one report, and return the published revision. Raises ``AgentRequestError``."""
        report = self._read(identity, raw)
        with self._lock:
            pod = self._pods.get(identity.pod_uid)
            if pod is None:
                raise AgentRequestError(404, "this pod belongs to no job")
            news = self._keep(pod, report)
            publication = self._publications.get(pod.job_uid)
        if news:
            self._on_report(pod.job_uid)
        return publication.revision if publication else 0

    def _read(self, identity: PodIdentity, raw: bytes) -> AgentReport:
        body = parse_body(raw)
        if body["pod"]["uid"] != identity.pod_uid:
            raise AgentRequestError(403, "the token belongs to another pod than the report")
        content = parse_report(body, self._clock())
        if content is None:
            raise AgentRequestError(400, "the report names no pod")
        self._on_unheard(content.unheard)
        return AgentReport(
            start_id=body["sidecar"]["startId"],
            number=body["sidecar"]["number"],
            pod=str(body["pod"].get("name") or "")[:MAX_POD_NAME],
            content=content,
        )

    def peers_of(self, pod_uid: str) -> list[dict[str, Any]] | None:
        """Return the peers that the pod's preflight must reach: all others of its job whose launcher listens.

        None: the preflight does not ask. Call this after ``record``: of two launchers that become ready, at least one
        then gets the other's address.
        """
        with self._lock:
            own = self._pods.get(pod_uid)
            if own is None or own.report is None or not _asks_for_peers(own.report.content):
                return None
            since = self._clock() - PEER_FRESH
            others = sorted(self._jobs.get(own.job_uid, set()) - {pod_uid})
            # With very many peers, each gets those that follow it, so that none is left out.
            after = bisect(others, pod_uid)
            found = (_peer(uid, self._pods[uid], since) for uid in [*others[after:], *others[:after]])
            return list(islice(filter(None, found), MAX_PEERS))

    def _drop(self, pod_uid: str) -> None:
        pod = self._pods.pop(pod_uid, None)
        if pod is None:
            return
        of_job = self._jobs[pod.job_uid]
        of_job.discard(pod_uid)
        if not of_job:
            del self._jobs[pod.job_uid]

    def _keep(self, pod: _KnownPod, report: AgentReport) -> bool:
        """Store the report unless it is a repetition. Return True if a decision may depend on what changed."""
        last, start_id = pod.report, report.start_id
        if last is not None and (
            start_id in pod.past_starts or (start_id == last.start_id and report.number <= last.number)
        ):
            self._on_repeat()
            return False
        if last is not None and start_id != last.start_id:
            pod.past_starts = [*pod.past_starts, last.start_id][-REMEMBERED_STARTS:]
        for check, result in news(
            last.content.preflight if last else None, report.content.preflight, first=last is None
        ):
            self._on_check(check, result)
        pod.report = report
        return last is None or start_id != last.start_id or _decisive(report.content) != _decisive(last.content)

    def _notify(self, job_uid: str) -> None:
        if self._listener is not None:
            self._listener(job_uid)


def _asks_for_peers(content: Report) -> bool:
    return content.preflight is not None and content.preflight.result(NETWORK) in ("Running", "Failed")


def _peer(uid: str, pod: _KnownPod, since: datetime) -> dict[str, Any] | None:
    """Return None for a pod that is gone, is not ready, or has not reported recently."""
    if not pod.ip or pod.report is None or pod.report.content.received_at < since:
        return None
    content = pod.report.content
    if not content.ready or content.exit is not None:
        return None
    port = content.control if 0 < content.control < 65536 else PORT_CONTROL
    return {"pod": pod.report.pod, "podUID": uid, "ip": pod.ip, "port": port}


def _decisive(content: Report) -> tuple[Any, bool]:
    """Return the part of a report that may change a decision."""
    return steady(content), (content.silent_seconds or 0.0) >= SILENT_LAUNCHER_SECONDS


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse ``report.json`` and check the fields that routing needs. Raises ``AgentRequestError``."""
    try:
        body = loads(raw)
    except ValueError as error:
        raise AgentRequestError(400, "the report is not JSON") from error
    if not isinstance(body, dict):
        raise AgentRequestError(400, "the report is not a JSON object")
    version = body.get("version")
    if version != PROTOCOL_VERSION:
        shown = version if isinstance(version, int) else type(version).__name__
        raise AgentRequestError(
            400, f"report version {shown} is not known here; this operator knows {PROTOCOL_VERSION}"
        )
    _check_shape(body)
    return body


def _check_shape(body: Mapping[str, Any]) -> None:
    sidecar, pod, launcher = body.get("sidecar"), body.get("pod"), body.get("launcher")
    if not isinstance(sidecar, dict) or not isinstance(sidecar.get("startId"), str):
        raise AgentRequestError(400, "sidecar.startId is missing")
    if len(sidecar["startId"]) > START_ID_LENGTH:
        raise AgentRequestError(400, f"sidecar.startId is longer than {START_ID_LENGTH} characters")
    if not isinstance(sidecar.get("number"), int) or isinstance(sidecar["number"], bool):
        raise AgentRequestError(400, "sidecar.number is missing")
    if not isinstance(pod, dict) or not isinstance(pod.get("uid"), str):
        raise AgentRequestError(400, "pod.uid is missing")
    if launcher is None:
        return
    if not isinstance(launcher, dict):
        raise AgentRequestError(400, "launcher is neither null nor an object")
    if launcher.get("version") != PROTOCOL_VERSION:
        raise AgentRequestError(400, f"launcher.version is not {PROTOCOL_VERSION}")
    if launcher.get("podUID") != pod["uid"]:
        raise AgentRequestError(400, "launcher.podUID is another pod's")
