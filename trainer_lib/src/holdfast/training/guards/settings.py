"""`holdfast.Guards`: numbers that are not finite, spikes, unreadable samples, and replicas that differ. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.core.errors import UsageError
from holdfast.training.options.validation import check_whole

_MOST_RETRIES: Final = 10
_MOST_BAD_SAMPLES: Final = 10_000
"""Each checkpoint has a list of them."""


class SpikeResponse(StrEnum):
    """The response to a loss or a gradient norm far above the last ones, from the weakest to the strongest."""

    IGNORE = "ignore"
    WARN = "warn"
    """Apply the step, and report it."""
    SKIP = "skip"
    """Treat the step like one that is not finite."""
    ROLL_BACK = "roll-back"
    """Treat the step like the last one of a row that rolls back."""


@dataclass(frozen=True, kw_only=True)
class Guards:
    """The responses to steps whose loss or gradients are not finite, and to samples that cannot be read.

    Each step that is not finite is skipped. Longer rows of skipped steps have further responses:

    - After `lower_after` skipped steps in a row, the learning rate is multiplied by `learning_rate_factor` (1: never)
      for the next `lowered_steps` applied or skipped steps.
    - After `roll_back_after` skipped steps in a row, the job resumes from the newest checkpoint before the row, and
      skips the samples of the row.
    - The job fails after more than `max_roll_backs` roll-backs, or more than `max_skipped_steps` skipped steps.

    A loss or a gradient norm is a spike if it is more than `spike_score` robust standard deviations above the median
    of the last `spike_window` steps. `loss_spike` and `gradient_spike` are the responses: "ignore", "warn", "skip" or
    "roll-back".

    A sample that `job.batches` cannot read is read again up to `sample_retries` times and then skipped. The job fails
    after more than `max_bad_samples` different ones. With 0, the exception of the dataset ends the script instead.

    After every `replica_check_steps` steps (0: never), and before each checkpoint of the interval, the job compares
    the weights and the optimizer state of all replicas. A rank that differs receives the state of the majority.
    """

    lower_after: int = 5
    learning_rate_factor: float = 0.5
    lowered_steps: int = 100
    roll_back_after: int = 10
    max_roll_backs: int = 3
    max_skipped_steps: int = 1000
    loss_spike: SpikeResponse | str = SpikeResponse.WARN
    gradient_spike: SpikeResponse | str = SpikeResponse.WARN
    spike_score: float = 10.0
    spike_window: int = 100
    sample_retries: int = 2
    max_bad_samples: int = 100
    replica_check_steps: int = 200

    def __post_init__(self) -> None:
        check_whole("lower_after", self.lower_after, least=1)
        check_whole("lowered_steps", self.lowered_steps, least=1)
        check_whole("roll_back_after", self.roll_back_after, least=1)
        check_whole("max_roll_backs", self.max_roll_backs, least=0)
        check_whole("max_skipped_steps", self.max_skipped_steps, least=0)
        check_whole("sample_retries", self.sample_retries, least=0)
        check_whole("max_bad_samples", self.max_bad_samples, least=0)
        check_whole("replica_check_steps", self.replica_check_steps, least=0)
        _check_factor(self.learning_rate_factor)
        _check_samples(self.sample_retries, self.max_bad_samples)
        check_whole("spike_window", self.spike_window, least=10)
        _check_score(self.spike_score)
        _check_spike("loss_spike", self.loss_spike, self.max_roll_backs)
        _check_spike("gradient_spike", self.gradient_spike, self.max_roll_backs)
        if self.learning_rate_factor < 1.0 and self.lower_after >= self.roll_back_after:
            raise UsageError(
                f"lower_after is {self.lower_after} and roll_back_after {self.roll_back_after}, so the learning rate "
                "would never be lowered: lower lower_after, or set learning_rate_factor=1"
            )
        if self.max_roll_backs and self.max_skipped_steps < self.roll_back_after:
            raise UsageError(
                f"max_skipped_steps is {self.max_skipped_steps} and roll_back_after {self.roll_back_after}, so the "
                "job would fail before it rolls back: raise max_skipped_steps, or set max_roll_backs=0"
            )

    @property
    def watches_no_spikes(self) -> bool:
        return self.loss_spike == self.gradient_spike == SpikeResponse.IGNORE


def checked_guards(guards: Guards | None) -> Guards:
    """Return the guards of `holdfast.init`. Raise `UsageError` for any other object."""
    if guards is not None and not isinstance(guards, Guards):
        raise UsageError(f"guards is of type {type(guards).__name__}: expected holdfast.Guards(…)")
    return guards or Guards()


def _check_samples(retries: int, most: int) -> None:
    if retries > _MOST_RETRIES:
        raise UsageError(
            f"sample_retries is {retries}, so that a bad sample would delay all ranks: expected at most "
            f"{_MOST_RETRIES}; retry for longer in the dataset itself"
        )
    if most > _MOST_BAD_SAMPLES:
        raise UsageError(
            f"max_bad_samples is {most}, and each checkpoint lists them: expected at most {_MOST_BAD_SAMPLES}; "
            "remove bad samples from the dataset"
        )


def _check_factor(factor: float) -> None:
    number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if not number or not math.isfinite(factor) or not 0.0 < factor <= 1.0:
        raise UsageError(
            f"learning_rate_factor is {factor!r}: expected a number above 0 and at most 1, for example 0.5"
        )


def _check_score(score: float) -> None:
    number = isinstance(score, (int, float)) and not isinstance(score, bool)
    if not number or not math.isfinite(score) or score < 1.0:
        raise UsageError(f"spike_score is {score!r}: expected a number of at least 1, for example 10")


def _check_spike(field: str, response: str, max_roll_backs: int) -> None:
    if response not in list(SpikeResponse):
        raise UsageError(f"{field} is {response!r}: expected one of {', '.join(map(repr, map(str, SpikeResponse)))}")
    if response == SpikeResponse.ROLL_BACK and not max_roll_backs:
        raise UsageError(
            f"{field} is 'roll-back' and max_roll_backs 0, so the first spike would fail the job: raise "
            f"max_roll_backs, or set {field}='skip'"
        )
