"""Promises and whether they were kept. Pure: no cluster, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_testbed.drill.job_view import AttemptId, Incident, Progress


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The guarantees of a job after one fault."""

    fault: str
    within_seconds: float
    max_lost_steps: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The cost of a fault, from outside and by the job's own report."""

    injected_at: float
    before: AttemptId
    resumed_seconds: float
    noticed_seconds: float | None
    lost_steps: int
    incidents: tuple[Incident, ...]
    complaints: tuple[str, ...] = ()
    """Other checks of the drill that failed, in addition to steps and causes."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    promise: Promise
    outcome: Outcome
    complaints: tuple[str, ...]

    @property
    def held(self) -> bool:
        return not self.complaints


def losses_and_causes(promise: Promise, outcome: Outcome) -> tuple[str, ...]:
    """Return the violations that a test asserts: all guarantees except times."""
    complaints = list(outcome.complaints)
    if outcome.lost_steps > promise.max_lost_steps:
        complaints.append(f"{outcome.lost_steps} steps lost, {promise.max_lost_steps} promised at most")
    causes = [incident.cause for incident in outcome.incidents]
    if causes != [promise.cause]:
        complaints.append(f"counted as {causes or 'nothing'}, promised: once as {promise.cause}")
    return tuple(complaints)


def judge(promise: Promise, outcome: Outcome) -> Verdict:
    """Return the demo's verdict, which includes times."""
    complaints = losses_and_causes(promise, outcome)
    if outcome.resumed_seconds > promise.within_seconds:
        late = f"next step after {outcome.resumed_seconds:.1f} s, promised within {promise.within_seconds:.0f} s"
        complaints = (late, *complaints)
    return Verdict(promise=promise, outcome=outcome, complaints=complaints)


def first_new_step(seen: list[Progress], before: AttemptId) -> float | None:
    """Return when a world after `before` was first seen to complete a step.

    A pod that enters a world still shows the last world's step, then the restored one. Only an increase above the
    lowest step that it showed in the new world is a step of that world.
    """
    lowest: dict[tuple[str, AttemptId], int] = {}
    for progress in seen:
        if progress.attempt_id <= before:
            continue
        key = (progress.pod, progress.attempt_id)
        lowest[key] = min(lowest.get(key, progress.step), progress.step)
        if progress.step > lowest[key]:
            return progress.at
    return None


def lost_steps(seen: list[Progress], before: AttemptId, incidents: tuple[Incident, ...]) -> int:
    """Return the steps that were completed in the ended world and trained again after it.

    The job's own number is exact. The observer's is a lower bound, because it samples. The larger one is used, so
    that a job which under-reports does not pass. The first step that a pod shows in a world has no meaning: a new pod
    shows step 0, and a pod whose rank was killed shows its last report.
    """
    last = max((p.step for p in seen if p.attempt_id <= before), default=0)
    shown: dict[str, Progress] = {}
    made = []
    for progress in seen:
        if progress.attempt_id > before and progress.step > 0 and not _old(shown.get(progress.pod), progress, before):
            made.append(progress.step)
        shown[progress.pod] = progress
    told = sum(incident.lost_steps or 0 for incident in incidents)
    return max(0, last - min(made, default=last), told)


def _old(earlier: Progress | None, now: Progress, before: AttemptId) -> bool:
    """Return whether a pod may still show a step of the world that ended."""
    if earlier is None or now.step < earlier.step:
        return False
    return now.step == earlier.step or earlier.attempt_id <= before
