"""The state of the job."""

from __future__ import annotations

from collections.abc import Sequence


def no_recovery() -> str:
    return "No recovery in progress"


def all_training() -> str:
    return "All requested workers are training"


def training(workers: int, requested: int, *, launched: bool) -> str:
    verb = _verb(launched=launched)
    if workers > requested:
        return f"{workers} workers {verb} ({requested} requested)"
    return f"{workers} of {requested} workers {verb}"


def fewer_training(workers: int, requested: int, *, launched: bool) -> str:
    return f"{workers} of {requested} workers {_verb(launched=launched)}; replacements are on the way"


def _verb(*, launched: bool) -> str:
    """Return the verb: only Holdfast's launchers report whether the workers train."""
    return "are training" if launched else "are running"


def starting(phases: Sequence[str]) -> str:
    return "Workers are starting" + (f"; launchers report {'; '.join(phases)}" if phases else "")


def recovering() -> str:
    return "Workers are forming the next world"


def spares_ready(ready: int, spares: int) -> str:
    return f"{ready} of {spares} spares are on standby"


def no_volume() -> str:
    return "checkpoint.volume is not set; checkpoints are lost with the pods"


def invalid_spec(detail: str) -> str:
    return f"Spec not understood by this operator version: {detail}"


def unsuspended() -> str:
    return "The job is no longer suspended"


def suspended() -> str:
    return "The job is suspended"


def deadline_exceeded(seconds: int) -> str:
    return f"The job was active for {seconds} s (activeDeadlineSeconds)"


def completed(step: int | None) -> str:
    return "Training is complete" + (f" at step {step}" if step is not None else "")


def checkpoint_quarantined(path: str, reason: str) -> str:
    return f"Checkpoint {path} is corrupt and was set aside: {reason}"
