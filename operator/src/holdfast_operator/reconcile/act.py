"""All writes of a pass: first the status, on the version that was read, then the actions in order, then the events.

Every action is idempotent and identifies one object by UID, so the next pass completes a pass that was interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import rendezvous_service
from holdfast_operator.api.job import Job
from holdfast_operator.api.json import Json
from holdfast_operator.api.reasons import StartupReason
from holdfast_operator.api.status.serialization import without_nulls
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.cluster.events import event_manifest
from holdfast_operator.decision.plan import (
    Action,
    ApplyChildren,
    CreatePod,
    DeleteJob,
    DeletePod,
    Event,
    LabelPod,
    LiftGate,
    Plan,
    Publish,
    RestorePod,
)
from holdfast_operator.decision.reporting import messages
from holdfast_operator.decision.snapshot import CreationError
from holdfast_operator.errors import ClusterError, ConflictError, NotFoundError, RejectedError
from holdfast_operator.reconcile.job_memories import JobMemory
from holdfast_operator.runtime.rate_limit import RateLimit, Rates

logger = logging.getLogger(__name__)

# The limit for one job's events. A large job has one or two per worker when all workers leave at once.
EVENTS = RateLimit(a_second=1.0, at_once=200)


class Actor:
    """Executes plans.

    ``identity`` names this process in events; ``left_out`` receives the number of dropped events.
    """

    def __init__(
        self, *, cluster: Cluster, hub: AgentHub, identity: str, left_out: Callable[[int], None] = lambda _n: None
    ) -> None:
        self._cluster = cluster
        self._hub = hub
        self._identity = identity
        self._left_out = left_out
        self._rates = Rates(EVENTS)

    def write_status(self, job: Job, plan: Plan) -> Json | None:
        """Write the status and return the job; None if nothing changed. Raises ``ConflictError``: plan again."""
        patch = status_patch(job.raw_status, plan.status.to_json())
        if not patch:
            return None
        who = {
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
            "resourceVersion": job.resource_version,
        }
        return self._cluster.patch_status(who, patch)

    def act(self, job: Job, plan: Plan, memory: JobMemory) -> tuple[JobMemory, ClusterError | None]:
        """Execute the plan's actions.

        Return the new memory, and the error after which some actions must be repeated. A refused or unanswered action
        stops only similar ones: launchers get their membership even if no pod can be created.
        """
        refusal: CreationError | None = None
        failure: ClusterError | None = None
        stopped: set[type[Action]] = set()
        for action in plan.actions:
            if type(action) in stopped:
                continue
            try:
                memory = self._do(job, action, memory, plan.decided_at)
            except (ConflictError, NotFoundError) as error:
                logger.info("%s is no longer as it was seen: %s", _named(action), error)
            except RejectedError as error:
                logger.warning("%s", error)
                if isinstance(action, RestorePod | LabelPod):
                    continue  # labels that an admission controller keeps are no reason not to create other pods
                refusal = CreationError(reason=error.reason, message=str(error))
                stopped.add(CreatePod)
            except ClusterError as error:
                logger.warning("%s is tried again: %s", _named(action), error)
                failure = failure or error
                stopped.add(type(action))
                if isinstance(action, CreatePod | ApplyChildren):
                    refusal = refusal or CreationError(reason=StartupReason.CREATION_FAILED, message=str(error))
                    stopped.add(CreatePod)
        return _remembered(memory, plan, refusal), failure

    def _do(self, job: Job, action: Action, memory: JobMemory, now: datetime) -> JobMemory:
        match action:
            case ApplyChildren():
                made = [self._cluster.apply(dict(manifest)) for manifest in action.manifests]
                address = cluster_ip(made, rendezvous_service(job.name))
                return replace(memory, applied=action.digest, applied_at=now, rendezvous_ip=address)
            case CreatePod():
                created = self._cluster.create_pod(dict(action.manifest))
                if created is not None:
                    logger.info("created pod %s", action.name)
                    self._hub.bind(str(created["metadata"]["uid"]), job.uid)
            case LiftGate():
                self._cluster.lift_gate(job.namespace, action.name, action.uid, dict(action.node_labels))
            case LabelPod():
                self._cluster.label_pod(job.namespace, action.name, action.uid, {c.LABEL_INDEX: action.index})
            case RestorePod():
                self._cluster.restore_pod(job.namespace, action.name, action.uid, action.marks)
            case DeletePod():
                logger.info("deleting pod %s: %s", action.name, action.why)
                self._cluster.delete_pod(job.namespace, action.name, action.uid)
            case DeleteJob():
                logger.info("deleting the job: %s", action.why)
                self._cluster.delete_job(job.namespace, job.name, action.uid)
            case Publish():
                self._hub.publish(job.uid, action.document)
                return replace(memory, published=action.revision)
        return memory

    def granted(self, job: Job, events: tuple[Event, ...], now: datetime) -> tuple[Event, ...]:
        """Return the events that the job may write now, so that its pods cannot fill the API server."""
        shown = [event for event in events if not self._rates.take(job.uid, now.timestamp())]
        more = len(events) - len(shown)
        if more:
            self._left_out(more)
        if more and shown:
            words = messages.checkpoints.events_suppressed(shown[-1].message, more)
            shown[-1] = replace(shown[-1], message=words)
        return tuple(shown)

    def tell(self, job: Job, events: tuple[Event, ...], now: datetime) -> None:
        """Write events for ``kubectl describe``. A failed one does not affect the others."""
        for number, event in enumerate(events):
            logger.log(logging.WARNING if event.warning else logging.INFO, "%s: %s", event.reason, event.message)
            try:
                self._cluster.tell(job_event(job, event, now, number, self._identity))
            except ClusterError as error:
                logger.warning("an event was not written: %s", error)


def _remembered(memory: JobMemory, plan: Plan, refusal: CreationError | None) -> JobMemory:
    """Return the memory with the newest refusal, which stays until the refused creation succeeds."""
    tried = any(isinstance(action, CreatePod | ApplyChildren) for action in plan.actions)
    return replace(memory, refusal=refusal if tried or refusal else memory.refusal)


def cluster_ip(made: Iterable[Json], name: str) -> str:
    """Return the address of the Service of this name, if it is among these."""
    found = (item.get("spec") or {} for item in made if (item.get("metadata") or {}).get("name") == name)
    return next((str(spec["clusterIP"]) for spec in found if spec.get("clusterIP")), "")


def _named(action: Action) -> str:
    return f"{type(action).__name__} {getattr(action, 'name', '')}".strip()


def job_event(job: Job, event: Event, now: datetime, number: int, identity: str) -> dict[str, Any]:
    """Return the manifest of an event about a job."""
    regarding = {
        "apiVersion": f"{c.GROUP}/{c.API_VERSION}",
        "kind": c.KIND,
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
    }
    return event_manifest(
        regarding,
        action="Reconcile",
        reason=event.reason,
        message=event.message,
        warning=event.warning,
        now=now,
        identity=identity,
        number=number,
    )


def status_patch(before: Json, after: Json) -> dict[str, Any]:
    """Return the merge patch (RFC 7396) from ``before`` to ``after``.

    Lists are replaced as a whole, and null removes. A field that ``after`` lacks completely belongs to another
    version of the operator, and stays.
    """
    patch: dict[str, Any] = {}
    for key, value in after.items():
        old, new = before.get(key), without_nulls(value)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = status_patch(old, value)
            if inner:
                patch[key] = inner
        elif without_nulls(old) != new:
            patch[key] = new
    return patch
