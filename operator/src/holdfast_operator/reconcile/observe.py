"""All reads of a pass: cluster, caches and agents' reports become one frozen ``Observed``.

``cached`` is cheap and shows whether there is anything to do. ``live`` reads the job and its pods again, and only its
result leads to actions on pods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from zlib import crc32

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.job import Job, key_of, parse_job
from holdfast_operator.api.json import Json
from holdfast_operator.api.status import Phase, Status, Worker
from holdfast_operator.api.timings import DEFAULT_TIMINGS, Timings
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.cache import Cache, owner_of
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.cluster.memo import Memo
from holdfast_operator.cluster.pod_events import PodEvents
from holdfast_operator.decision.snapshot import Observed
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.reconcile.job_memories import JobMemory
from holdfast_operator.reconcile.torchrun_reports import spoken_for
from holdfast_operator.scheduling.gang_queue import GangQueueInput, standing_of
from holdfast_operator.scheduling.gang_queue_cache import GangQueueCache
from holdfast_operator.scheduling.waiting_gang import GangPriority, WaitingGang, rival_of
from holdfast_operator.views import (
    NodeView,
    PodView,
    Renewals,
    Report,
    parse_node,
    parse_pod,
    read_renewal,
)

logger = logging.getLogger(__name__)

EVENTS_AFTER = timedelta(seconds=8)


class JobObserver:
    """Reads.

    ``started_at`` is the time at which this process began to decide. For a while after it, silence means nothing.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        hub: AgentHub,
        platform: Callable[[], Installation],
        key_of_job: Callable[[str], str],
        nonce: Callable[[], str],
        started_at: datetime,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._hub = hub
        self._platform = platform
        self._key_of_job = key_of_job
        self._nonce = nonce
        self._started_at = started_at
        self._timings = timings
        self._jobs: Memo[Json, tuple[Job, Status]] = Memo(_job_and_status)
        self._pods: Memo[Json, PodView] = Memo(parse_pod)
        self._graves: Memo[Json, PodView] = Memo(partial(parse_pod, absent=True))
        self._views: Memo[Json, NodeView] = Memo(parse_node)
        self._node_views: tuple[int, Mapping[str, NodeView]] = (-1, {})
        self._renewals: dict[str, Renewals] = {}
        self._waiting: Memo[Json, WaitingGang | None] = Memo(rival_of)
        self._lines = GangQueueCache(self._known)
        self._events = PodEvents(cluster.pod_events)

    def forget(self) -> None:
        """Drop the state of objects that are gone."""
        for memo in (self._jobs, self._pods, self._graves, self._views, self._waiting):
            memo.clear()
        known = {str(body["metadata"]["name"]) for body in self._cache.nodes()}
        self._renewals = {name: row for name, row in self._renewals.copy().items() if name in known}
        self._events.forget()

    def begin(self, at: datetime) -> None:
        """Start to decide. No agent has reported to this process before."""
        self._started_at = at

    def cached(self, key: str, memory: JobMemory, now: datetime) -> Observed | None:
        """Return the state in the caches; None if there is no such job."""
        body = self._cache.job(key)
        if body is None:
            return None
        return self._observed(body, self._cache.pods_of(str(body["metadata"]["uid"])), memory, now)

    def live(self, key: str, memory: JobMemory, now: datetime) -> Observed | None:
        """Return the state on the API server."""
        namespace, _, name = key.partition("/")
        body = self._cluster.job(namespace, name)
        if body is None:
            return None
        self._cache.put_job(body)
        uid = str(body["metadata"]["uid"])
        listing = self._cluster.pods(namespace, f"{c.POD_SELECTOR},{c.LABEL_JOB}={name}")
        pods = [pod for pod in listing.items if (owner := owner_of(pod)) is not None and owner["uid"] == uid]
        for pod in pods:
            self._cache.put_pod(pod)
        for pod in replace(listing, items=pods).absent(self._cache.pods_of(uid)):
            self._cache.drop_pod(pod)
        job, status = self._jobs(key, body)
        graves = {_uid(grave): self._graves(_uid(grave), grave) for grave in self._cache.tombstones_of(uid)}
        pods += self._unlisted(job, unlisted(status, {_uid(pod) for pod in pods}, graves), now)
        return self._observed(body, pods, memory, now, at_once=True)

    def _unlisted(self, job: Job, workers: Iterable[Worker], now: datetime) -> list[Json]:
        """Return pods of these workers that exist although they are not listed, because their labels were changed.

        A UID that a direct read did not find never returns, so each is read once.
        """
        found: list[Json] = []
        for worker in workers:
            name = pod_name(job.name, worker.incarnation)
            pod = self._cluster.pod(job.namespace, name)
            if pod is not None and _uid(pod) == worker.pod_uid:
                self._cache.put_pod(pod)
                found.append(pod)
                continue
            report = self._report(worker.pod_uid)
            if report is not None and report.fresh(now):
                logger.warning("pod %s is gone from the API server, and reported a moment ago", name)
        return found

    def _observed(
        self, body: Json, pods: Iterable[Json], memory: JobMemory, now: datetime, *, at_once: bool = False
    ) -> Observed:
        """``at_once``: read nodes again whose kubelet must prove an end."""
        job, status = self._jobs(key_of(body), body)
        views = [self._pods(_uid(pod), pod) for pod in _in_namespace(job, pods)]
        known = {view.uid for view in views}
        graves = [self._graves(_uid(pod), pod) for pod in _in_namespace(job, self._cache.tombstones_of(job.uid))]
        views += [view for view in graves if view.uid not in known]
        for view in views:
            self._hub.bind(view.uid, job.uid, view.ip if view.alive else "")
        told = filter(None, (self._report(view.uid) for view in views))
        reports = spoken_for(job, status, views, told)
        return Observed(
            job=job,
            status=status,
            platform=self._platform(),
            job_key=self._key_of_job(job.uid),
            nonce=self._nonce(),
            started_at=self._started_at,
            timings=self._timings,
            pods=tuple(sorted(self._with_events(job, views, now), key=lambda view: view.name)),
            nodes=self._nodes(status, views, reports, now, at_once=at_once),
            reports=reports,
            line=self._lines.of(job.key, now) if _gang_waits(status) or _may_grow(job) else None,
            usage=self._cache.usage(),
            refusal=memory.refusal,
            applied=self._applied(job, status, memory, now),
            jobs=self._cache.count(),
            published=memory.published,
            rendezvous_ip=memory.rendezvous_ip,
        )

    def _applied(self, job: Job, status: Status, memory: JobMemory, now: datetime) -> str:
        """Return the digest of the applied children; empty if they must be applied again.

        They are applied again from time to time, because they may have been deleted. Each job has a time of its own,
        and a long one if there are many jobs. A new process trusts the status; otherwise each start would apply all
        of them.
        """
        share = 1 + crc32(job.uid.encode()) / 2**32
        lasts = max(c.APPLY_AGAIN, c.APPLY_FOR_EACH_JOB * self._cache.count()) * share
        return (memory.applied or status.applied) if now - (memory.applied_at or self._started_at) < lasts else ""

    def _report(self, pod_uid: str) -> Report | None:
        found = self._hub.latest(pod_uid)
        return found.content if found is not None else None

    def _with_events(self, job: Job, views: list[PodView], now: datetime) -> list[PodView]:
        """Read events, because some problems, such as volumes that cannot be mounted, appear only there."""
        told = self._events.of(job.uid, job.namespace, [view.uid for view in views if _hangs_back(view, now)], now)
        return [
            replace(view, warnings=told[view.uid].warnings, pulling=told[view.uid].pulling)
            if view.uid in told
            else view
            for view in views
        ]

    # Nodes

    def _nodes(
        self, status: Status, pods: Iterable[PodView], reports: Iterable[Report], now: datetime, *, at_once: bool
    ) -> tuple[NodeView, ...]:
        """Return all nodes. Nodes of workers are read again if their state is uncertain."""
        views = self._all_nodes()
        used = {worker.node for worker in status.workers if worker.node} | {pod.node for pod in pods if pod.node}
        for name in used - views.keys():
            found = self._cluster.node(name)
            if found is not None:
                self._cache.put_node(found)
                views = self._all_nodes()
        anew: dict[str, NodeView | None] = {}
        awaited = {worker.node for worker in status.in_phase(Phase.LOST, Phase.LEAVING) if worker.absent_since}
        for name in doubtful(status, views, tuple(reports), now) & views.keys():
            anew[name] = self._node_anew(name, now, read=at_once and name in awaited)
        seen = (anew.get(name, view) for name, view in views.items())
        return tuple(view for view in seen if view is not None)

    def _node_anew(self, name: str, now: datetime, *, read: bool) -> NodeView | None:
        """Return a node with its Lease; None if it is gone.

        A deleted node's Lease is deleted too, so a node without one is read.
        """
        lease, body = self._cluster.lease(name), self._cache.node(name)
        if read or lease is None:
            known, body = body, self._cluster.node(name)
            if body is not None:
                self._cache.put_node(body)
            elif known is not None:
                self._cache.drop_node(known)
        if body is None:
            return None
        view = parse_node(body, lease)
        row = read_renewal(self._renewals.get(name), view.lease_renewed, ready=view.ready, now=now)
        if row is None:
            self._renewals.pop(name, None)
            return view
        self._renewals[name] = row
        return replace(view, renewals=row)

    def _all_nodes(self) -> Mapping[str, NodeView]:
        """Return the nodes by name, in order, as a new object when one has changed."""
        changes = self._cache.node_changes()
        known, views = self._node_views
        if known != changes:
            bodies = sorted(
                ((str(body["metadata"]["name"]), body) for body in self._cache.nodes()), key=itemgetter(0)
            )
            views = {name: self._views(name, body) for name, body in bodies}
            self._node_views = changes, views
        return views

    # Other jobs

    def _known(self) -> GangQueueInput:
        jobs = {key_of(body): body for body in self._cache.jobs()}
        rivals = tuple(filter(None, (self._waiting(key, body) for key, body in jobs.items())))
        standings = {rival.key: self._standing(rival) for rival in rivals}
        unseen = {key for key, standing in standings.items() if standing is None}
        return GangQueueInput(
            nodes=tuple(self._all_nodes().values()),
            usage=self._cache.usage(),
            rivals=tuple(_standing(rival, standings[rival.key]) for rival in rivals),
            jobs=frozenset(jobs.keys() - unseen),
        )

    def _standing(self, rival: WaitingGang) -> GangPriority | None:
        """Return the priority of the gang, which is in its pods; None without pods."""
        namespace = rival.key.partition("/")[0]
        own = (pod for pod in self._cache.pods_of(rival.uid) if pod["metadata"].get("namespace") == namespace)
        views = (self._pods(_uid(pod), pod) for pod in own)
        return standing_of(view for view in views if not (view.bound or view.terminal or view.leaving))


def _standing(rival: WaitingGang, standing: GangPriority | None) -> WaitingGang:
    return rival if standing is None or standing == rival.standing else replace(rival, standing=standing)


def _job_and_status(body: Json) -> tuple[Job, Status]:
    job = parse_job(body)
    return job, Status.from_json(job.raw_status)


def _in_namespace(job: Job, pods: Iterable[Json]) -> Iterator[Json]:
    """Return the pods of the job's own namespace.

    A user who may create pods elsewhere can write any owner into them. Such a pod must neither receive the job's key
    nor count as its worker.
    """
    return (pod for pod in pods if pod["metadata"].get("namespace") == job.namespace)


def _uid(body: Json) -> str:
    return str(body["metadata"]["uid"])


def _hangs_back(view: PodView, now: datetime) -> bool:
    """Return whether the pod is pending for longer than usual, on a node or without a known reason."""
    young = view.created is None or now - view.created < EVENTS_AFTER
    explained = view.unschedulable or view.gated or view.held_by
    return view.phase == "Pending" and not (young or view.absent) and (view.bound or not explained)


def _gang_waits(status: Status) -> bool:
    return not status.workers or any(worker.gated for worker in status.workers)


def _may_grow(job: Job) -> bool:
    return job.spec is not None and job.spec.max_replicas > job.spec.replicas


def unlisted(status: Status, listed: set[str], graves: Mapping[str, PodView]) -> list[Worker]:
    """Return workers whose pod is no longer listed and not proved absent.

    A pod that ended needs no proof. A pod that never ran and that the operator deleted is gone, whatever its labels.
    """
    return [
        worker
        for worker in status.workers
        if worker.known
        and worker.phase is not Phase.ENDED
        and worker.absent_since is None
        and worker.pod_uid not in listed
        and not (worker.ordered and not worker.node)
        and not (worker.pod_uid in graves and graves[worker.pod_uid].terminal)
    ]


def doubtful(status: Status, nodes: Mapping[str, NodeView], reports: tuple[Report, ...], now: datetime) -> set[str]:
    """Return the nodes of workers that are not ready, silent, lost to their peers, or gone without a proof."""
    lost = {uid for report in reports if report.fresh(now) for uid in report.lost_members}
    heard = {report.pod_uid for report in reports if report.fresh(now)}
    found = set()
    for worker in status.workers:
        if not worker.node or worker.phase is Phase.ENDED:
            continue
        node = nodes.get(worker.node)
        silent = worker.ready_at is not None and worker.pod_uid not in heard
        if node is None or not node.ready or silent or worker.pod_uid in lost or worker.absent_since is not None:
            found.add(worker.node)
    return found
