"""The responses to steps whose loss or gradients are not finite. Pure.

All inputs are agreed values or parts of the train state. All ranks therefore get the same response at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.core.json_fields import JsonFields
from holdfast.training.data.sample_range import SampleRange
from holdfast.training.guards.settings import Guards


class Response(StrEnum):
    """The response to a skipped step."""

    SKIP = "skip"
    """Continue with the next batch."""
    LOWER = "lower"
    """Continue with a lower learning rate."""
    ROLL_BACK = "roll-back"
    """Resume from a checkpoint before the row of skipped steps."""
    FAIL = "fail"
    """Fail the job: a budget is spent."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteSteps(JsonFields):
    """The steps of a run that were not finite, and the responses. Every rank has the same.

    `first`, `spiked`, `samples` and `ranks` describe the present row of skipped steps. `spiked` says whether one of
    them was a spike. `ranks` are those with a loss that is not finite, and `last_ranks` those in the last step.
    `reached` is the last step of the row before the last roll-back, and `restored` is the step to which that
    roll-back went.
    """

    skipped: int = 0
    in_a_row: int = 0
    first: int = 0
    spiked: bool = False
    samples: tuple[SampleRange, ...] = ()
    ranks: tuple[int, ...] = ()
    last_ranks: tuple[int, ...] = ()
    roll_backs: int = 0
    reached: int = 0
    restored: int = 0
    learning_rate: float = 1.0
    lowered_until: int = 0

    def factor_at(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        return self.learning_rate if step <= self.lowered_until else 1.0

    def with_skipped(
        self, step: int, samples: Sequence[SampleRange], ranks: Sequence[int], *, spiked: bool = False
    ) -> NonFiniteSteps:
        """Return the record after one more skipped step."""
        return replace(
            self,
            skipped=self.skipped + 1,
            in_a_row=self.in_a_row + 1,
            first=self.first if self.in_a_row else step,
            samples=(*self.samples, *samples),
            ranks=tuple(sorted({*self.ranks, *ranks})),
            last_ranks=tuple(ranks),
            spiked=self.spiked or spiked,
        )

    def with_finite(self) -> NonFiniteSteps:
        """Return the record after an applied step, which ends the row."""
        if not self.in_a_row:
            return self
        return replace(self, in_a_row=0, first=0, samples=(), ranks=(), last_ranks=(), spiked=False)

    def lowered(self, guards: Guards, step: int) -> NonFiniteSteps:
        """Return the record with a lower learning rate for the steps after `step`."""
        rate = self.factor_at(step) * guards.learning_rate_factor
        return replace(self, learning_rate=rate, lowered_until=step + guards.lowered_steps)

    @property
    def description(self) -> str:
        """The steps and ranks of the present row."""
        last = self.first + self.in_a_row - 1
        steps = f"step {self.first}" if last == self.first else f"steps {self.first} to {last}"
        if self.spiked:
            return f"the loss or the gradients of {steps} were not finite or far above the usual ones"
        ranks = ", ".join(map(str, self.ranks))
        where = f"the loss on rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "the gradients"
        return f"{where} of {steps} {'was' if ranks else 'were'} not finite"


@dataclass(frozen=True, kw_only=True)
class RollBack(JsonFields):
    """A roll-back that the next world carries out.

    It restores a step below `before`. `skipped` are all samples that the restored state must not use.
    """

    before: int
    record: NonFiniteSteps
    skipped: tuple[SampleRange, ...]
    reason: str


def respond(guards: Guards, record: NonFiniteSteps, *, at_once: bool = False) -> Response:
    """Return the response to the last step, which was skipped and is in the record.

    `at_once`: the step rolls back, for example because a weight is not finite, so no later step can be finite.
    """
    if record.skipped > guards.max_skipped_steps:
        return Response.FAIL
    if at_once or record.in_a_row >= guards.roll_back_after:
        return Response.ROLL_BACK if record.roll_backs < guards.max_roll_backs else Response.FAIL
    lowers = record.in_a_row == guards.lower_after and guards.learning_rate_factor < 1.0
    return Response.LOWER if lowers else Response.SKIP


def roll_back(record: NonFiniteSteps, skipped: Sequence[SampleRange], step: int, weight: str = "") -> RollBack:
    """Return the roll-back after the last step, `step`. `skipped` has the samples that are skipped already.

    `weight` is the name of a weight that is not finite.

    If the job fails again before it has passed the steps of the last roll-back, that one did not go far enough: the
    next one goes to an earlier step.
    """
    again = record.roll_backs > 0 and record.first <= record.reached
    after = replace(record.with_finite(), roll_backs=record.roll_backs + 1, reached=step)
    return RollBack(
        before=record.restored if again else record.first,
        record=after,
        skipped=tuple(sorted({*skipped, *record.samples})),
        reason=f"{weight} is not finite; {record.description}" if weight else record.description,
    )
