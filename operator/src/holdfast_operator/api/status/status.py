"""The status as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from holdfast_operator.api import names as c
from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, items, number, part
from holdfast_operator.api.status import operator_state
from holdfast_operator.api.status.conditions import Condition, ConditionType, StartupProblem
from holdfast_operator.api.status.failure_history import ActionHistory, NodeFailures
from holdfast_operator.api.status.goodput import Goodput
from holdfast_operator.api.status.incidents import Incident, IncidentCount
from holdfast_operator.api.status.membership import Membership
from holdfast_operator.api.status.placement import AvoidedNode, GangAttempt
from holdfast_operator.api.status.progress import Checkpoint, Progress, StartingPoint
from holdfast_operator.api.status.serialization import each, optional, time_or_none, without_nulls
from holdfast_operator.api.status.workers import Phase, Worker
from holdfast_operator.api.times import parse_time

_NO_WORLD = AttemptId(generation=0, attempt=0)
_NOBODY = Membership()
_NOWHERE = StartingPoint()
_NO_WAIT = GangAttempt()


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole status of a job."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    summary: str = ""
    ready_workers: int = 0
    wanted_workers: int = 0
    replicas: int = 0
    selector: str = ""
    incident_count: int = 0
    incarnations: int = 0
    membership: Membership = _NOBODY
    incidents_by_cause: tuple[IncidentCount, ...] = ()
    incidents: tuple[Incident, ...] = ()
    forgotten: AttemptId = _NO_WORLD  # the highest world whose incident fell off that list
    last_checkpoint: Checkpoint | None = None
    progress: Progress | None = None
    goodput: Goodput | None = None
    origin: StartingPoint = _NOWHERE
    avoided: tuple[AvoidedNode, ...] = ()
    gang: GangAttempt = _NO_WAIT
    workers: tuple[Worker, ...] = ()
    extra: int = 0  # workers wanted beyond replicas
    grown_at: datetime | None = None
    trouble: StartupProblem | None = None
    backoff_until: datetime | None = None
    held_back: int = 0  # replacements that wait for that
    stalled_since: datetime | None = None
    counted_batch: int = -1
    tallies: tuple[ActionHistory, ...] = ()
    offenders: tuple[NodeFailures, ...] = ()
    document: str = ""
    applied: str = ""  # digest of the children that were applied last
    quarantined: tuple[str, ...] = ()
    start_time: datetime | None = None
    completion_time: datetime | None = None

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of this type."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Whether the condition of this type is true."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    def first_true(self, *kinds: ConditionType) -> Condition | None:
        """The first condition of these types that is true."""
        return next((condition for kind in kinds if (condition := self.condition(kind)) and condition.status), None)

    @property
    def terminal(self) -> bool:
        """Complete or Failed: for good."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    def forgot(self, pair: AttemptId) -> bool:
        """Whether the incident of a world was recorded, and fell off the list since."""
        return pair <= self.forgotten and all(incident.pair != pair for incident in self.incidents)

    def in_phase(self, *phases: Phase) -> tuple[Worker, ...]:
        """Workers in one of these phases."""
        return tuple(worker for worker in self.workers if worker.phase in phases)

    def with_worker(self, changed: Worker) -> Status:
        """The same with one worker replaced, found by incarnation."""
        kept = (changed if worker.incarnation == changed.incarnation else worker for worker in self.workers)
        return replace(self, workers=tuple(kept))

    def to_json(self) -> dict[str, Any]:
        """As in the resource's status."""
        return {
            "observedGeneration": self.observed_generation,
            "conditions": [condition.to_json() for condition in self.conditions],
            "summary": self.summary,
            "readyWorkers": self.ready_workers,
            "workers": self.wanted_workers,
            "replicas": self.replicas,
            "selector": self.selector,
            "incidentCount": self.incident_count,
            "membership": self.membership.to_json(),
            "incidentsByCause": [count.to_json() for count in self.incidents_by_cause],
            "incidents": [incident.to_json() for incident in self.incidents],
            "lastCheckpoint": self.last_checkpoint.to_json() if self.last_checkpoint else None,
            "progress": self.progress.to_json() if self.progress else None,
            "goodput": self.goodput.to_json() if self.goodput else None,
            "startedFrom": self.origin.to_json(),
            "avoidedNodes": [avoided.to_json() for avoided in self.avoided],
            "backoffEndTime": time_or_none(self.backoff_until),
            "operatorState": operator_state.encode(self._operator_state()),
            "startTime": time_or_none(self.start_time),
            "completionTime": time_or_none(self.completion_time),
        }

    def _operator_state(self) -> dict[str, Any]:
        return {
            "incarnations": self.incarnations,
            "gang": without_nulls(self.gang.to_json()),
            "workers": [worker.to_json() for worker in self.workers],
            "extra": self.extra,
            "grownTime": time_or_none(self.grown_at),
            "trouble": self.trouble.to_json() if self.trouble else None,
            "heldBack": self.held_back,
            "stalledTime": time_or_none(self.stalled_since),
            "countedBatch": self.counted_batch,
            "forgotten": self.forgotten.to_json(),
            "tallies": [tally.to_json() for tally in self.tallies],
            "offenders": [offender.to_json() for offender in self.offenders],
            "document": self.document,
            "applied": self.applied,
            "quarantined": list(self.quarantined),
        }

    @classmethod
    def from_json(cls, value: Json) -> Status:
        """Read back. A part that cannot be read is dropped: its neighbours stay."""
        state = operator_state.decode(value)
        incidents = each(value.get("incidents"), Incident.from_json)
        workers = each(state.get("workers"), Worker.from_json)
        return cls(
            observed_generation=number(value.get("observedGeneration")),
            conditions=each(value.get("conditions"), Condition.from_json),
            summary=str(value.get("summary") or ""),
            ready_workers=max(0, number(value.get("readyWorkers"))),
            wanted_workers=max(0, number(value.get("workers"))),
            replicas=number(value.get("replicas")),
            selector=str(value.get("selector") or ""),
            incident_count=number(value.get("incidentCount")),
            incarnations=max([number(state.get("incarnations")), *(worker.incarnation + 1 for worker in workers)]),
            membership=Membership.from_json(part(value, "membership")),
            incidents_by_cause=each(value.get("incidentsByCause"), IncidentCount.from_json),
            incidents=incidents,
            forgotten=parse_pair(state.get("forgotten")) or _below(incidents),
            last_checkpoint=optional(value.get("lastCheckpoint"), Checkpoint.from_json),
            progress=optional(value.get("progress"), Progress.from_json),
            goodput=optional(value.get("goodput"), Goodput.from_json),
            origin=StartingPoint.from_json(part(value, "startedFrom")),
            avoided=each(value.get("avoidedNodes"), AvoidedNode.from_json),
            gang=GangAttempt.from_json(part(state, "gang")),
            workers=workers,
            extra=max(0, number(state.get("extra"))),
            grown_at=parse_time(state.get("grownTime")),
            trouble=optional(state.get("trouble"), StartupProblem.from_json),
            backoff_until=parse_time(value.get("backoffEndTime")),
            held_back=max(0, number(state.get("heldBack"))),
            stalled_since=parse_time(state.get("stalledTime")),
            counted_batch=number(state.get("countedBatch"), -1),
            tallies=each(state.get("tallies"), ActionHistory.from_json),
            offenders=each(state.get("offenders"), NodeFailures.from_json),
            document=str(state.get("document") or ""),
            applied=str(state.get("applied") or ""),
            quarantined=tuple(map(str, items(state.get("quarantined")))),
            start_time=parse_time(value.get("startTime")),
            completion_time=parse_time(value.get("completionTime")),
        )


def _below(incidents: tuple[Incident, ...]) -> AttemptId:
    """What an earlier release, which kept no note of it, may have forgotten: all below those of a full list."""
    if len(incidents) < c.MAX_INCIDENTS:
        return _NO_WORLD
    lowest = min(incident.pair for incident in incidents)
    return AttemptId(generation=lowest.generation, attempt=max(0, lowest.attempt - 1))
