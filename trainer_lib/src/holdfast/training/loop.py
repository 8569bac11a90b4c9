"""The training loop of a managed job: batches, steps, and the recovery when a world ends.

A step is applied by all ranks or by none (`protocol.step_commit`, `step.stepper`). When a peer is lost, this process
keeps its state and waits for its place in the next world, within the current call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar

import torch

from holdfast.core.errors import CheckpointError, PeerLostError, UsageError
from holdfast.core.limits import MAX_TEXT
from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import Ledger
from holdfast.training.checkpointing.hooks import CheckpointHooks
from holdfast.training.checkpointing.script_failure import ScriptFailure
from holdfast.training.data import Position, Unreadable
from holdfast.training.data.loader import Loader
from holdfast.training.data.readable_dataset import Reports
from holdfast.training.data.script_batch import ScriptBatch, Taken
from holdfast.training.guards import out_of_memory
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.guards.responses import Responses
from holdfast.training.launcher_client import exception_reporter
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.recovery.replica_digest import ReplicaReport
from holdfast.training.recovery.replica_sync import ReplicaSync
from holdfast.training.recovery.team import Team
from holdfast.training.recovery.world_entry import WorldEntry
from holdfast.training.step.call_mismatch import Call
from holdfast.training.step.device_memory import MemoryWatch, empty_caches, free_graph
from holdfast.training.step.step_result import StepOutcome, StepResult
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
Result = TypeVar("Result")
Repeat = Callable[[], StepResult]
_LAST_STEP_MADE: Final = "the last step of this attempt is finished"
_NO_SMALLER: Final = "empty caches did not help, and the micro-batches cannot be smaller"


class Progress(Enum):
    """The phase of the script."""

    SET_UP = "no loop over `job.batches` has started; a script with its own loader never starts one"
    IN_LOOP = "the loop is running, or ended early"
    DONE = "the last step is durable, and the launcher knows that this rank is done"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The data of `job.batches`. `alike`: each rank gets the same number of micro-batches."""

    loader: Loader
    start: Position
    max_steps: int
    alike: bool


class TrainingLoop:
    """Executes the steps of a managed job, in successive worlds."""

    def __init__(
        self,
        *,
        agent: LauncherConnection,
        meter: Meter,
        ledger: Ledger,
        state: TrainState,
        stepper: Stepper,
        entry: WorldEntry,
        hooks: CheckpointHooks,
        team: Team,
        responses: Responses,
        reports: Reports,
        announce: Callable[[], None],
        replicas: ReplicaSync,
    ) -> None:
        self._agent = agent
        self._meter = meter
        self._ledger = ledger
        self._state = state
        self._stepper = stepper
        self._entry = entry
        self._hooks = hooks
        self._responses = responses
        self._reports = reports
        self._announce = announce
        self._batch = ScriptBatch()
        self._replicas = replicas
        self._memory = MemoryWatch(state.trained())
        self.loader: Loader | None = None
        self.team = team
        self.progress = Progress.SET_UP

    @property
    def optimizer_failed(self) -> bool:
        """Whether the optimizer failed within a step, so that the other ranks cannot use the state."""
        return self._stepper.optimizer_failed

    def begin(self) -> None:
        """Begin in the first world. A restored state is complete, so the memory for checkpoints is reserved now."""
        self._enter(self.team)
        if self._state.step:
            self._hooks.prepare()

    # Batches

    def batches(self, batches: Batches) -> Iterator[Any]:
        """Yield this rank's micro-batches until `max_steps` are completed, and then finish."""
        if self.progress is Progress.SET_UP:
            self.progress = Progress.IN_LOOP
        if self._state.step > batches.max_steps:
            _log.warning("step %d is past max_steps %d: the loop makes no step", self._state.step, batches.max_steps)
        while True:
            while self._state.step < batches.max_steps:
                yield from self._one_step(batches)
            if self._finish():
                return

    def _one_step(self, batches: Batches) -> Iterator[Any]:
        team, loader = self.team, batches.loader
        self._meter.enter(Activity.DATA, self._state.step)
        self._stepper.begin()
        position = self._state.position or batches.start
        self._state.position = position
        parts = loader.parts(
            position,
            rank=team.group.rank,
            world_size=team.group.size,
            alike=batches.alike,
            micro_batch=self._state.out_of_memory.limit(loader.micro_batch),
        )
        for part in parts:
            micro = loader.fetch(part, position)
            self._log_unreadable(micro.unreadable, "skipped")
            self._stepper.skip_unreadable(micro.unreadable)
            self._batch.give(micro, last=part is parts[-1])
            self._meter.enter(Activity.COMPUTE)
            yield micro.data
            if self.team is not team:
                return  # the rest of this step was planned for a world that has ended
            if self._batch.held:
                raise UsageError("the loop took a batch and did not call job.step(loss) for it")
            self._meter.enter(Activity.DATA)
        if not parts:  # more ranks than samples: this rank only adds zeros
            self._end_step(loader.batch_at(team.group.size))

    def _log_unreadable(self, samples: tuple[Unreadable, ...], how: str) -> None:
        step, rank = self._state.step + 1, self.team.group.rank
        for one in samples:
            _log.warning("step %d, rank %d: sample %d is %s: %s", step, rank, one.sample, how, one.error)

    # Steps

    def step(self, loss: torch.Tensor, samples: float | None) -> StepResult:
        """`job.step`."""
        return self._take(loss, samples, exception_reporter.ours)

    def run_step(self, fn: Callable[[], torch.Tensor], samples: float | None) -> StepResult:
        """`job.run_step`."""
        team = self.team
        if team.cancel.is_set() or (self.loader is not None and not self._batch.held):
            # Nothing to compute, because the peers are not in `fn` either.
            return self.step(torch.zeros((), device="cpu"), samples)
        lost = partial(exception_reporter.lost, cancel=team.cancel, single_rank=team.group.size == 1)
        repeat: Repeat | None = None
        try:
            loss = fn()
        except Exception as error:
            repeat = self._repeat_after(error, lost)
            if repeat is None:
                raise
        if repeat is not None:  # after the handler, because its error holds the frames and the graph
            if self._batch.held:
                self._batch.take()
            return repeat()
        return self._take(loss, samples, lost)

    def _take(self, loss: torch.Tensor, samples: float | None, lost: Callable[[Exception], str]) -> StepResult:
        taken = None if self.loader is None else self._batch.take()
        if self.loader is not None and taken is None:
            return StepResult(committed=False, step=self._state.step, reason="Retried")
        cancel = self.team.cancel
        if cancel.is_set():
            free_graph(loss)
            return self._retry(PeerLostError(cancel.reason))
        try:
            return self._step(loss, taken, 1.0 if samples is None else float(samples), lost)
        except Exception as error:
            # This rank contributes nothing to the averages. The launcher must receive the error even if the script
            # ignores it, so that peers do not wait.
            exception_reporter.report(self._agent, error, self._state.step)
            raise

    def _step(
        self, loss: torch.Tensor, taken: Taken | None, own: float, lost: Callable[[Exception], str]
    ) -> StepResult:
        batch = None if self.loader is None else self.loader.batch_at(self.team.group.size)
        last = taken is None or taken.last
        weight = taken.micro.samples / batch if taken and batch else own
        repeat: Repeat | None = None
        try:
            self._stepper.add(loss, weight, taken.micro.seen if taken else None, last=last)
        except Exception as error:
            repeat = self._repeat_after(error, lost)  # the error holds the frames and the graph
            if repeat is None:
                raise
        if repeat is not None:
            free_graph(loss)
            return repeat()
        if not last:
            return StepResult(committed=False, step=self._state.step, reason="Accumulating")
        return self._end_step(batch)

    def _end_step(self, samples: int | None) -> StepResult:
        self._log_unreadable(self._reports.fresh(), "replaced")
        self._stepper.skip_unreadable(self._reports.pending)
        with self.team.calls.during(Call.STEP):
            repeat: Repeat | None = None
            try:
                outcome = self._stepper.finish(samples)
            except Exception as error:
                repeat = self._repeat_after(error, exception_reporter.ours)
                if repeat is None:
                    raise
            if repeat is not None:
                return repeat()
            if not outcome.result.committed:
                self._ledger.step(step=self._state.step, committed=False)
            rolled_back = self._respond(outcome)
            if rolled_back is not None:
                return rolled_back
            try:
                self._hooks.prepare()
                if self._replicas.due(self.team, saves=self._hooks.saves(outcome.agreed)):
                    with self._meter.during(Activity.VOTE):
                        self._replicas.check(self.team)
                self._memory.look(self._state.step)
                if self._hooks.after_step(outcome.agreed):
                    self._leave(_LAST_STEP_MADE)
            except PeerLostError as error:
                self._retry(error)
        if self.loader is None:  # without the loader's loop, it is unknown what follows a step
            self._meter.enter(Activity.APPLY, self._state.step)
        return outcome.result

    def _respond(self, outcome: StepOutcome) -> StepResult | None:
        """Carry out the responses of the guards to a step. Return the result if the job rolls back."""
        self._reports.pending = ()
        self._responses.check_samples(outcome)
        return self._roll_back() if self._responses.carry_out(outcome, self.loader, self.team) else None

    # Between steps

    def save(self) -> bool:
        """`job.save`."""
        if self._batch.skip_save():
            self._hooks.skip_save()
            return False
        try:
            return self._hooks.save()
        except PeerLostError as error:
            self._retry(error)
            self._batch.end_world_in_save()
            return False

    def verify_replicas(self) -> ReplicaReport | None:
        """`job.verify_replicas`."""
        return self._together(self._verify)

    def synchronize(self, source: int) -> None:
        """`job.synchronize`."""
        others = [rank for rank in range(self.team.group.size) if rank != source]
        self._together(lambda: self._replicas.synchronize(self.team, others))

    def _verify(self) -> ReplicaReport:
        report = self._replicas.verify(self.team)
        self._replicas.repair(self.team, report)
        return report

    def _together(self, call: Callable[[], Result]) -> Result | None:
        """Make a call between two steps that takes all ranks. Return None if the world ended before it or in it."""
        if self._batch.world_ended:
            return None
        if self._stepper.accumulates:
            raise UsageError(
                "job.verify_replicas() or job.synchronize() was called within a global batch, whose gradients would "
                "be lost: call it between two steps, after job.step has returned another reason than Accumulating"
            )
        try:
            with self.team.calls.during(Call.COMPARE):
                return call()
        except PeerLostError as error:
            self._retry(error)
            return None

    def close(self) -> None:
        """Finish, unless the script left its loop early."""
        while self.progress is not Progress.IN_LOOP and not self._finish():
            pass

    def fail(self, trace: TracebackType | None) -> None:
        """After a failure of the script, make its last step durable if no rank keeps it."""
        failure = ScriptFailure(
            agent=self._agent, hooks=self._hooks, state=self._state, stepper=self._stepper, team=self.team
        )
        failure.save(trace)

    def leave_groups(self, *, failed: bool) -> None:
        """Leave the groups in order. If the script left its loop early, leave them when the process ends."""
        if self.progress is Progress.IN_LOOP and not failed:
            self.team.outlive()
        else:
            self.team.close()

    def _finish(self) -> bool:
        """Make the last step durable and report that this rank is done.

        Return False if the world ended, to try again.
        """
        try:
            self._hooks.finish()
        except PeerLostError as error:
            self._retry(error)
            return False
        self._batch.skip_save()
        if self.progress is not Progress.DONE:
            self.progress = Progress.DONE
            report_done(self._agent, self._meter, self._state.step)
        return True

    # Worlds

    def _enter(self, team: Team) -> None:
        self.team = team
        self._ledger.reached(self._agent.reached)
        self._batch.take_back()
        self._hooks.enter(team)
        self._announce()
        self._meter.enter(Activity.DATA, self._state.step)

    def _retry(self, error: PeerLostError) -> StepResult:
        """Enter the next world, because the attempt is over."""
        self._agent.lose_peers(str(error))
        return self._repeat("")

    def _repeat_after(self, error: Exception, lost: Callable[[Exception], str]) -> Repeat | None:
        """Return the call that repeats the step after an error; None if the script gets the error.

        The call does not hold the error. Raise `torch.OutOfMemoryError` if no response to it is left.
        """
        over = lost(error)
        if over:
            return partial(self._retry, PeerLostError(over))
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        why, record = self._obstacle(), self.with_less_memory()
        if why or record is None:
            raise torch.OutOfMemoryError(out_of_memory.fails(str(error), why or _NO_SMALLER)) from error
        return partial(self._repeat_with_more_memory, record, str(error))

    def with_less_memory(self) -> OutOfMemory | None:
        """Return the record of GPU memory after another time; None if no response is left."""
        loader, state = self.loader, self._state
        requested = 0 if loader is None else loader.micro_batch
        share = 0 if loader is None else -(-loader.batch_at(self.team.group.size) // self.team.group.size)
        used = min(share, state.out_of_memory.limit(requested))
        return state.out_of_memory.once_more(state.step, requested=requested, used=used)

    def _obstacle(self) -> str:
        """Return why this rank cannot repeat the step with the other ranks; "" if it can."""
        if self._stepper.counted:
            return "the optimizer has begun to apply it"
        if not self._agent.connected:
            return "there is no launcher (holdfast run)"
        return "" if self._agent.parting().keep else "the script has a process group of its own"

    def _repeat_with_more_memory(self, record: OutOfMemory, error: str) -> StepResult:
        """Repeat the step in the next world. All ranks adopt the record there."""
        self._state.out_of_memory = record
        rank = self.team.group.rank
        message = out_of_memory.repeats(error, rank, record)[:MAX_TEXT]
        _log.warning("%s", message)
        self._agent.send(
            "outOfMemory", step=self._state.step, rank=rank, microBatch=record.micro_batch, message=message
        )
        empty_caches()
        return self._repeat("out of GPU memory")

    def _repeat(self, reason: str) -> StepResult:
        """Enter the next world. A prepared step may be applied meanwhile."""
        before = self._state.step
        self._leave(reason)
        applied = self._stepper.applied_in_recovery
        if applied is not None and applied.result.step == self._state.step > before:
            return self._respond(applied) or applied.result
        committed = self._state.step > before
        if committed:
            self._reports.pending = ()  # the step that the others completed has them
        return StepResult(committed=committed, step=self._state.step, reason="Committed" if committed else "Retried")

    def _roll_back(self) -> StepResult:
        """Leave the world, and restore an earlier step with the same ranks in the next one."""
        with suppress(PeerLostError, CheckpointError):
            self._hooks.wait()  # the running checkpoint may be the one to restore
        again = None if self._agent.connected else self.team.place  # without a launcher, there is no other place
        self._leave("the job rolls back", again)
        return StepResult(committed=False, step=self._state.step, reason="RolledBack")

    def _leave(self, reason: str, again: RankPlacement | None = None) -> None:
        self._entry.leave(self.team, reason)
        self._hooks.leave()
        self._enter(self._entry.enter(again))
        if self.loader is not None:  # otherwise it is unknown where the script's loop continues
            self._batch.end_world()


def report_done(agent: LauncherConnection, meter: Meter, step: int) -> None:
    """Report to the launcher that this rank's work is done."""
    meter.enter(Activity.DONE, step)
    agent.send("done", step=step)
