"""The newest known versions of jobs, our pods and nodes. Thread-safe; filled by watches and full lists.

A watch does not report objects that vanished while it was interrupted, so ``replace`` removes what a full list lacks.
The last state of a vanished pod is kept for a while, because it may prove how the pod ended.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast_operator.api import names as c
from holdfast_operator.api.job import key_of
from holdfast_operator.api.json import Json
from holdfast_operator.cluster.node_usage import Occupancy
from holdfast_operator.views import NodeUsage

TOMBSTONES = 64  # per job
GRAVE_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A full list and the cluster's version when it was taken."""

    items: Sequence[Json]
    version: int

    def absent(self, known: Iterable[Json]) -> list[Json]:
        """Return the known objects that are not listed. An object newer than the list was created after it."""
        uids = {body["metadata"].get("uid") for body in self.items}
        gone = (body for body in known if body["metadata"].get("uid") not in uids)
        return [body for body in gone if version(body) <= self.version]


class Cache:
    """Jobs by key, pods by owner's UID, nodes by name."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, Json] = {}
        self._keys: dict[str, str] = {}
        self._occupancy = Occupancy()
        self._pods: dict[str, dict[str, Json]] = defaultdict(dict)
        self._tombstones: dict[str, dict[str, Json]] = defaultdict(dict)
        self._buried: dict[str, tuple[float, int]] = {}  # by UID of a deleted object: the time, and its last version
        self._nodes: dict[str, Json] = {}
        self._node_changes = 0

    # Jobs

    def put_job(self, body: Json) -> str:
        """Keep a job unless a newer version is known; returns its key."""
        key = key_of(body)
        with self._lock:
            if self._is_gone(body):
                return key
            known = self._jobs.get(key)
            newest = self._jobs[key] = _newer(known, body)
            if known is not None and known is not newest:
                self._keys.pop(_uid(known), None)
            self._keys[_uid(newest)] = key
        return key

    def drop_job(self, body: Json) -> str:
        """Remove the job and return its key."""
        key, uid = key_of(body), str(body["metadata"].get("uid", ""))
        with self._lock:
            known = self._jobs.get(key)
            if known is not None and known["metadata"].get("uid") == uid:
                del self._jobs[key]
                self._keys.pop(uid, None)
            self._tombstones.pop(uid, None)
            self._bury(body)
        return key

    def kept_job(self, body: Json) -> Json | None:
        """Return the cached job if it has this version."""
        with self._lock:
            known = self._jobs.get(key_of(body))
        return known if known is not None and _same(known, body) else None

    def job(self, key: str) -> Json | None:
        with self._lock:
            return self._jobs.get(key)

    def jobs(self) -> list[Json]:
        with self._lock:
            return list(self._jobs.values())

    def count(self) -> int:
        with self._lock:
            return len(self._jobs)

    def key_of_uid(self, uid: str) -> str | None:
        """Return the key of the job with this UID."""
        with self._lock:
            return self._keys.get(uid)

    # Pods

    def put_pod(self, body: Json) -> str | None:
        """Store one of our pods and return its job's key.

        A pod without an owner is no longer ours for this cache, and the pass over its job reads it directly.
        """
        owner, uid = owner_of(body), str(body["metadata"]["uid"])
        if owner is None:
            return self._drop_disowned(uid)
        with self._lock:
            if self._is_gone(body):
                return _key_of(body, owner)
            pods = self._pods[owner["uid"]]
            pods[uid] = _newer(pods.get(uid), body)
            self._occupancy.put(uid, pods[uid])
        return _key_of(body, owner)

    def drop_pod(self, body: Json) -> str | None:
        """Remove the pod, keep its last state for a while, and return its job's key."""
        owner, uid = owner_of(body), str(body["metadata"]["uid"])
        if owner is None:
            return self._drop_disowned(uid)
        with self._lock:
            known = self._pods[owner["uid"]].pop(uid, body)
            self._occupancy.drop(uid)
            graves = self._tombstones[owner["uid"]]
            graves[uid] = _newer(known, body)
            self._bury(graves[uid])
            while len(graves) > TOMBSTONES:
                del graves[next(iter(graves))]
            if not self._pods[owner["uid"]]:
                del self._pods[owner["uid"]]
        return _key_of(body, owner)

    def _drop_disowned(self, uid: str) -> str | None:
        with self._lock:
            known = next((pods[uid] for pods in self._pods.values() if uid in pods), None)
        return self.drop_pod(known) if known is not None else None

    def kept_pod(self, body: Json) -> Json | None:
        """Return the cached pod if it has this version."""
        owner = owner_of(body)
        with self._lock:
            known = self._pods.get(owner["uid"], {}).get(_uid(body)) if owner is not None else None
        return known if known is not None and _same(known, body) else None

    def pods_of(self, job_uid: str) -> list[Json]:
        with self._lock:
            return list(self._pods.get(job_uid, {}).values())

    def tombstones_of(self, job_uid: str) -> list[Json]:
        """Return the last states of a job's vanished pods."""
        with self._lock:
            return list(self._tombstones.get(job_uid, {}).values())

    def pods(self) -> list[Json]:
        with self._lock:
            return [body for pods in self._pods.values() for body in pods.values()]

    def usage(self) -> tuple[NodeUsage, ...]:
        """Return the usage of our pods on each node."""
        with self._lock:
            return self._occupancy.by_node()

    # Nodes

    def put_node(self, body: Json) -> bool:
        """Store a node and return whether anything relevant to workers changed."""
        name = str(body["metadata"]["name"])
        with self._lock:
            before = self._nodes.get(name)
            if self._is_gone(body):
                return False
            after = _newer(before, body)
            self._nodes[name] = after
            self._node_changes += after is not before
        return before is None or _essence(before) != _essence(after)

    def drop_node(self, body: Json) -> None:
        """Remove the node, but not another one of the same name."""
        name = str(body["metadata"]["name"])
        with self._lock:
            known = self._nodes.get(name)
            if known is not None and _uid(known) == _uid(body):
                del self._nodes[name]
                self._node_changes += 1
            self._bury(body)

    def node_changes(self) -> int:
        """Return a number that increases with every change of a node."""
        with self._lock:
            return self._node_changes

    def nodes(self) -> list[Json]:
        with self._lock:
            return list(self._nodes.values())

    def node(self, name: str) -> Json | None:
        with self._lock:
            return self._nodes.get(name)

    def keys_on_node(self, name: str) -> set[str]:
        """Return the jobs with a pod on this node."""
        found = set()
        for body in self.pods():
            owner = owner_of(body)
            if owner is not None and (body.get("spec") or {}).get("nodeName") == name:
                found.add(_key_of(body, owner))
        return found

    # Full lists

    def replace(self, jobs: Listing, pods: Listing, nodes: Listing) -> set[str]:
        """Take over full lists. Return the keys of jobs that changed or are gone."""
        keys = {self.put_job(body) for body in _news(jobs, self.jobs())}
        keys |= {self.drop_job(body) for body in jobs.absent(self.jobs())}
        keys |= {key for body in _news(pods, self.pods()) if (key := self.put_pod(body))}
        keys |= {key for body in pods.absent(self.pods()) if (key := self.drop_pod(body))}
        for body in nodes.items:
            self.put_node(body)
        for body in nodes.absent(self.nodes()):
            self.drop_node(body)
        self._clear_graves()
        return keys

    def _bury(self, body: Json) -> None:
        self._buried[_uid(body)] = self._clock(), version(body)

    def _is_gone(self, body: Json) -> bool:
        """Return whether the object was deleted after this version.

        A full list may be a minute old when it is complete, and may contain objects that were deleted meanwhile.
        """
        _, last = self._buried.get(_uid(body), (0.0, -1))
        return version(body) <= last

    def _clear_graves(self) -> None:
        """Drop objects that have been gone for long. No decision needs them, and their job may be gone as well."""
        before = self._clock() - GRAVE_SECONDS
        with self._lock:
            self._buried = {uid: grave for uid, grave in self._buried.items() if grave[0] > before}
            for job_uid, graves in list(self._tombstones.items()):
                kept = {uid: body for uid, body in graves.items() if uid in self._buried}
                self._tombstones[job_uid] = kept
                if not kept:
                    del self._tombstones[job_uid]


def _news(listing: Listing, known: Iterable[Json]) -> list[Json]:
    """Return the listed objects whose version differs from the known one."""
    versions = {_uid(body): version(body) for body in known}
    return [body for body in listing.items if versions.get(_uid(body)) != version(body)]


def _same(known: Json, body: Json) -> bool:
    return _uid(known) == _uid(body) and version(known) == version(body)


def _uid(body: Json) -> str:
    return str(body["metadata"].get("uid", ""))


def _key_of(pod: Json, owner: Json) -> str:
    return f"{pod['metadata'].get('namespace', '')}/{owner['name']}"


def owner_of(body: Json) -> Json | None:
    """Return the job that owns a pod."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("kind") == c.KIND and str(owner.get("apiVersion", "")).startswith(f"{c.GROUP}/"):
            found: Json = owner
            return found
    return None


def version(body: Json) -> int:
    """Return the object's version as an increasing number."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


def _newer(known: Json | None, body: Json) -> Json:
    return body if known is None or version(body) >= version(known) else known


def _essence(body: Json) -> object:
    """Return the part of a node that matters to workers. Heartbeats come every few seconds and are not in it."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    conditions = [(item.get("type"), item.get("status")) for item in status.get("conditions") or ()]
    info = (status.get("nodeInfo") or {}).get("bootID")
    mark = (body["metadata"].get("annotations") or {}).get(c.ANNOTATION_REMEDIATION)
    return (mark, spec.get("unschedulable"), spec.get("taints"), conditions, info, status.get("allocatable"))
