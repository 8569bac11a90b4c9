"""Turns watches and full lists into cache entries and keys in the queue.

It is fast, and raises no error for a malformed object: the pass over its job reports it.
"""

from __future__ import annotations

import logging

from holdfast_operator.api.json import Json
from holdfast_operator.cluster.cache import Cache, Listing
from holdfast_operator.cluster.client import AT_ONCE, Cluster, ListPacing
from holdfast_operator.cluster.trimming import slim, slim_job, slim_pod
from holdfast_operator.runtime.workqueue import KeyedQueue

logger = logging.getLogger(__name__)

DELETED = "DELETED"


class Feed:
    """Fills the cache and the queue."""

    def __init__(self, cache: Cache, queue: KeyedQueue) -> None:
        self._cache = cache
        self._queue = queue

    def job(self, kind: str | None, body: Json) -> None:
        body = slim_job(body)
        self._queue.add(self._cache.drop_job(body) if kind == DELETED else self._cache.put_job(body))

    def pod(self, kind: str | None, body: Json) -> None:
        body = slim_pod(body)
        key = self._cache.drop_pod(body) if kind == DELETED else self._cache.put_pod(body)
        if key is not None:
            self._queue.add(key)

    def node(self, kind: str | None, body: Json) -> None:
        """Store a node. Its heartbeats trigger no pass."""
        body = slim(body)
        name = str(body["metadata"]["name"])
        if kind == DELETED:
            self._cache.drop_node(body)
        elif not self._cache.put_node(body):
            return
        for key in self._cache.keys_on_node(name):
            self._queue.add(key)

    def report(self, job_uid: str) -> None:
        """Trigger a pass over the job after a report of an agent."""
        key = self._cache.key_of_uid(job_uid)
        if key is not None:
            self._queue.add(key)

    def relist(self, cluster: Cluster, namespaces: tuple[str, ...], *, pace: ListPacing = AT_ONCE) -> None:
        """List everything again and remove what has vanished. A failed list changes nothing."""
        jobs = _joined([cluster.jobs(namespace, keep=self._keep_job, pace=pace) for namespace in namespaces or ("",)])
        pods = _joined([cluster.pods(namespace, keep=self._keep_pod, pace=pace) for namespace in namespaces or ("",)])
        nodes = cluster.nodes()  # last: the others may take a minute, and placement reads nodes
        for key in self._cache.replace(jobs, pods, nodes):
            self._queue.add(key)

    def _keep_pod(self, body: Json) -> Json:
        """Return the cached object for an unchanged one, so that none is in memory twice during a list."""
        return self._cache.kept_pod(body) or slim_pod(body)

    def _keep_job(self, body: Json) -> Json:
        return self._cache.kept_job(body) or slim_job(body)


def _joined(listings: list[Listing]) -> Listing:
    """Join the lists of several namespaces. The oldest of their versions counts for all."""
    items = [item for listing in listings for item in listing.items]
    return Listing(items=items, version=min(listing.version for listing in listings))
