"""The status of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId
from holdfast_operator.api.json import Json
from holdfast_operator.api.status import operator_state
from holdfast_operator.api.status.conditions import Condition, ConditionType, StartupProblem
from holdfast_operator.api.status.failure_history import ActionHistory, Divergences, NodeFailures
from holdfast_operator.api.status.goodput import Goodput
from holdfast_operator.api.status.incidents import Incident, IncidentCount
from holdfast_operator.api.status.json_fields import JsonFields, stored
from holdfast_operator.api.status.membership import Membership
from holdfast_operator.api.status.placement import AvoidedNode, GangAttempt
from holdfast_operator.api.status.progress import Checkpoint, Progress, StartingPoint
from holdfast_operator.api.status.workers import Phase, Worker

_NO_WORLD = AttemptId(generation=0, attempt=0)
_NOBODY = Membership()
_NOWHERE = StartingPoint()
_NO_WAIT = GangAttempt()
_PRIVATE = (
    "incarnations",
    "gang",
    "extra",
    "grownTime",
    "trouble",
    "heldBack",
    "stalledTime",
    "countedBatch",
    "forgotten",
    "tallies",
    "offenders",
    "divergedNodes",
    "document",
    "applied",
    "quarantined",
)


@dataclass(frozen=True, kw_only=True)
class Status(JsonFields):
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    summary: str = ""
    ready_workers: int = 0
    wanted_workers: int = stored("workers", default=0)
    replicas: int = 0
    selector: str = ""
    incident_count: int = 0
    incarnations: int = 0
    membership: Membership = _NOBODY
    incidents_by_cause: tuple[IncidentCount, ...] = ()
    incidents: tuple[Incident, ...] = ()
    forgotten: AttemptId = _NO_WORLD  # the highest attempt ID whose incident was removed from that list
    last_checkpoint: Checkpoint | None = None
    progress: Progress | None = None
    goodput: Goodput | None = None
    divergences: Divergences | None = None
    origin: StartingPoint = stored("startedFrom", default=_NOWHERE)
    avoided: tuple[AvoidedNode, ...] = stored("avoidedNodes", default=())
    gang: GangAttempt = _NO_WAIT
    workers: tuple[Worker, ...] = stored("entries", default=())  # "workers" in the operator's state
    extra: int = 0  # workers requested beyond replicas
    grown_at: datetime | None = stored("grownTime", default=None)
    trouble: StartupProblem | None = None
    backoff_until: datetime | None = stored("backoffEndTime", default=None)
    held_back: int = 0  # replacements that wait for it
    stalled_since: datetime | None = stored("stalledTime", default=None)
    counted_batch: int = -1
    tallies: tuple[ActionHistory, ...] = ()
    offenders: tuple[NodeFailures, ...] = ()
    diverged_nodes: tuple[NodeFailures, ...] = ()
    document: str = ""
    applied: str = ""  # digest of the children that were applied last
    quarantined: tuple[str, ...] = ()
    start_time: datetime | None = None
    completion_time: datetime | None = None

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Return whether the condition of this type is true."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    def first_true(self, *kinds: ConditionType) -> Condition | None:
        """Return the first condition of these types that is true."""
        return next((condition for kind in kinds if (condition := self.condition(kind)) and condition.status), None)

    @property
    def terminal(self) -> bool:
        """Whether the job is Complete or Failed, which is final."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    def forgot(self, attempt_id: AttemptId) -> bool:
        """Return whether the incident of this attempt was recorded and later removed from the list."""
        return attempt_id <= self.forgotten and all(incident.attempt_id != attempt_id for incident in self.incidents)

    def in_phase(self, *phases: Phase) -> tuple[Worker, ...]:
        """Return the workers in one of these phases."""
        return tuple(worker for worker in self.workers if worker.phase in phases)

    def with_worker(self, changed: Worker) -> Status:
        """Return a copy with one worker replaced, identified by its incarnation."""
        kept = (changed if worker.incarnation == changed.incarnation else worker for worker in self.workers)
        return replace(self, workers=tuple(kept))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON, in which one string has all state that only the operator reads."""
        found = super().to_json()
        state = {key: found.pop(key) for key in _PRIVATE} | {"workers": found.pop("entries")}
        return {**found, "operatorState": operator_state.encode(state)}

    @classmethod
    def from_json(cls, value: Json) -> Status:
        """Parse a status. A part that cannot be read is dropped, and the others stay."""
        state = operator_state.decode(value)
        found = super().from_json(
            {**value, **{key: state.get(key) for key in _PRIVATE}, "entries": state.get("workers")}
        )
        created = max([found.incarnations, *(worker.incarnation + 1 for worker in found.workers)])
        forgotten = found.forgotten if "forgotten" in state else _below(found.incidents)
        return replace(found, incarnations=created, forgotten=forgotten)


def _below(incidents: tuple[Incident, ...]) -> AttemptId:
    """Return what may have been removed, if the record of it is lost: all incidents below those of a full list."""
    if len(incidents) < c.MAX_INCIDENTS:
        return _NO_WORLD
    lowest = min(incident.attempt_id for incident in incidents)
    return AttemptId(generation=lowest.generation, attempt=max(0, lowest.attempt - 1))
