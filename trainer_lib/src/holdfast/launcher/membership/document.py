"""The membership document that the operator publishes, as the launcher parses it. Pure.

Wire form: `tests/contract/membership.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.attempt import AttemptId, Claim, Json, check_version
from holdfast.core.errors import DocumentError
from holdfast.core.json_fields import JsonFields
from holdfast.core.protocol import Cause
from holdfast.launcher.membership.restart_rules import Restart


@dataclass(frozen=True, kw_only=True, order=True)
class Member:
    """A worker's place in a generation, and the address of its launcher. Ordered by index."""

    index: int
    pod_uid: str
    pod: str = ""
    host: str = ""
    control_port: int = 0
    store_port: int = 0
    node: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "pod": self.pod,
            "podUID": self.pod_uid,
            "ip": self.host,
            "ports": {"store": self.store_port, "control": self.control_port},
            "node": self.node,
        }

    @classmethod
    def from_json(cls, value: Json) -> Member:
        ports = value["ports"]
        return cls(
            index=int(value["index"]),
            pod_uid=str(value["podUID"]),
            pod=str(value["pod"]),
            host=str(value["ip"]),
            control_port=int(ports["control"]),
            store_port=int(ports["store"]),
            node=str(value["node"]),
        )


@dataclass(frozen=True, kw_only=True)
class Previous(JsonFields):
    """An earlier generation that may still hold a world. With `through`, a range of unpublished generations."""

    generation: int
    publication: str
    members: frozenset[str]
    through: int | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The maximum number of incidents of one cause in a time window before the job fails."""

    cause: Cause
    max_restarts: int
    window: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The effective settings by which launchers form worlds. All times are in seconds."""

    replicas: int = 1
    min_replicas: int = 1
    replica_step: int = 1
    may_shrink: bool = True
    processes_per_worker: int = 1
    heartbeat: float = 0.25
    dead_after: float = 1.0
    first_attempt_wait: float = 30.0
    shrink_after: float = 0.0
    startup_deadline: float = 300.0
    checkpoint_deadline: float = 25.0
    budgets: tuple[Budget, ...] = ()
    restart: Restart = field(default_factory=Restart)
    backoff_initial: float = 1.0
    backoff_max: float = 60.0
    settle: float = 0.3
    accept_deadline: float = 5.0
    resend: float = 1.0
    never_accepted_wait: float = 30.0

    @classmethod
    def from_settings(cls, settings: Json) -> Rules:
        """Read `membership.settings`. The last four fields have no setting and keep their defaults."""
        backoff, checkpoint = settings["backoff"], settings["checkpoint"]
        return cls(
            replicas=int(settings["replicas"]),
            min_replicas=int(settings["minReplicas"]),
            replica_step=int(settings["replicaStep"]),
            may_shrink=settings["onFailure"] == "Shrink",
            processes_per_worker=int(settings["processesPerWorker"]),
            heartbeat=float(settings["heartbeatSeconds"]),
            dead_after=float(settings["deadAfterSeconds"]),
            first_attempt_wait=float(settings["firstAttemptWaitSeconds"]),
            shrink_after=float(settings.get("shrinkAfterSeconds", 0.0)),
            startup_deadline=float(settings["startupDeadlineSeconds"]),
            checkpoint_deadline=float(checkpoint["deadlineSeconds"]),
            budgets=tuple(_budget(value) for value in settings["budgets"]),
            restart=Restart.from_settings(settings),
            backoff_initial=float(backoff["initialSeconds"]),
            backoff_max=float(backoff["maxSeconds"]),
        )


def _budget(value: Json) -> Budget:
    return Budget(
        cause=Cause(value["cause"]),
        max_restarts=int(value["maxRestarts"]),
        window=float(value["windowSeconds"]),
    )


@dataclass(frozen=True, kw_only=True)
class Directive(JsonFields):
    """A request of the operator for a checkpoint."""

    id: str
    reason: str = ""
    deadline: str | None = None


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One revision of the operator's document. `document` is the complete document without the job key."""

    revision: int
    generation: int
    publication: str
    members: tuple[Member, ...]
    active: AttemptId | None = None
    previous: tuple[Previous, ...] = ()
    gone: frozenset[str] = frozenset()
    claims: tuple[Claim, ...] = ()
    acknowledged: frozenset[AttemptId] = frozenset()
    restarts: Mapping[Cause, int] = field(default_factory=dict)
    checkpoint: Directive | None = None
    drain: frozenset[str] = frozenset()
    job_uid: str = ""
    rules: Rules = Rules()
    document: Json = field(default_factory=dict, repr=False, compare=False)

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(member.pod_uid for member in self.members)

    @property
    def newness(self) -> tuple[int, int]:
        """The order of documents. A restored operator may start to count revisions again, but never generations."""
        return (self.generation, self.revision)

    def member(self, pod_uid: str) -> Member | None:
        return next((member for member in self.members if member.pod_uid == pod_uid), None)

    def to_json(self) -> Json:
        """Return the document in the form in which launchers share it."""
        return self.document

    @classmethod
    def from_json(cls, value: Json) -> Membership:
        """Read `membership.json`. Raises `DocumentError` that names the invalid part."""
        check_version(value, "membership.json")
        try:
            return _read(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"membership.json cannot be read: {error!r}") from error


def _read(value: Json) -> Membership:
    directives = value["directives"]
    return Membership(
        revision=int(value["revision"]),
        generation=int(value["generation"]),
        publication=str(value["publication"]),
        members=tuple(sorted(Member.from_json(member) for member in value["members"])),
        active=AttemptId.from_optional(value["active"]),
        previous=tuple(Previous.from_json(previous) for previous in value["previous"]),
        gone=frozenset(str(uid) for uid in value["gone"]),
        claims=tuple(Claim.from_json(claim) for claim in value["claims"]),
        acknowledged=frozenset(AttemptId.from_json(attempt_id) for attempt_id in value["acknowledged"]),
        restarts={Cause(cause): int(count) for cause, count in value["restarts"].items()},
        checkpoint=Directive.from_json(wanted) if (wanted := directives["checkpoint"]) is not None else None,
        drain=frozenset(str(uid) for uid in directives["drain"]),
        job_uid=str(value["job"]["uid"]),
        rules=Rules.from_settings(value["settings"]),
        document={key: part for key, part in value.items() if key != "jobKey"},
    )
