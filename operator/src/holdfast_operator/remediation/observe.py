"""All reads of a remediation pass: caches, a new read of marked nodes with their pods, and the history."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_operator.api.json import Json
from holdfast_operator.api.names import DRAIN_MARGIN, GPU_RESOURCE, IGNORE, REMEDIATION_HISTORY
from holdfast_operator.api.node_mark import Mode, mark_of, marked
from holdfast_operator.api.times import parse_time
from holdfast_operator.api.timings import Timings
from holdfast_operator.cluster.cache import Cache, owner_of
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.fleet import FleetSnapshot, HistoryEntry, Node, NodePod, StayReason
from holdfast_operator.remediation.settings import RemediationSettings
from holdfast_operator.views import parse_node

# The margin for a job that moves its pod itself: the operator's margin and the pod's grace period, in addition to the
# checkpoint's deadline.
_OWN_WAY = DRAIN_MARGIN + timedelta(seconds=30)
_CHECKPOINT_SECONDS = 25


class FleetObserver:
    """Reads nodes, their pods and the history."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        rules: RemediationSettings,
        timings: Timings,
        namespace: str,
        listens_since: datetime,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._rules = rules
        self._timings = timings
        self._namespace = namespace
        self._listens_since = listens_since

    def sight(self, alerts: tuple[Alert, ...]) -> FleetSnapshot:
        """Return the state in the caches, and the present state of marked nodes."""
        machines = tuple(machine_of(body) for body in self._cache.nodes())
        acts = self._rules.mode is not Mode.OBSERVE
        concerned = acts and (bool(alerts) or any(machine.marked for machine in machines))
        history = self._history() if concerned and not self._rules.dry_run else ()
        sight = FleetSnapshot(
            rules=self._rules,
            timings=self._timings,
            alerts=alerts,
            machines=machines,
            history=history,
            listens_since=self._listens_since,
        )
        return self.anew(sight, {machine.name for machine in machines if machine.marked}) if acts else sight

    def anew(self, sight: FleetSnapshot, names: Iterable[str]) -> FleetSnapshot:
        """Return the snapshot with these nodes read from the API server. Nodes that are gone there are removed."""
        wanted = set(names)
        fresh = {name: self._read(name) for name in sorted(wanted)}
        machines = (fresh[machine.name] if machine.name in wanted else machine for machine in sight.machines)
        return replace(sight, machines=tuple(machine for machine in machines if machine is not None))

    def _read(self, name: str) -> Node | None:
        body = self._cluster.node(name)
        if body is None:
            return None
        machine = machine_of(body)
        if machine.mark is None:
            return machine
        # This is independent of the mode: this pass may raise it, and then uses these pods.
        pods = tuple(filter(None, map(self._occupant, self._cluster.pods_on(name))))
        return replace(machine, pods=tuple(sorted(pods, key=lambda pod: (pod.namespace, pod.name))))

    def _occupant(self, body: Json) -> NodePod | None:
        """Return a pod that must leave; None for an ended pod and one that belongs to the node."""
        meta = body["metadata"]
        owner = next((owner for owner in meta.get("ownerReferences") or () if owner.get("controller")), None)
        ended = (body.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        mirror = "kubernetes.io/config.mirror" in (meta.get("annotations") or {})
        if ended or mirror or (owner or {}).get("kind") == "DaemonSet":
            return None
        stay, patience = self._job_of(body) or (
            StayReason.UNMANAGED if owner is None else StayReason.EVICTABLE,
            timedelta(0),
        )
        return NodePod(
            namespace=str(meta.get("namespace", "")),
            name=str(meta["name"]),
            uid=str(meta["uid"]),
            stay=stay,
            patience=patience,
            deleted_at=parse_time(meta.get("deletionTimestamp")),
        )

    def _job_of(self, body: Json) -> tuple[StayReason, timedelta] | None:
        owner = owner_of(body)
        if owner is None:
            return None
        job = self._cache.job(f"{body['metadata'].get('namespace', '')}/{owner['name']}")
        if job is None or job["metadata"].get("uid") != owner.get("uid"):
            return None
        spec = job.get("spec") or {}
        if (spec.get("nodeRemediation") or {}).get("policy") == IGNORE:
            return StayReason.OPTED_OUT, timedelta(0)
        seconds = (spec.get("interruption") or {}).get("checkpointDeadlineSeconds")
        commit = timedelta(seconds=seconds if isinstance(seconds, int) else _CHECKPOINT_SECONDS)
        return StayReason.EVICTABLE, commit + _OWN_WAY

    def _history(self) -> tuple[HistoryEntry, ...]:
        found = self._cluster.config_map(self._namespace, REMEDIATION_HISTORY)
        text = ((found or {}).get("data") or {}).get("history", "")
        return tuple(filter(None, map(_entry, text.splitlines())))


def _entry(line: str) -> HistoryEntry | None:
    try:
        value = json.loads(line)
        started, ended = parse_time(value["started"]), parse_time(value["ended"])
    except (ValueError, KeyError, TypeError):
        return None
    if started is None or ended is None:
        return None
    return HistoryEntry(node=str(value.get("node", "")), uid=str(value.get("uid", "")), started=started, ended=ended)


def _gpus(body: Json) -> int:
    """Return the number of GPUs that the device plugin registered.

    A GPU that fell off the bus is missing after the next boot.
    """
    told = str(((body.get("status") or {}).get("capacity") or {}).get(GPU_RESOURCE, ""))
    return int(told) if told.isdecimal() else 0


def machine_of(body: Json) -> Node:
    """Parse a node from the API's JSON."""
    view, meta = parse_node(body), body["metadata"]
    return Node(
        name=view.name,
        uid=str(meta.get("uid", "")),
        version=str(meta.get("resourceVersion", "")),
        ready=view.ready,
        unschedulable=view.unschedulable,
        created=parse_time(meta.get("creationTimestamp")),
        boot_id=view.boot_id,
        gpus=_gpus(body),
        provider_id=str((body.get("spec") or {}).get("providerID") or ""),
        labels=view.labels,
        mark=mark_of(body),
        marked=marked(body),
    )
