"""Carries out the responses of guards, and logs which rank, samples and module caused them."""

from __future__ import annotations

import logging
from typing import Final

from holdfast.core.errors import BadSampleError, NonFiniteError
from holdfast.core.limits import MAX_TEXT
from holdfast.training.data import Position, share_of
from holdfast.training.data.loader import Loader
from holdfast.training.guards import messages
from holdfast.training.guards.first_module import FirstModule
from holdfast.training.guards.non_finite import NonFiniteSteps, Response, roll_back
from holdfast.training.guards.settings import Guards
from holdfast.training.guards.spikes import Spike
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.recovery.team import Team
from holdfast.training.step.step_result import StepOutcome
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
_MOST_SAMPLES: Final = 32
_MOST_OF_BATCH: Final = 256
"""The numbers of samples that a log line names: of one rank, and of the global batch."""


class Responses:
    """Carries out the responses on this rank. Every rank calls it after the same steps."""

    def __init__(self, *, state: TrainState, agent: LauncherConnection, guards: Guards, has_folder: bool) -> None:
        self._state = state
        self._agent = agent
        self._guards = guards
        self._has_folder = has_folder
        self._watch = FirstModule(state.objects)

    def carry_out(self, outcome: StepOutcome, loader: Loader | None, team: Team) -> bool:
        """Carry out the response to the last step. Return whether the job rolls back, in the next world.

        Raise `NonFiniteError` if the job fails instead.
        """
        response, record = outcome.response, self._state.non_finite
        if outcome.spike is not None:
            self._report_spike(outcome.spike, team)
        if response is None:
            self._watch.disarm()
            return False
        self._agent.send("skipped", step=self._state.step, lowered=response is Response.LOWER)
        self._explain(outcome, loader, team)
        weight = outcome.non_finite_weight
        if response is Response.FAIL:
            raise NonFiniteError(messages.budget_spent(record, self._guards, weight))
        if response is not Response.ROLL_BACK:
            if response is Response.LOWER and team.group.rank == 0:
                until, rate = record.lowered_until, record.learning_rate
                _log.warning("the learning rate is multiplied by %g until step %d", rate, until)
            return False
        why = self._obstacle(team, weight)
        if why:
            raise NonFiniteError(messages.cannot_roll_back(record, weight, why))
        self._begin_roll_back(record, weight)
        return True

    def _report_spike(self, spike: Spike, team: Team) -> None:
        step = self._state.step
        self._agent.send("spike", step=step, quantity=spike.quantity, value=spike.value, usual=spike.usual)
        if not spike.skips and team.group.rank == 0:  # a skipped step has its own line in the log
            _log.warning("step %d: %s", step, spike)

    def check_samples(self, outcome: StepOutcome) -> None:
        """Report the samples that the last step skipped. Raise `BadSampleError` if the job skipped too many."""
        record, found = self._state.bad_samples, outcome.bad_samples
        if found:
            self._agent.send(
                "badSamples",
                step=self._state.step,
                samples=[one.to_json() for one in found[:_MOST_SAMPLES]],
                number=len(found),
            )
        if self._guards.max_bad_samples and len(record.samples) > self._guards.max_bad_samples:
            raise BadSampleError(messages.too_many_bad_samples(record, self._guards))

    def _begin_roll_back(self, record: NonFiniteSteps, weight: str) -> None:
        state = self._state
        if weight and record.factor_at(state.step) == 1.0 and self._guards.learning_rate_factor < 1.0:
            record = record.lowered(self._guards, state.step)
        skipped = () if state.position is None else state.position.skipped
        state.roll_back = roll_back(record, skipped, state.step, weight)
        before, reason = state.roll_back.before, state.roll_back.reason
        message = f"the job rolls back to a checkpoint before step {before}: {reason}"
        _log.warning("%s", message)
        self._watch.disarm()
        samples = sum(one.end - one.begin for one in record.samples)
        self._agent.send("rolledBack", step=state.step, message=message[:MAX_TEXT], samples=samples)

    def _obstacle(self, team: Team, weight: str) -> str:
        """Return why this job cannot restore an earlier state; "" if it can, or if the other ranks may have one."""
        several = team.group.size > 1
        if several and not self._agent.connected:
            return "it has several ranks, and no launcher (holdfast run)"
        alone = weight and several  # other ranks may have the state with finite weights: the next world decides
        return "" if self._has_folder or alone else "it has no checkpoint folder"

    def _explain(self, outcome: StepOutcome, loader: Loader | None, team: Team) -> None:
        """Log ranks, samples and, from the second step of a row, the module."""
        record = self._state.non_finite
        if self._watch.armed:
            if self._watch.name:
                _log.warning(
                    "rank %d: the first module with an output that is not finite is %s",
                    team.group.rank,
                    self._watch.name,
                )
            self._watch.disarm()
        elif record.in_a_row == 1 and not record.spiked:
            self._watch.arm()
        if team.group.rank == 0 and loader is not None:
            self._name_samples(record, loader, outcome.world_size)

    def _name_samples(self, record: NonFiniteSteps, loader: Loader, size: int) -> None:
        """Log the samples of the ranks whose loss was not finite; without such a rank, those of the global batch."""
        position = self._state.position
        if position is None:
            return
        step, batch = self._state.step, loader.batch_at(size)
        cursor = position.cursor - batch
        if not record.last_ranks:
            named = _names(loader, position, range(cursor, position.cursor), most=_MOST_OF_BATCH)
            _log.warning("step %d: the batch had the samples %s", step, named)
        for rank in record.last_ranks:
            share = share_of(cursor=cursor, batch=batch, rank=rank, world_size=size)
            named = _names(loader, position, range(share.begin, share.end), most=_MOST_SAMPLES)
            _log.warning("step %d, rank %d: the batch had the samples %s", step, rank, named)


def _names(loader: Loader, position: Position, numbers: range, *, most: int) -> str:
    named = ", ".join(str(loader.sample(number, position)[1]) for number in numbers[:most])
    more = len(numbers) - most
    return (named or "(none)") + (f" and {more} more" if more > 0 else "")
