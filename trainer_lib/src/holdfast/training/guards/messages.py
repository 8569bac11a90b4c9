"""The messages of errors with which guards end a job. Pure."""

from __future__ import annotations

from typing import Final

from holdfast.training.data import BadSamples
from holdfast.training.guards.non_finite import NonFiniteSteps, RollBack
from holdfast.training.guards.settings import Guards

_ADVICE: Final = (
    "Lower the learning rate, set max_grad_norm, or look for the cause in the samples (the log names those of "
    "job.batches). If each restart ends like this, end the job and resume from an older checkpoint: holdfast "
    "checkpoints rewind FOLDER --step N"
)

_MOST_NAMED: Final = 3
_MOST_LISTED: Final = 50


def nothing_earlier(roll_back: RollBack) -> str:
    """Return the message if no checkpoint is old enough."""
    return (
        f"{roll_back.reason}. No checkpoint before step {roll_back.before} exists, so the job cannot roll back, and "
        f"it does not start over. {_ADVICE}"
    )


def cannot_roll_back(record: NonFiniteSteps, weight: str, why: str) -> str:
    """Return the message if the job cannot restore any checkpoint."""
    return f"{_what(record, weight)}. The job cannot roll back: {why}. {_ADVICE}"


def budget_spent(record: NonFiniteSteps, guards: Guards, weight: str) -> str:
    """Return the message if a budget of the guards is spent."""
    if record.skipped > guards.max_skipped_steps:
        return f"{_what(record, weight)}. More than {guards.max_skipped_steps} steps were skipped. {_ADVICE}"
    return f"{_what(record, weight)}. The job has rolled back {record.roll_backs} times already. {_ADVICE}"


def too_many_bad_samples(record: BadSamples, guards: Guards) -> str:
    """Return the message if more samples cannot be read than the guards allow."""
    number, most = len(record.samples), guards.max_bad_samples
    named = "; ".join(map(str, record.samples[-_MOST_NAMED:]))
    listed = ", ".join(str(one.sample) for one in record.samples[:_MOST_LISTED])
    more = f" and {number - _MOST_LISTED} more" if number > _MOST_LISTED else ""
    return (
        f"{number} samples of the dataset cannot be read, and max_bad_samples is {most}. The last ones: {named}. "
        f"All samples: {listed}{more}. Repair these samples or remove them from the dataset, or raise "
        "max_bad_samples in holdfast.Guards"
    )


def _what(record: NonFiniteSteps, weight: str) -> str:
    if weight:
        return f"{weight} holds values that are not finite, so no later step can be finite ({record.description})"
    return f"{record.in_a_row} steps in a row were not finite: {record.description}"
