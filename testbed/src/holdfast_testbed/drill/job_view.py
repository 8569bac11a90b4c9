"""A job as a user sees it: the resource and the pods' metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)$")


@dataclass(frozen=True, kw_only=True, order=True)
class AttemptId:
    """The number of an attempt to train together; attempts are ordered."""

    generation: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress that one pod reports, with the time at which it was read (seconds, monotonic)."""

    at: float
    pod: str
    attempt_id: AttemptId
    step: int
    workers: int
    loss: float | None = None
    warm: int = 0


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One entry of `status.incidents`."""

    number: int
    attempt_id: AttemptId
    cause: str
    action: str
    reason: str
    message: str
    detected: datetime | None
    resumed: datetime | None
    lost_steps: int | None
    restored_from: str | None = None
    pod: str = ""
    decision: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The parts of a FaultTolerantJob's status that a story needs."""

    phase: str = ""
    ready: str = ""
    conditions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    incidents_by_cause: Mapping[str, int] = field(default_factory=dict)
    generation: int = 0
    members: tuple[str, ...] = ()
    checkpoint_step: int | None = None
    divergences: int = 0

    def is_true(self, condition: str) -> bool:
        return self.conditions.get(condition, ("", "", ""))[0] == "True"


def parse_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus text, without labels, because a sidecar exports one pod only."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            samples[match["name"]] = float(match["value"])
    return samples


def progress_of(pod: str, metrics: Mapping[str, float], at: float) -> Progress | None:
    """Return the progress of a pod; None while it is in no world."""
    generation = int(metrics.get("holdfast_world_generation", 0))
    if generation == 0:
        return None
    return Progress(
        at=at,
        pod=pod,
        attempt_id=AttemptId(generation=generation, attempt=int(metrics.get("holdfast_world_attempt", 0))),
        step=int(metrics.get("holdfast_training_completed_step", 0)),
        workers=int(metrics.get("holdfast_world_workers", 0)),
        loss=metrics.get("holdfast_training_loss"),
        warm=int(metrics.get("holdfast_warm_processes", 0)),
    )


def parse_job(resource: Mapping[str, Any]) -> JobView:
    """Parse a FaultTolerantJob from the output of `kubectl get -o json`."""
    status = resource.get("status") or {}
    membership = status.get("membership") or {}
    checkpoint = status.get("lastCheckpoint") or {}
    return JobView(
        phase=status.get("summary", ""),
        ready=f"{status['readyWorkers']}/{status['workers']}"
        if "readyWorkers" in status and "workers" in status
        else "",
        conditions=_conditions(status.get("conditions") or ()),
        incidents=tuple(_incident(entry) for entry in status.get("incidents") or ()),
        incidents_by_cause={entry["cause"]: int(entry["count"]) for entry in status.get("incidentsByCause") or ()},
        generation=int(membership.get("generation", 0)),
        members=tuple(member["pod"] for member in membership.get("members") or ()),
        checkpoint_step=checkpoint.get("step"),
        divergences=int((status.get("divergences") or {}).get("count", 0)),
    )


def _conditions(entries: Iterable[Mapping[str, str]]) -> dict[str, tuple[str, str, str]]:
    return {e["type"]: (e["status"], e.get("reason", ""), e.get("message", "")) for e in entries}


def _incident(entry: Mapping[str, Any]) -> Incident:
    return Incident(
        number=int(entry.get("number", 0)),
        attempt_id=AttemptId(generation=int(entry["generation"]), attempt=int(entry["attempt"])),
        cause=entry["cause"],
        action=entry.get("action", ""),
        reason=entry.get("reason", ""),
        message=entry.get("message", ""),
        detected=_time(entry.get("detectedTime")),
        resumed=_time(entry.get("resumedTime")),
        lost_steps=entry.get("lostSteps"),
        restored_from=entry.get("restoredFrom"),
        pod=entry.get("pod") or "",
        decision=entry.get("decision", ""),
        why=entry.get("why", ""),
    )


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
