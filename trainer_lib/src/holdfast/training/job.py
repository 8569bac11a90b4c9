"""The interface for training scripts: `job = holdfast.init()`, and the loop over `job.batches` with `job.step`.

A step is applied by all ranks or by none. When a peer is lost, the current call of the script enters the next world
and returns a `StepResult` with reason `Retried`. The remaining ranks then repeat the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed

from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.state.flatten import Stateful, check_savable, flatten
from holdfast.core.errors import CheckpointError, PeerLostError, StateError, UsageError
from holdfast.fault_injection.injector import before_read
from holdfast.telemetry.activity import Meter
from holdfast.telemetry.rank_time import Ledger
from holdfast.training import torch_version
from holdfast.training.checkpointing.hooks import CheckpointHooks
from holdfast.training.checkpointing.scheduler import CheckpointScheduler
from holdfast.training.data import AuditResult, Position, expected_audit
from holdfast.training.data.loader import MapDataset, fingerprint, make_loader
from holdfast.training.data.readable_dataset import ReadableDataset, Reports, readable
from holdfast.training.distributed.fsdp import Sharding, check_sharded
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.guards.responses import Responses
from holdfast.training.guards.settings import Guards, checked_guards
from holdfast.training.launcher_client.connection import LauncherConnection, Parting
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.loop import Batches, Progress, TrainingLoop, report_done
from holdfast.training.options.config import JobConfig
from holdfast.training.options.elasticity import Elasticity, Scaler
from holdfast.training.options.validation import activity_of, check_managed, check_run, check_whole
from holdfast.training.recovery.replica_digest import ReplicaReport
from holdfast.training.recovery.replica_sync import ReplicaSync
from holdfast.training.recovery.world_entry import WorldEntry
from holdfast.training.step.step_result import StepResult
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")
Module = TypeVar("Module", bound=torch.nn.Module)
_TORCHS = (torch.nn.Module, torch.optim.Optimizer)


class Job:
    """One rank of a training job. Created by `holdfast.init`."""

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
        guards: Guards | None = None,
    ) -> None:
        self._agent = agent
        self._guards = checked_guards(guards)
        self._reports = Reports()
        self._config = config
        self._engine = engine
        self._meter = meter
        self._ledger = ledger
        self._device_of = device
        self._interface = interface
        self._first: RankPlacement | None = None
        self._sharding: Sharding | None = None
        self._state = TrainState({})
        self._scheduler = CheckpointScheduler(engine, agent, config.interval, self._state)
        self._elasticity = Elasticity()
        self._entry: WorldEntry | None = None
        self._loop: TrainingLoop | None = None
        self._callbacks: list[Callable[[Job], None]] = []
        agent.parting = self._parting

    # Properties for scripts

    @property
    def rank(self) -> int:
        """This process's rank in the world. Before `manage`, this waits until the world is formed."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the current world. Before `manage`, this waits until the world is formed."""
        return self._place.world_size

    @property
    def device(self) -> torch.device:
        """The device for this rank's model."""
        return torch.device("cpu") if not torch.cuda.is_available() else self._device_of(self._place)

    @property
    def generation(self) -> int:
        """The generation of this attempt; 0 before `manage` in a script without a launcher."""
        return self._attempt_id[0]

    @property
    def attempt(self) -> int:
        """The attempt within its generation."""
        return self._attempt_id[1]

    @property
    def run_id(self) -> str:
        """An ID for experiment trackers, stable over restarts."""
        return self._place.run_id if self._loop is None else self._loop.team.attempt.run_id

    @property
    def shard(self) -> int:
        """The shard of the model on this rank; 0 if the model is not sharded. It may change with the world."""
        return 0 if self._sharding is None else self._sharding.shard

    @property
    def committed_step(self) -> int:
        """The last global step that was applied."""
        return self._state.step

    @property
    def durable_step(self) -> int:
        """The last step that this rank knows to be in a durable checkpoint; 0 without one."""
        return self._state.saved_step

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank should print and write for all ranks. It may change with the world."""
        return self.rank == 0

    def log(self, **values: Any) -> None:
        """Log one line, on the coordinator only."""
        if self.is_coordinator:
            _log.info("progress", extra={"fields": {"step": self.committed_step, **values}})

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Report the script's activity while it makes no steps: `with job.phase("evaluation"):`."""
        return self._meter.during(activity_of(name))

    def on_membership(self, callback: Callable[[Job], None]) -> None:
        """Register a callback.

        It is called with the job after each new world is ready, with the new rank and size.
        """
        self._callbacks.append(callback)

    def audit(self) -> AuditResult:
        """Check the samples of all completed steps that led to this state."""
        position = self._state.position
        loader = None if self._loop is None else self._loop.loader
        if loader is None or position is None:
            raise UsageError("job.audit() needs job.batches(): only the job's own cursor can be audited")
        cursor, skipped = position.cursor, position.skipped
        expected = expected_audit(size=loader.size, seed=position.seed, cursor=cursor, skipped=skipped)
        passed = position.place(cursor) - cursor
        seen, unread = position.audit, self._state.bad_samples.skipped
        return AuditResult(ok=expected == seen, seen=seen, expected=expected, skipped=passed, unreadable=unread)

    # Methods for scripts

    def manage(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        group_norms: bool = False,
        elasticity: Elasticity | None = None,
        **stateful: Stateful,
    ) -> None:
        """Restore the newest valid state, if there is one, and save these objects from now on.

        `elasticity` sets how batch and learning rate follow the world size; by default they do not. `job.step` scales
        the loss and steps the optimizer with `scaler`, a `torch.amp.GradScaler`. `group_norms` requests the norm of
        each parameter group. Other objects with `state_dict` and `load_state_dict` may have any names.
        """
        if self._entry is not None:
            raise UsageError("job.manage() was called twice: pass all objects in one call")
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **stateful}
        objects = _objects(self._sharding, named)
        self._elasticity = elasticity or self._elasticity
        self._state.rates = Scaler(optimizer, self._elasticity)
        self._state.objects.update(objects)
        self._state.sharding = self._sharding
        stepper = Stepper(
            self._state,
            self._agent,
            self._meter,
            self._ledger,
            checkpoint_requested=self._scheduler.overdue,
            busy=self._scheduler.writes,
            max_grad_norm=max_grad_norm,
            group_norms=group_norms,
            guards=self._guards,
            scaler=scaler,
        )
        self._entry = WorldEntry(
            agent=self._agent,
            engine=self._engine,
            state=self._state,
            stepper=stepper,
            meter=self._meter,
            device=self._device_of,
            interface=self._interface,
        )
        self._loop = self._enter(self._entry, stepper)
        self._loop.begin()

    def fully_shard(
        self, module: Module, *, size: int, reshard_after_forward: bool | None = None, mp_policy: Any = None
    ) -> Module:
        """Shard a module's parameters over replicas of `size` ranks, as torch's `fully_shard` (FSDP2) does.

        Call it bottom-up: first on the layers, then on the complete model. Call it before the optimizer is created,
        with the same size each time. The world must consist of complete replicas.
        """
        check_whole("size", size, least=2)
        if self._sharding is None:
            torch_version.require(torch_version.SHARDING, "job.fully_shard")
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
        """Yield this rank's micro-batches, step by step, until `max_steps` steps are completed.

        The samples of a step depend only on the seed and the position, and not on the number of ranks. Do not leave
        the loop early: its end saves the last step and reports to the launcher that the work is done. With `alike`,
        each rank gets the same number of micro-batches, for a model that communicates in forward. An additional one
        has a sample that does not count. Sharded models have this by default.
        """
        loop = self._managed
        if loop.progress is Progress.DONE and max_steps > self.committed_step:
            raise UsageError(
                "job.batches() was called again after its loop had ended, which reported this rank as finished: "
                "train all steps in one loop, and set its end with max_steps"
            )
        check_run(max_steps=max_steps, seed=seed)
        loop.loader = make_loader(
            dataset,
            global_batch=global_batch_size,
            micro_batch=micro_batch_size,
            device=self.device,
            collate=collate,
            elasticity=self._elasticity,
            retries=self._guards.sample_retries,
            tolerant=self._guards.max_bad_samples > 0,
            before=before_read(self._meter.listeners),
        )
        start, saved = Position(fingerprint=fingerprint(dataset), seed=seed), self._state.position
        self._state.position = start if saved is None else start.resumed(saved)
        alike = alike or self._sharding is not None
        return loop.batches(Batches(loader=loop.loader, start=start, max_steps=max_steps, alike=alike))

    def readable(self, dataset: MapDataset) -> ReadableDataset:
        """Return the dataset for a loader of the script, with or without worker processes.

        The next sample that can be read takes the place of one that cannot. The guards count such samples.
        """
        return readable(dataset, self._guards.sample_retries, self._guards.max_bad_samples > 0, self._reports.path())

    def step(self, loss: torch.Tensor, *, samples: float | None = None) -> StepResult:
        """Run backward. At the end of the global batch, average the gradients, apply the step, and save if it is due.

        `loss` is the mean over the micro-batch. With its own loader, a script executes one global step per call. In
        this case, `samples` is the number of this rank's samples, if it differs between ranks; 0 if it has none in
        this step.
        """
        return self._managed.step(loss, samples)

    def run_step(self, fn: Callable[[], torch.Tensor], *, samples: float | None = None) -> StepResult:
        """Run `job.step(fn())` for a model that communicates. `fn` computes the loss, and is repeated if a peer is
        lost.

        If a lost peer breaks a collective of the script, in `fn` or in backward, the result is `Retried` and the same
        samples are repeated. So they are if the GPU is out of memory, until no smaller micro-batch is possible. Any
        other error of `fn` is raised unchanged, and the batch is not consumed.
        """
        return self._managed.run_step(fn, samples)

    def save(self, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save a checkpoint now. Every rank must call this at the same step. Return False if it failed, and log the
        reason.

        A checkpoint that failed, or that a lost peer interrupted, is repeated after the next step. `metrics` are
        measurements of this state, for example `{"val_loss": 2.1}`, by which `retention="best=val_loss:min"` keeps
        the best checkpoints.
        """
        self._state.measured(metrics or {})
        return self._managed.save()

    def verify_replicas(self) -> ReplicaReport | None:
        """Compare the weights and the optimizer state of all replicas bitwise. Every rank calls it at the same step.

        Ranks that differ receive the state of the majority. Raise `ReplicaError` if no state has a majority. Return
        None if a lost peer interrupted the comparison.
        """
        return self._managed.verify_replicas()

    def synchronize(self, *, source: int = 0) -> None:
        """Copy the complete train state of rank `source` to all other ranks. Every rank calls it at the same step.

        With a sharded model, the ranks of other shards are unchanged. If a lost peer interrupts the copy, no rank
        keeps a part of it.
        """
        check_whole("source", source, least=0)
        if source >= self.world_size:
            raise UsageError(f"invalid source {source}: expected a rank from 0 to {self.world_size - 1}")
        self._managed.synchronize(source)

    def close(
        self, *, failed: Callable[[], bool] = lambda: False, trace: Callable[[], TracebackType | None] = lambda: None
    ) -> None:
        """Leave the world. This happens automatically when the script ends.

        A script without `job.batches` is done when it returns; one that leaves the loop early is not. A script that
        failed on every rank leaves its last step saved.
        """
        loop = self._loop
        if failed():
            if loop is not None and self._engine is not None:
                loop.fail(trace())
        elif loop is not None:
            loop.close()
        else:
            report_done(self._agent, self._meter, self.committed_step)
        with suppress(PeerLostError, CheckpointError):
            self._scheduler.settle()  # an exception after the copy of a save must not lose the save
        self._agent.close()
        if loop is not None:
            loop.leave_groups(failed=failed())

    # Internal

    def with_less_memory(self) -> OutOfMemory | None:
        """Return the record of GPU memory for the process that follows an error of a full memory, if it changes."""
        return None if self._loop is None else self._loop.with_less_memory()

    def _enter(self, entry: WorldEntry, stepper: Stepper) -> TrainingLoop:
        first, self._first = self._first, None
        team = entry.enter(first)
        hooks = CheckpointHooks(
            scheduler=self._scheduler,
            engine=self._engine,
            agent=self._agent,
            config=self._config,
            state=self._state,
            stepper=stepper,
            meter=self._meter,
            team=team,
        )
        return TrainingLoop(
            agent=self._agent,
            meter=self._meter,
            ledger=self._ledger,
            state=self._state,
            stepper=stepper,
            entry=entry,
            hooks=hooks,
            team=team,
            responses=Responses(
                state=self._state, agent=self._agent, guards=self._guards, has_folder=self._engine is not None
            ),
            reports=self._reports,
            announce=self._announce,
            replicas=ReplicaSync(self._agent, self._state, stepper, steps=self._guards.replica_check_steps),
        )

    @property
    def _place(self) -> RankPlacement:
        if self._loop is not None:
            return self._loop.team.place
        if self._entry is not None and self._entry.place is not None:
            return self._entry.place  # a managed object may call this while its state is restored
        if self._first is None:
            self._first = self._agent.next_place()
            self._agent.enter(self._first)
        return self._first

    @property
    def _attempt_id(self) -> tuple[int, int]:
        attempt_id = self._place.attempt_id if self._loop is None else self._loop.team.attempt_id
        return (0, 0) if attempt_id is None else (attempt_id.generation, attempt_id.attempt)

    @property
    def _managed(self) -> TrainingLoop:
        if self._loop is None:
            raise UsageError("call job.manage(model=…, optimizer=…) first: it restores the state and saves it")
        return self._loop

    def _parting(self) -> Parting:
        """Return what this rank reports when it leaves an attempt.

        Also called from the thread of the launcher's connection.
        """
        optimizer_failed = self._loop is not None and self._loop.optimizer_failed
        own_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank_state = self._state.rank_state
        return Parting(
            step=rank_state.step,
            in_doubt=rank_state.prepared_step is not None,
            keep=not optimizer_failed and not own_group,
        )

    def _announce(self) -> None:
        for callback in self._callbacks:
            callback(self)


def _objects(sharding: Sharding | None, named: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return the objects of `manage`. Raise `UsageError` or `StateError` if the job cannot train or save them."""
    modules = [thing for thing in named.values() if isinstance(thing, torch.nn.Module)]
    check_sharded(sharding, (one for module in modules for one in module.parameters()), named["scaler"])
    objects = {name: _checked(name, thing) for name, thing in named.items() if thing is not None}
    others = {name: thing for name, thing in objects.items() if not isinstance(thing, _TORCHS)}
    check_managed(objects, list(flatten(others).tensors.values()))
    check_savable(objects)
    return objects


def _checked(name: str, thing: Any) -> Stateful:
    if not isinstance(thing, Stateful):
        raise StateError(
            f"{name!r} is of type {type(thing).__name__}, which has no state_dict() and load_state_dict(): "
            "add both, or leave the object out of manage()"
        )
    return thing
