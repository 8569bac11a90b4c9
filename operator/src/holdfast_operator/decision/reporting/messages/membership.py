"""Membership."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.decision.reporting.messages.common import CERTAIN, count


def known_twice(pods: Sequence[str], generation: int) -> str:
    return f"{', '.join(pods)} received two different publications of generation {generation}"


def waiting_for_all(ready: int, workers: int) -> str:
    return f"{ready} of {workers} workers are ready; waiting for all"


def waiting_for_starting(pods: str) -> str:
    return f"{pods} is ready; waiting briefly for other starting workers"


def up_to_date(generation: int) -> str:
    return f"Generation {generation} is up to date"


def awaiting_fence(pods: Sequence[str], generation: int) -> str:
    return (
        f"{', '.join(pods)} of generation {generation} may still be running. Training resumes when they report or are"
        f" fenced. {CERTAIN}"
    )


def foreign_claim(job_uid: str, publication: str, generation: int) -> str:
    return (
        f"The checkpoint folder has a claim of job {job_uid}, publication {publication}, at generation {generation}"
    )


def newer_generation(reported: int, recorded: int) -> str:
    return (
        f"Workers report generation {reported}, but the status has {recorded}: was the status restored from a backup?"
    )


def other_publication(pod: str, generation: int, theirs: str, ours: str) -> str:
    return f"{pod} is training in generation {generation} of publication {theirs}, but the status has {ours}"


def ready(workers: int, requested: int) -> str:
    if workers == requested:
        return f"All {workers} workers are ready"
    return f"{workers} of {requested} workers are ready"


def ready_without_others(workers: int, requested: int) -> str:
    return f"{ready(workers, requested)}; the others are unschedulable"


def ready_in_time(workers: int, requested: int, seconds: float) -> str:
    return f"{ready(workers, requested)} after {seconds:.0f} s"


def pods_ready(pods: str) -> str:
    return f"{pods} is ready"


def pods_returned(pods: str) -> str:
    return f"{pods} of the last active generation reports again"


def waiting_for_checkpoint(pods: str) -> str:
    return f"{pods} is ready; waiting for the end of a checkpoint"


def waiting_for_replacement(seconds: float) -> str:
    return f"Waiting up to {seconds:.0f} s for a replacement (shrinkAfterSeconds)"


def scaled_down(before: int, after: int) -> str:
    return f"Scaled down from {before} to {count(after, 'worker')}"


def none_reports() -> str:
    return "No worker of the last generation reports"


def workers_missing(missing: int) -> str:
    return f"{count(missing, 'worker')} missing"


def loss_not_agreed() -> str:
    return "The reporting workers still reach the silent ones"


def survivors_continue(workers: int, before: int) -> str:
    return f"{workers} of {before} workers continue"


def too_few_ready(ready_workers: int, minimum: int, step: int) -> str:
    steps = f" in steps of {step}" if step > 1 else ""
    return f"{count(ready_workers, 'worker')} ready; a world needs at least {minimum}{steps}"


def generation_published(generation: int, why: str, pods: Sequence[str]) -> str:
    return f"Generation {generation}: {why} ({', '.join(pods)})"
