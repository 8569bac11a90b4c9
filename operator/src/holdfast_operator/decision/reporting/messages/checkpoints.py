"""Suspension, checkpoints and where training starts."""

from __future__ import annotations

from holdfast_operator.decision.reporting.messages.common import count


def suspending(workers: int, *, launched: bool) -> str:
    how = "after a coordinated checkpoint" if launched else "on SIGTERM, within their grace period"
    verb = "is" if workers == 1 else "are"
    return f"{count(workers, 'worker')} {verb} leaving {how}"


def no_worker_left(why: str) -> str:
    return f"No worker is left; {why}"


def script_resumes() -> str:
    return "the script decides from where it resumes (rendezvous.backend)"


def newest_checkpoint(step: int) -> str:
    return f"the newest known checkpoint is of step {step}"


def never_trained() -> str:
    return "the job has not trained yet"


def starts_over() -> str:
    return "neither checkpoint.volume nor checkpoint.object is set, so the job will start from step 0"


def no_checkpoint() -> str:
    return "no checkpoint is known"


def resumes_from(step: int, *, suspended_before: bool) -> str:
    where = "" if suspended_before else " in the job's folder (checkpoint.resume: Always)"
    return f"Training resumes from the checkpoint of step {step}{where}"


def starts_without_checkpoint() -> str:
    return "Training starts at step 0: no checkpoint exists"


def starts_by_request() -> str:
    return (
        "Training starts at step 0 (checkpoint.resume: Never); checkpoints of earlier jobs stay in the job's folder"
        " and are neither read nor deleted"
    )


def checkpoints_failing(since: str, cause: str, error: str, step: int, fix: str) -> str:
    return (
        f"No checkpoint could be written since {since} ({cause}): {error}. Training continues, but resumes from step"
        f" {step} if all workers are lost: {fix}"
    )


def events_suppressed(message: str, more: int) -> str:
    return f"{message} ({more} more events suppressed)"
