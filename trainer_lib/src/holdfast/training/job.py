"""The surface that a training script sees: `job = holdfast.init()`, and the loop over `job.batches` with `job.step`.

A step is applied by all ranks or by none (`marks`, `stepping`). When a peer is lost, this process keeps its state,
waits inside the call that it is in for its place in the next world, and lines up there (`lineup`): the script sees
a `StepResult` that says `Retried`, and the same samples again, divided over whoever is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from threading import Timer
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
import torch.distributed

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.saving.checkpoint_index import told
from holdfast.checkpoint.saving.protocol import Snapshot
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.flatten import Stateful, check_savable, flatten, sampled, trained
from holdfast.checkpoint.state.numerics import fingerprint as numerics
from holdfast.core.errors import CheckpointError, HoldfastError, PeerLostError, StateError, UsageError
from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import Ledger
from holdfast.training.checkpointing import final_checkpoint
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.data import Audit, Position, expected_audit
from holdfast.training.data.loader import Loader, MapDataset, MicroBatch, fingerprint, make_loader
from holdfast.training.distributed.blocking_call import unless_cancelled
from holdfast.training.distributed.fsdp import Sharding, check_sharded
from holdfast.training.distributed.process_group import store_client
from holdfast.training.launcher_client import exception_reporter
from holdfast.training.launcher_client.connection import LauncherConnection, Parting
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.options.config import JobConfig
from holdfast.training.options.elasticity import Elasticity, Scaler
from holdfast.training.options.validation import check_managed, check_run, check_whole
from holdfast.training.protocol.step_ballot import Agreed
from holdfast.training.recovery.world_entry import Team, WorldEntry
from holdfast.training.step.call_mismatch import Call
from holdfast.training.step.stepper import Stepper, StepResult, let_go
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
Module = TypeVar("Module", bound=torch.nn.Module)
# Only a bound where nobody else sets one: launchers wait for `checkpoint.deadlineSeconds`.
_LAST_COMMIT_SECONDS: Final = 60.0
# Between two tries of a commit that has failed.
_PAUSE_SECONDS: Final = 1.0
_CHANGED: Final = (
    "the checkpoint of step %d holds weights that the script changed after that step, outside of the optimizer, and "
    "a restart continues from them. Make such changes in optimizer.register_step_post_hook(), as part of the step"
)
_CHANGED_IN_EVALUATION: Final = (
    'job.save() was called in job.phase("evaluation") while the model does not hold the weights of step {step}: '
    "averaged weights may stand in their place. Put the trained weights back first, or call job.save() before the "
    "phase"
)
_CHANGED_AT_FAILURE: Final = (
    "step %d is not committed: the script changed the weights after that step, outside of the optimizer. Averaged "
    "weights may stand in the model. Training resumes from the checkpoint before it"
)
_TORCHS = (torch.nn.Module, torch.optim.Optimizer)


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Whether every sample up to the cursor was consumed exactly once on the way to this state."""

    ok: bool
    seen: Audit
    expected: Audit

    def __str__(self) -> str:
        told = f"{self.seen.count} samples, hash {self.seen.hash:016x}"
        if self.ok:
            return f"exactly once ({told})"
        return f"WRONG: {told}, but expected {self.expected.count} samples, hash {self.expected.hash:016x}"


class Job:
    """One rank of a training job. Made by `holdfast.init`."""

    def __init__(
        self,
        *,
        agent: LauncherConnection,
        config: JobConfig,
        engine: CheckpointManager | None,
        meter: Meter,
        ledger: Ledger,
        device: Callable[[RankPlacement], torch.device],
        interface: str = "",
    ) -> None:
        self._agent = agent
        self._config = config
        self._engine = engine
        self._meter = meter
        self._ledger = ledger
        self._device_of = device
        self._interface = interface
        self._first: RankPlacement | None = None
        self._team: Team | None = None
        self._sharding: Sharding | None = None
        self._lineage = TrainState({})
        self._stepper: Stepper | None = None
        self._lineup: WorldEntry | None = None
        self._committer = CheckpointScheduler(engine, agent, config.interval, self._lineage)
        self._elasticity = Elasticity()
        self._loader: Loader | None = None
        self._micro: MicroBatch | None = None
        self._last_micro = True
        self._stale = False  # another world lined up since the script got its batch
        self._late = False  # so did one since: a save before the next batch is of the world that is gone
        self._prepared = 0  # the world for whose commits there is memory
        self._worlds = 0  # lined up so far: what was planned for an earlier one is stale
        self._callbacks: list[Callable[[Job], None]] = []
        self._alike = False
        self._looping = False
        self._done = False
        agent.parting = self._parting

    # What a script may ask

    @property
    def rank(self) -> int:
        """This process's number in the world. Before `manage` it waits for the world to be formed."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together now. Before `manage` it waits for the world to be formed."""
        return self._place.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's model belongs."""
        return torch.device("cpu") if not torch.cuda.is_available() else self._device_of(self._place)

    @property
    def generation(self) -> int:
        """The membership under which this attempt runs; 0 before `manage` in a script that was started by hand."""
        return self._pair[0]

    @property
    def attempt(self) -> int:
        """The attempt within its generation."""
        return self._pair[1]

    @property
    def run_id(self) -> str:
        """Stable over restarts: for experiment trackers."""
        return self._place.run_id if self._team is None else self._team.attempt.run_id

    @property
    def shard(self) -> int:
        """Which shard of the model this rank has; 0 if it is not sharded. It may change when the world does."""
        return 0 if self._sharding is None else self._sharding.shard

    @property
    def committed_step(self) -> int:
        """The last global step that was applied."""
        return self._lineage.step

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that should print and write for all. It may change when the world does."""
        return self.rank == 0

    def log(self, **values: Any) -> None:
        """One line of the log, on the coordinator only."""
        if self.is_coordinator:
            _log.info("progress", extra={"fields": {"step": self.committed_step, **values}})

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say what the script is doing while it makes no steps: `with job.phase("evaluation"):`."""
        return self._meter.during(_activity(name))

    def on_membership(self, callback: Callable[[Job], None]) -> None:
        """Call this with the job whenever another world has lined up, with its rank and size in place."""
        self._callbacks.append(callback)

    def audit(self) -> AuditResult:
        """Check the samples of all committed steps of this lineage against what they must be."""
        position = self._lineage.position
        if self._loader is None or position is None:
            raise UsageError("job.audit() needs job.batches(): only the job's own cursor can be audited")
        expected = expected_audit(size=self._loader.size, seed=position.seed, cursor=position.cursor)
        return AuditResult(ok=expected == position.audit, seen=position.audit, expected=expected)

    # What a script does

    def manage(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        elasticity: Elasticity | None = None,
        **stateful: Stateful,
    ) -> None:
        """Take charge of the state: get the newest good one if there is one, and keep it from now on.

        `elasticity` says how batch and learning rate follow the world's size; without it they do not.
        `scaler` is a `torch.amp.GradScaler`: `job.step` scales the loss and steps the optimizer through it.
        Anything else with `state_dict` and `load_state_dict` may be given by a name of its own.
        """
        if self._lineup is not None:
            raise UsageError("job.manage() was called twice: give it everything at once")
        check_sharded(self._sharding, _parameters(model, *stateful.values()), scaler)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **stateful}
        objects = {name: _checked(name, thing) for name, thing in named.items() if thing is not None}
        others = {name: thing for name, thing in objects.items() if not isinstance(thing, _TORCHS)}
        check_managed(objects, list(flatten(others).tensors.values()))
        check_savable(objects)
        self._elasticity = elasticity or self._elasticity
        self._lineage.rates = Scaler(optimizer, self._elasticity)
        self._lineage.objects.update(objects)
        self._lineage.sharding = self._sharding
        self._stepper = Stepper(
            self._lineage,
            self._agent,
            self._meter,
            wants_commit=self._committer.overdue,
            busy=self._committer.writes,
            max_grad_norm=max_grad_norm,
            scaler=scaler,
        )
        self._lineup = WorldEntry(
            agent=self._agent,
            engine=self._engine,
            config=self._config,
            lineage=self._lineage,
            stepper=self._stepper,
            meter=self._meter,
            device=self._device_of,
            interface=self._interface,
        )
        first, self._first = self._first, None
        self._line_up(self._lineup, first)
        if self.committed_step:
            self._prepare()

    def fully_shard(
        self, module: Module, *, size: int, reshard_after_forward: bool | None = None, mp_policy: Any = None
    ) -> Module:
        """Shard a module's parameters over replicas of `size` ranks, as torch's `fully_shard` (FSDP2) does.

        Call it bottom-up: on the layers, then on the whole model; before the optimizer is made, and with the same
        size. The world must be made of whole replicas.
        """
        check_whole("size", size, least=2)
        if self._sharding is None:
            self._sharding = Sharding(size, self.device, self._meter)
        if self._sharding.size != size:
            raise UsageError(f"job.fully_shard was called with size {self._sharding.size} and now with {size}")
        options = {"reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy}
        self._sharding.add(module, {name: value for name, value in options.items() if value is not None})
        return module

    def batches(
        self,
        dataset: MapDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        max_steps: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        alike: bool = False,
    ) -> Iterator[Any]:
        """This rank's micro-batches, step after step, until `max_steps` are committed.

        The samples of a step depend on the seed and the position only, not on how many ranks there are. Leave the
        loop by its end: that commits the last step and tells the launcher that the work is done. `alike` gives each
        rank as many micro-batches, for a model that communicates in forward: one too many has a sample that counts
        nothing. Sharded models get that by themselves.
        """
        self._parts()
        if self._done and max_steps > self.committed_step:
            raise UsageError(
                "job.batches() was called again after its loop had ended, which told the launcher that all is done: "
                "train all steps in one loop, and give its end as max_steps"
            )
        check_run(max_steps=max_steps, seed=seed)
        self._loader = make_loader(
            dataset,
            global_batch=global_batch_size,
            micro_batch=micro_batch_size,
            device=self.device,
            collate=collate,
            elasticity=self._elasticity,
        )
        start, saved = Position(fingerprint=fingerprint(dataset), seed=seed), self._lineage.position
        self._lineage.position = start if saved is None else start.resumed(saved)
        self._alike = alike or self._sharding is not None
        return self._loop(self._loader, start, max_steps)

    def step(self, loss: torch.Tensor, *, samples: float | None = None) -> StepResult:
        """Backward; at the end of the global batch average, apply and, when one is due, commit a checkpoint.

        `loss` is the mean over the micro-batch. A script with a loader of its own makes one global step a call, and
        says by `samples` how many its rank had, if they differ between ranks; 0 if it had none in this step.
        """
        return self._take(loss, samples, exception_reporter.ours)

    def run_step(self, fn: Callable[[], torch.Tensor], *, samples: float | None = None) -> StepResult:
        """`job.step(fn())` for a model that communicates: `fn` computes the loss, and is what is tried again.

        When a lost peer breaks a collective of the script's own, in `fn` or in backward, the result says `Retried`
        and the same samples come again. Any other error of `fn` is raised as it is, and the batch is not used up.
        """
        _, team = self._parts()
        if team.cancel.is_set() or (self._loader is not None and self._micro is None):
            return self.step(
                torch.zeros((), device="cpu"), samples=samples
            )  # nothing to compute: the others are not in `fn` either
        lost = partial(exception_reporter.lost, cancel=team.cancel, alone=team.group.size == 1)
        over = ""
        try:
            loss = fn()
        except Exception as error:
            over = lost(error)
            if not over:
                raise
        if over:  # after the handler, whose error holds the frames, and with them the graph
            self._micro = None
            return self._retry(PeerLostError(over))
        return self._take(loss, samples, lost)

    def _take(self, loss: torch.Tensor, samples: float | None, lost: Callable[[Exception], str]) -> StepResult:
        _, team = self._parts()
        micro, self._micro = self._micro, None
        if self._loader is not None and micro is None:
            if self._stale:
                self._stale = False
                return StepResult(committed=False, step=self.committed_step, reason="Retried")
            raise UsageError("job.step(loss) was called without a batch of job.batches: call it once for each batch")
        if team.cancel.is_set():
            let_go(loss)
            return self._retry(PeerLostError(team.cancel.reason))
        try:
            return self._step(loss, micro, 1.0 if samples is None else float(samples), lost)
        except Exception as error:
            # Its part of the averages will never come: should the script swallow this, the others must not wait.
            exception_reporter.tell(self._agent, error, self.committed_step)
            raise

    def _step(
        self, loss: torch.Tensor, micro: MicroBatch | None, own: float, lost: Callable[[Exception], str]
    ) -> StepResult:
        stepper, team = self._parts()
        batch = None if self._loader is None else self._loader.batch_at(team.group.size)
        weight = micro.samples / batch if micro and batch else own
        over = ""
        try:
            stepper.add(loss, weight, micro.seen if micro else None, last=micro is None or self._last_micro)
        except Exception as error:
            over = lost(error)  # the error itself holds the frames, and with them the graph
            if not over:
                raise
        if over:
            let_go(loss)
            return self._retry(PeerLostError(over))
        if micro is not None and not self._last_micro:
            return StepResult(committed=False, step=self.committed_step, reason="Accumulating")
        return self._end_step(batch)

    def save(self, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Commit a checkpoint now; every rank must call it at the same step. False if it failed (it was said why).

        What failed, or a lost peer broke off, is tried again after the next step. `metrics` are what was measured of
        this state, such as `{"val_loss": 2.1}`, by which `retention="best=val_loss:min"` keeps the best commits.
        """
        self._lineage.measured(metrics or {})
        if self._late:
            # A peer may have had this step's end before the loss: its save broke off, and its next call is a step.
            self._late = False
            self._committer.put_off()
            return False
        try:
            return self._commit_as(Call.SAVE)
        except PeerLostError as error:
            self._retry(error)
            self._late = self._stale  # this one was it, unless its batch's step is still to come
            return False

    def close(
        self, *, failed: Callable[[], bool] = lambda: False, trace: Callable[[], TracebackType | None] = lambda: None
    ) -> None:
        """Leave the world; done by itself when the script ends.

        A script without `job.batches` is done when it returns; leaving the loop half way is not being done. One that
        failed on every rank leaves its last step committed.
        """
        if not failed() and not self._looping:
            while self._lineup is not None and not self._finish():
                pass
            self._say_done()
        if failed() and self._engine is not None and self._stepper is not None and self._team is not None:
            self._fail(self._stepper, self._team, trace())
        with suppress(PeerLostError, CheckpointError):
            self._committer.settle()  # an exception after a save's copy must not take that save along
        self._agent.close()
        if self._team is None:
            return
        if self._looping and not failed():
            self._team.outlive()
        else:
            self._team.close()

    # Worlds

    @property
    def _place(self) -> RankPlacement:
        if self._team is not None:
            return self._team.place
        if self._lineup is not None and self._lineup.place is not None:
            return self._lineup.place  # a managed object asks, while its state is restored
        if self._first is None:
            self._first = self._agent.next_place()
            self._agent.enter(self._first)
        return self._first

    @property
    def _pair(self) -> tuple[int, int]:
        pair = self._place.pair if self._team is None else self._team.pair
        return (0, 0) if pair is None else (pair.generation, pair.attempt)

    def _parting(self) -> Parting:
        """What the agent says of this rank when it leaves an attempt; also called from the agent's thread."""
        torn = self._stepper is not None and self._stepper.torn
        own_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        standing = self._lineage.standing
        return Parting(step=standing.step, in_doubt=standing.doubt is not None, keep=not torn and not own_group)

    def _line_up(self, lineup: WorldEntry, first: RankPlacement | None = None) -> None:
        self._team = lineup.enter(first)
        self._ledger.reached(self._agent.reached)
        self._worlds += 1
        self._micro, self._stale = None, self._micro is not None
        self._committer.begin(coordinator=self.is_coordinator, cancel=self._team.cancel)
        for callback in self._callbacks:
            callback(self)
        self._meter.enter(Activity.DATA, self.committed_step)

    def _retry(self, error: PeerLostError) -> StepResult:
        """The attempt is over: line up in the next. A step in doubt may have been applied on the way."""
        before = self.committed_step
        self._agent.lose_peers(str(error))
        self._leave("")
        rolled = None if self._stepper is None else self._stepper.rolled
        if rolled is not None and rolled.step == self.committed_step > before:
            return rolled
        committed = self.committed_step > before
        reason = "Committed" if committed else "Retried"
        return StepResult(committed=committed, step=self.committed_step, reason=reason)

    def _leave(self, reason: str) -> None:
        if self._lineup is None or self._team is None:
            raise AssertionError("not in a world")
        self._lineup.leave(self._team, reason)
        self._committer.leave()
        self._line_up(self._lineup)
        self._late = self._loader is not None  # without one nobody says where the script's loop begins anew

    # Stepping

    def _loop(self, loader: Loader, start: Position, max_steps: int) -> Iterator[Any]:
        self._looping = True
        if self.committed_step > max_steps:
            _log.warning("step %d is past max_steps %d: no step is made", self.committed_step, max_steps)
        while True:
            while self.committed_step < max_steps:
                yield from self._one_step(loader, start)
            if self._finish():
                break
        self._looping = False

    def _one_step(self, loader: Loader, start: Position) -> Iterator[Any]:
        stepper, team = self._parts()
        world = self._worlds
        self._meter.enter(Activity.DATA, self.committed_step)
        stepper.begin()
        position = self._lineage.position or start
        self._lineage.position = position
        parts = loader.parts(position, rank=team.group.rank, world_size=team.group.size, alike=self._alike)
        for part in parts:
            micro = loader.fetch(part, position)
            self._micro, self._last_micro, self._stale, self._late = micro, part is parts[-1], False, False
            self._meter.enter(Activity.COMPUTE)
            yield micro.data
            if self._worlds != world:
                return  # the rest of this step was planned for a world that is gone
            if self._micro is not None:
                raise UsageError("the loop took a batch and did not call job.step(loss) for it")
            self._meter.enter(Activity.DATA)
        if not parts:  # more ranks than samples: this one only adds zeros
            self._end_step(loader.batch_at(team.group.size))

    def _end_step(self, samples: int | None) -> StepResult:
        stepper, team = self._parts()
        with team.calls.during(Call.STEP):
            try:
                made = stepper.finish(samples)
            except PeerLostError as error:
                return self._retry(error)
            if not made.result.committed:
                self._ledger.step(step=self.committed_step, committed=False)
            try:
                self._prepare()
                self._commit_if_due(made.agreed)
            except PeerLostError as error:
                self._retry(error)
        if self._loader is None:  # nobody says what follows a step, nor that there was one
            self._meter.enter(Activity.APPLY, self.committed_step)
        return made.result

    # Committing

    def _commit_if_due(self, agreed: Agreed) -> None:
        """A commit that failed is tried again after the next step: the request stays. Without a folder there is
        nothing to wait for."""
        if agreed.urgent:
            self._committer.hurry()
        asked = agreed.quiesce and agreed.near
        if self._committer.memory_due_at(self.committed_step, asked=asked):
            self._commit_in_memory(asked=asked)
        needed = agreed.quiesce or (agreed.pause and agreed.bound)
        ends = agreed.pause and not needed
        on_disk = self._committer.local_due_at(self.committed_step, busy=agreed.busy)
        if self._committer.due_at(self.committed_step) or agreed.checkpoint or needed:
            if needed:
                self._committer.await_retry(_PAUSE_SECONDS)
            self._commit(onward=not needed)
            ends = ends or (needed and (self._durable() or not self._committer.has_folder))
        elif on_disk and not ends:
            self._commit_locally()
        if ends:
            self._part()

    def _part(self) -> None:
        """The last step of this attempt is made. Nobody leaves before all have told their launchers of the commit:
        the first launcher to hear of the end ends the attempt for everyone."""
        _, team = self._parts()
        with suppress(PeerLostError):
            self._durable()
            team.group.barrier()
        self._agent.send("quiesced", step=self.committed_step)
        self._leave("the last step of this attempt is made")

    def _commit_as(self, call: Call) -> bool:
        """A commit that belongs to no step; whether it is durable."""
        stepper, team = self._parts()
        if stepper.weights.changed():
            if self._meter.activity is Activity.EVALUATION:
                raise UsageError(_CHANGED_IN_EVALUATION.format(step=self.committed_step))
            _log.warning(_CHANGED, self.committed_step)
        with team.calls.during(call):
            self._commit(onward=call is Call.SAVE)
            return self._durable()

    def _commit(self, *, spare: bool = False, onward: bool = False) -> None:
        self._parts()[0].check()
        with self._meter.during(Activity.CHECKPOINT):
            self._committer.commit(self.committed_step, self._snapshot, spare=spare, onward=onward)

    def _durable(self) -> bool:
        """Wait for the save that is on its way; whether the last step is durable after it."""
        with self._meter.during(Activity.CHECKPOINT) if self._committer.busy else nullcontext():
            self._committer.settle()
        return self._committer.has_folder and not self._committer.behind(self.committed_step)

    def _prepare(self) -> None:
        """Once in each world, when all that will be saved is there: an optimizer has its state after a step."""
        if self._engine is not None and self._prepared != self._worlds:
            self._prepared = self._worlds
            flat = self._lineage.flat()
            self._engine.prepare(flat.specs, self._parts()[1].holding(flat.sharded))

    def _commit_in_memory(self, *, asked: bool) -> None:
        self._parts()[0].check()
        with self._meter.during(Activity.CHECKPOINT):
            self._committer.commit_in_memory(self.committed_step, self._snapshot, asked=asked)

    def _commit_locally(self) -> None:
        self._parts()[0].check()
        with self._meter.during(Activity.CHECKPOINT):
            self._committer.commit_locally(self.committed_step, self._snapshot)

    def _snapshot(self) -> Snapshot:
        stepper, team = self._parts()
        lineage, flat = self._lineage, self._lineage.flat()
        return Snapshot(
            name=CheckpointName(step=lineage.step, pair=team.pair),
            specs=flat.specs,
            holding=team.holding(flat.sharded),
            read=flat.read,
            fill=flat.fill,
            weights=stepper.weights.among(flat.tensors),
            inexact=trained(lineage.objects, flat) if self._config.delta_threshold else frozenset(),
            state={
                "objects": flat.tree,
                "counters": {"skipped": lineage.skipped},
                "ramp": lineage.rates.to_json(),
                "metrics": told(lineage.metrics),
                "failures": self._committer.failures.to_json(),
            },
            data=None if lineage.position is None else lineage.position.to_json(),
            alone={"rank": team.group.rank, "worldSize": team.group.size, "rng": rng.capture()},
            numerics=numerics(),
            samples=sampled(lineage.objects, flat) if team.group.size > 1 else {},
        )

    def _finish(self) -> bool:
        """The loop is over: its last step must be durable before anyone calls the job complete. False: look again."""
        try:
            self._durable()
            while self._committer.behind(self.committed_step):
                with self._meter.during(Activity.CHECKPOINT):
                    while not self._committer.await_retry(_PAUSE_SECONDS):
                        self._meter.enter(Activity.CHECKPOINT)  # anew: a pause is no hang
                self._commit_as(Call.END)
        except PeerLostError as error:
            self._retry(error)
            return False
        self._late = False
        self._committer.answer_rest(self.committed_step)
        self._say_done()
        return True

    def _fail(self, stepper: Stepper, team: Team, trace: TracebackType | None) -> None:
        """The launcher knows that this rank has failed, and waits for as long as there is something to save."""
        over = Timer(_LAST_COMMIT_SECONDS, team.cancel.set, ["the last step could not be committed in time"])
        over.daemon = True
        try:
            self._agent.stay()
            team.cancel.check()  # it may have failed on its way into the next one
            over.start()
            whole = self._whole(stepper, trace)
            saves = 0 if self._engine is None else self._engine.saves
            left = self._together(team, final_checkpoint.Left(step=self.committed_step, whole=whole, saves=saves))
            if final_checkpoint.alike(left) and (self._committer.busy or self._committer.behind(self.committed_step)):
                self._agent.send("lastCommit", step=self.committed_step)
                self._commit_last(left)
        except HoldfastError as error:
            _log.warning("step %d may not be durable: %s", self.committed_step, error)
        finally:
            over.cancel()
            self._agent.go()

    def _whole(self, stepper: Stepper, trace: TracebackType | None) -> bool:
        """Whether the state is that of the last step."""
        try:
            whole = stepper.rewind() and not final_checkpoint.broken_off(self._lineage.objects, trace)
            changed = whole and stepper.weights.changed()
        except RuntimeError as error:  # a device that has failed is the usual reason for an exception
            _log.warning("step %d is not committed: the state cannot be read: %s", self.committed_step, error)
            return False
        if changed:
            _log.warning(_CHANGED_AT_FAILURE, self.committed_step)
        return whole and not changed

    def _together(self, team: Team, own: final_checkpoint.Left) -> tuple[final_checkpoint.Left, ...]:
        place, size = team.place, team.group.size
        if size == 1:
            return (own,)

        def look() -> tuple[final_checkpoint.Left, ...]:
            store = store_client(place.host, place.port or 0, f"{place.name}/failing", _LAST_COMMIT_SECONDS)
            return final_checkpoint.together(store, own, rank=place.rank, size=size, hurried=self._agent.hurried)

        found: tuple[final_checkpoint.Left, ...] = unless_cancelled(look, team.cancel)
        return found

    def _commit_last(self, left: Sequence[final_checkpoint.Left]) -> None:
        """The one before stays: it may be this state that the script cannot go on from."""
        self._durable()
        if not final_checkpoint.can_be_saved(left):
            _log.warning("the state after step %d is not whole on every rank: it is not committed", left[0].step)
        elif self._committer.behind(self.committed_step):
            _log.info("every rank failed: step %d is committed before they leave", self.committed_step)
            self._commit(spare=True)
            self._durable()

    # Inside

    def _say_done(self) -> None:
        if not self._done:
            self._done = True
            self._meter.enter(Activity.DONE, self.committed_step)
            self._agent.send("done", step=self.committed_step)

    def _parts(self) -> tuple[Stepper, Team]:
        if self._stepper is None or self._team is None:
            raise UsageError("call job.manage(model=…, optimizer=…) first: it restores the state and saves it")
        return self._stepper, self._team


def _checked(name: str, thing: Any) -> Stateful:
    if not isinstance(thing, Stateful):
        raise StateError(
            f"{name!r} is of type {type(thing).__name__}, which has no state_dict() and load_state_dict(): "
            "give it both, or leave it out of manage()"
        )
    return thing


def _parameters(*things: Any) -> Iterator[torch.nn.Parameter]:
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            yield from thing.parameters()


def _activity(name: str) -> Activity:
    try:
        return Activity(name)
    except ValueError:
        known = ", ".join(repr(str(activity)) for activity in Activity)
        raise UsageError(f"phase {name!r} is none that the launcher knows: give one of {known}") from None
