"""One trial of a case of the matrix, on a job that trains. The records of its script show the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.faults import DrillJob, commits, delete_pod, step_of
from holdfast_testbed.drill.job_view import AttemptId, Incident, JobView
from holdfast_testbed.drill.matrix import BATCH, EPOCH_STEPS, Case
from holdfast_testbed.drill.watcher import PodView

WORKERS = 3
PATIENCE = 120.0
UNDISTURBED_SECONDS = 3.0
LATE_COUNT_SECONDS = 2.0
POLL = 0.2
MOVES = 3

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of everything since the records were cleared."""

    lost: int = 0
    wrong: int = 0
    equal: bool = True


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one trial.

    `detected` is None without an incident; then `resumed` is the longest pause, and there may be only one world.
    """

    case: str
    resumed: float | None
    detected: float | None = None
    lost: int = 0
    wrong: int = 0
    equal: bool = False
    skipped: int = 0
    divergences: int = 0
    """Those that the status counts, with the condition `ReplicasDiverged`."""
    worlds: int = 1
    counted: Mapping[str, int] = field(default_factory=dict)
    complaint: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that is kept between runs."""
        return asdict(self)

    def held(self, case: Case) -> bool:
        """Return whether everything was kept that is promised, except times."""
        counted = {case.cause: 1} if case.cause else {}
        whole = self.resumed is not None and self.equal and not self.wrong and not self.complaint
        same = bool(case.cause) or self.worlds == 1 + case.repeated_steps
        skips = self.skipped == case.skipped_steps or (bool(case.cause) and not case.skipped_steps)
        reported = not case.repeated_steps or self.detected is not None
        equal = self.divergences == case.divergences
        kept = self.lost <= case.max_lost_steps and dict(self.counted) == counted
        return whole and same and skips and reported and equal and kept


def settle(job: DrillJob, workers: int = WORKERS, *, warm: bool = True) -> None:
    """Wait until all workers train in one world and, on request, until the standby processes are ready."""
    job.watcher.wait_for_world(workers, steps=5, timeout=240)
    if warm:
        job.watcher.wait(
            "warm processes", lambda: all(job.watcher.warm(pod.name) for pod in job.workers()), timeout=120
        )


def cost_so_far(job: DrillJob) -> Cost:
    """Return the cost since the records were cleared."""
    return _cost(_noted(job))


def run(case: Case, job: DrillJob, *, warm: bool = True) -> Trial:
    """Run a trial: settle, inject, watch, repair, settle again, judge.

    Without `warm`, do not wait for standby processes.
    """
    trial = _run(case, job, warm)
    if case.spoils_pod:
        _renew(job)
    return trial


def _run(case: Case, job: DrillJob, warm: bool) -> Trial:
    settle(job, warm=warm)
    _place(case, job)
    known = dict(job.watcher.view.incidents_by_cause)
    diverged = job.watcher.view.divergences
    counted_before = {incident.attempt_id for incident in job.watcher.view.incidents}
    script_log.clear(job.checkpoints)
    if case.max_lost_steps:
        _await_commit(job)
    before = _await("a step", lambda: _known(script_log.newest_attempt(_noted(job))), 30.0)
    job.struck.clear()
    asked = time.time()
    try:
        case.inflict(job)
        struck = job.struck[-1] if job.struck else _struck(job, asked)
        resumed = _resumed(case, job, before, struck)
    except TimeoutError as error:
        return Trial(case=case.name, resumed=None, complaint=str(error))
    finally:
        if case.repair is not None:
            case.repair(job)
    settle(job, warm=warm)
    _await_count(case, job, known, diverged)
    seen = _noted(job)
    told = [incident for incident in job.watcher.view.incidents if incident.attempt_id not in counted_before]
    times = [incident.detected.timestamp() for incident in told if incident.detected]
    trial = Trial(
        case=case.name,
        resumed=script_log.longest_pause(seen, struck) if resumed is None else resumed - struck,
        detected=max(0.0, min(times) - struck) if times else None,
        **asdict(_cost(seen)),
        skipped=script_log.skipped_steps(seen),
        divergences=newly_diverged(diverged, job.watcher.view),
        worlds=script_log.worlds(seen),
        counted=newly_counted(known, job.watcher.view.incidents_by_cause),
    )
    return trial if trial.held(case) else replace(trial, complaint=_story(told))


def _cost(seen: list[script_log.Note]) -> Cost:
    return Cost(
        lost=script_log.lost_steps(seen),
        wrong=script_log.wrong_samples(seen, batch=BATCH, epoch=EPOCH_STEPS),
        equal=script_log.weights_equal(seen),
    )


def _story(told: Sequence[Incident]) -> str:
    """Return the job's text on each incident, because a failed trial is hard to reproduce."""
    return "; ".join(f"{one.attempt_id} {one.cause} {one.reason}, {one.action}: {one.message}" for one in told)


def _place(case: Case, job: DrillJob) -> None:
    for _ in range(MOVES):
        pod = case.misplaced(job)
        if pod is None:
            return
        _renew(job, pod)


def _renew(job: DrillJob, pod: PodView | None = None) -> None:
    """Replace the pod of this worker, or the last one, and wait until its loss is counted, before the next trial."""
    known = _decided(job)
    delete_pod(job, pod)
    job.watcher.wait("the pod's loss", lambda: _decided(job) != known, 120)
    settle(job)


def _decided(job: DrillJob) -> dict[int, str]:
    """Return the decisions, by number. A container's end after its memory ran out extends the same incident."""
    return {incident.number: incident.decision for incident in job.watcher.view.incidents}


def _await_commit(job: DrillJob) -> None:
    """Wait for a checkpoint whose steps are recorded, so that restored weights can be compared."""

    def noted() -> bool:
        steps = script_log.committed_steps(_noted(job))
        return any(step_of(commit) in steps for commit in commits(job.checkpoints))

    job.watcher.wait("a checkpoint", noted, timeout=60)


def _noted(job: DrillJob) -> list[script_log.Note]:
    """Return the records of complete steps so far."""
    until = time.time()
    return script_log.whole(script_log.read(job.checkpoints), until)


def _await_count(case: Case, job: DrillJob, known: Mapping[str, int], diverged: int) -> None:
    """Wait until the operator has counted the incident or divergence, and then for a possible second count."""

    def counted() -> bool:
        view = job.watcher.view
        new = newly_counted(known, view.incidents_by_cause) if case.cause else newly_diverged(diverged, view)
        return bool(new)

    if case.cause or case.divergences:
        with contextlib.suppress(TimeoutError):  # the trial fails below because nothing was counted
            job.watcher.wait("a count", counted, PATIENCE)
    time.sleep(LATE_COUNT_SECONDS)


def _struck(job: DrillJob, asked: float) -> float:
    return _await("the script to fail", lambda: script_log.struck_at(script_log.read(job.checkpoints), asked), 60.0)


def _resumed(case: Case, job: DrillJob, before: AttemptId, struck: float) -> float | None:
    """Return the time of a later world's step; None, after a wait, if no cause is expected."""
    if not case.cause:
        time.sleep(UNDISTURBED_SECONDS)
        return None
    what = f"the next step after '{case.fault}'"
    return _await(what, lambda: script_log.resumed_at(script_log.read(job.checkpoints), before, struck), PATIENCE)


def _known(attempt_id: AttemptId) -> AttemptId | None:
    return attempt_id if attempt_id.generation else None


def _await(what: str, find: Callable[[], T | None], seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:.0f} s still waiting for: {what}")
        time.sleep(POLL)
    return found


def newly_diverged(before: int, view: JobView) -> int:
    """Return the number of new divergences; 0 if the condition does not show them."""
    return view.divergences - before if view.is_true("ReplicasDiverged") else 0


def newly_counted(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {cause: count - before.get(cause, 0) for cause, count in after.items() if count != before.get(cause, 0)}
