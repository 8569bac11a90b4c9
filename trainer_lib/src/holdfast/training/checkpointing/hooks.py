"""Checkpoints at the points of the training loop where one may be due: after a step, in `job.save`, and at the end.

The scheduler decides when a checkpoint is due. Every rank makes the same calls.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from typing import Final

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.saving.checkpoint_index import told
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.flatten import sampled, trained
from holdfast.checkpoint.state.numerics import fingerprint as numerics
from holdfast.checkpoint.tiers.tier import Tier
from holdfast.core.errors import PeerLostError, UsageError
from holdfast.telemetry.activity import Activity, Meter
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.options.config import JobConfig
from holdfast.training.protocol.step_ballot import Agreed
from holdfast.training.recovery.team import Team
from holdfast.training.step.call_mismatch import Call
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
# The seconds between two tries of a failed checkpoint.
_PAUSE_SECONDS: Final = 1.0
_CHANGED: Final = (
    "the checkpoint of step %d holds weights that the script changed after that step, outside of the optimizer, and "
    "a restart continues from them. Make such changes in optimizer.register_step_post_hook(), as part of the step"
)
_CHANGED_IN_EVALUATION: Final = (
    'job.save() was called in job.phase("evaluation") while the model does not hold the weights of step {step}: '
    "it may hold averaged weights. Put the trained weights back first, or call job.save() before the "
    "phase"
)


class CheckpointHooks:
    """Makes the checkpoints of a managed job, in successive worlds."""

    def __init__(
        self,
        *,
        scheduler: CheckpointScheduler,
        engine: CheckpointManager | None,
        agent: LauncherConnection,
        config: JobConfig,
        state: TrainState,
        stepper: Stepper,
        meter: Meter,
        team: Team,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._agent = agent
        self._config = config
        self._state = state
        self._stepper = stepper
        self._meter = meter
        self._team = team
        self._prepared: Team | None = None

    def enter(self, team: Team) -> None:
        """Make the next checkpoints in this world."""
        self._team = team
        self._scheduler.begin(coordinator=team.place.rank == 0, cancel=team.cancel)

    def leave(self) -> None:
        """Abandon the unfinished checkpoints of an attempt that is over."""
        self._scheduler.leave()

    def prepare(self) -> None:
        """Reserve memory once per world, when the state is complete: an optimizer has its state only after a step."""
        if self._engine is not None and self._prepared is not self._team:
            self._prepared = self._team
            flat = self._state.flat()
            self._engine.prepare(flat.specs, self._team.holding(flat.sharded))

    # Timing

    def saves(self, agreed: Agreed) -> bool:
        """Return whether a checkpoint follows this step that has no deadline. It is the same on every rank."""
        due = self._scheduler.due_at(self._state.step) or agreed.checkpoint
        return due and self._scheduler.has_folder and not (agreed.urgent or agreed.quiesce)

    def after_step(self, agreed: Agreed) -> bool:
        """Make the checkpoints that are due after a step. Return whether the job then leaves the world.

        A failed checkpoint is repeated after the next step, because the request stays. Without a checkpoint folder,
        there is nothing to wait for.
        """
        scheduler, step = self._scheduler, self._state.step
        if agreed.urgent:
            scheduler.lift_rate_limit()
        requested = agreed.quiesce and agreed.node_local
        # On these tiers, a checkpoint replaces the last one, and a roll-back needs one before a row of skipped steps.
        in_row = self._state.non_finite.in_a_row > 0
        for tier in scheduler.due_now(step, requested=requested):
            if requested or not in_row:
                self._save_now(tier, requested=requested)
        needed = agreed.quiesce or (agreed.pause and agreed.bound)
        leaves = agreed.pause and not needed
        background_tier = scheduler.due_in_background(step, busy=agreed.busy)
        if scheduler.due_at(step) or agreed.checkpoint or needed:
            if needed:
                scheduler.await_retry(_PAUSE_SECONDS)
            self.begin(onward=not needed)
            leaves = leaves or (needed and (self.wait() or not scheduler.has_folder))
        elif background_tier is not None and not leaves and not in_row:
            self._save_in_background(background_tier)
        if leaves:
            self._agree_to_leave()
        return leaves

    def save(self) -> bool:
        """Make a checkpoint at the script's request. Return whether it is durable."""
        return self._save_between_steps(Call.SAVE)

    def skip_save(self) -> None:
        """Make the checkpoint that the script requests with the next step."""
        self._scheduler.postpone()

    def finish(self) -> None:
        """Wait until the last step is durable, before the job is reported as complete."""
        self.wait()
        while self.behind:
            with self._meter.during(Activity.CHECKPOINT):
                while not self._scheduler.await_retry(_PAUSE_SECONDS):
                    self._meter.enter(Activity.CHECKPOINT)  # again, because a pause is not a hang
            self._save_between_steps(Call.END)
        self._scheduler.answer_rest(self._state.step)

    def _agree_to_leave(self) -> None:
        """Wait until all ranks have reported the checkpoint before this rank leaves.

        The first launcher that detects the end of the attempt ends it for every rank.
        """
        with suppress(PeerLostError):
            self.wait()
            self._team.group.barrier()
        self._agent.send("quiesced", step=self._state.step)

    def _save_between_steps(self, call: Call) -> bool:
        step = self._state.step
        if self._stepper.weights.changed():
            if self._meter.activity is Activity.EVALUATION:
                raise UsageError(_CHANGED_IN_EVALUATION.format(step=step))
            _log.warning(_CHANGED, step)
        with self._team.calls.during(call):
            self.begin(onward=call is Call.SAVE)
            return self.wait()

    # Writing

    @property
    def begun(self) -> int:
        """The number of checkpoints that were begun in this attempt."""
        return 0 if self._engine is None else self._engine.saves

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._scheduler.busy

    @property
    def behind(self) -> bool:
        """Whether the last step is not durable yet."""
        return self._scheduler.behind(self._state.step)

    def begin(self, *, spare: bool = False, onward: bool = False) -> None:
        """Begin a checkpoint of the last step, as `CheckpointScheduler.save` does.

        A roll-back needs the checkpoints before a row of skipped steps, so none is deleted during the row.
        """
        spare = spare or self._state.non_finite.in_a_row > 0
        self._stepper.check()
        with self._meter.during(Activity.CHECKPOINT):
            self._scheduler.save(self._state.step, self._snapshot, spare=spare, onward=onward)

    def wait(self) -> bool:
        """Wait for the running checkpoint. Return whether the last step is durable after it."""
        with self._meter.during(Activity.CHECKPOINT) if self.busy else nullcontext():
            self._scheduler.settle()
        return self._scheduler.has_folder and not self.behind

    def _save_now(self, tier: Tier, *, requested: bool) -> None:
        self._stepper.check()
        with self._meter.during(Activity.CHECKPOINT):
            self._scheduler.save_now(tier, self._state.step, self._snapshot, requested=requested)

    def _save_in_background(self, tier: Tier) -> None:
        self._stepper.check()
        with self._meter.during(Activity.CHECKPOINT):
            self._scheduler.save_in_background(tier, self._state.step, self._snapshot)

    def _snapshot(self) -> Snapshot:
        state, team, flat = self._state, self._team, self._state.flat()
        return Snapshot(
            name=CheckpointName(step=state.step, attempt_id=team.attempt_id),
            specs=flat.specs,
            holding=team.holding(flat.sharded),
            read=flat.read,
            fill=flat.fill,
            weights=self._stepper.weights.among(flat.tensors),
            inexact=trained(state.objects, flat) if self._config.delta_threshold else frozenset(),
            state={
                "objects": flat.tree,
                "counters": {"skipped": state.skipped},
                "nonFinite": state.non_finite.to_json(),
                "recent": state.recent.to_json(),
                "badSamples": state.bad_samples.to_json(),
                "outOfMemory": state.out_of_memory.to_json(),
                "ramp": state.rates.to_json(),
                "metrics": told(state.metrics),
                "failures": self._scheduler.failures.to_json(),
                "streams": state.streams.to_json(),
            },
            data=None if state.position is None else state.position.to_json(),
            per_rank={"rank": team.group.rank, "worldSize": team.group.size, "rng": rng.capture()},
            numerics=numerics(),
            samples=sampled(state.objects, flat) if team.group.size > 1 else {},
        )
