"""The surface that a training script sees: `job = holdfast.init()`, and the loop over `job.batches` with `job.step`.

A step is applied on all ranks or the attempt ends: gradients are averaged by sample weight over the global batch,
the ranks agree on what comes with the step (a commit that somebody asked for, the last step of the attempt, numbers
that are not finite), and only then the optimizer runs. An attempt that ends goes on from the newest commit.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from holdfast import agreement, faults
from holdfast.agreement import Agreed, Ballot
from holdfast.checkpoint import rng
from holdfast.checkpoint.engine import Attempt, Engine, attempt_by_hand
from holdfast.checkpoint.names import CommitName
from holdfast.checkpoint.numerics import fingerprint as numerics
from holdfast.checkpoint.reader import Loaded, Restored
from holdfast.checkpoint.state import Flat, Stateful, assemble, flatten, load_into
from holdfast.checkpoint.writer import SaveResult, Snapshot
from holdfast.config import JobConfig, effective
from holdfast.constants import SHARED_TIER, RankPhase
from holdfast.data import Audit, Position, expected_audit
from holdfast.data.loader import Loader, MapDataset, MicroBatch, fingerprint, make_loader
from holdfast.data.mix import mix_all
from holdfast.environment import Environment, read_environment
from holdfast.errors import CheckpointError, NonFiniteError, StateError, UsageError
from holdfast.group import Group, join
from holdfast.logs import LogContext, configure
from holdfast.rank_agent import Agent, NoAgent, RankAgent, Requests
from holdfast.reducer import Reducer
from holdfast.worlds import Claim, Pair

_log = logging.getLogger("holdfast.job")

FAILED_SAVES: Final = 3
NON_FINITE_STEPS: Final = 10
_INTERVAL_ID: Final = "interval"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What `job.step` did. `committed` is true when it ended a global batch and the optimizer applied it."""

    committed: bool
    step: int
    loss: float | None = None
    grad_norm: float | None = None
    reason: str = ""


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


@dataclass
class _Batch:
    """The global batch in the making."""

    loss: float = 0.0
    weight: float = 0.0
    seen: Audit = Audit()  # noqa: RUF009  (frozen)
    started: float = 0.0


class Job:
    """One rank of a training job. Made by `holdfast.init`."""

    def __init__(
        self, *, group: Group, agent: Agent, attempt: Attempt, config: JobConfig, engine: Engine | None
    ) -> None:
        self._group = group
        self._agent = agent
        self._attempt = attempt
        self._config = config
        self._engine = engine
        self._objects: dict[str, Stateful] = {}
        self._reducer = Reducer((), group.sum_)
        self._max_grad_norm: float | None = None
        self._managed = False
        self._step = 0
        self._saved_step = 0
        self._saved_at = time.monotonic()
        self._failed_saves = 0
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._loader: Loader | None = None
        self._position: Position | None = None
        self._saved_position: Position | None = None
        self._micro: MicroBatch | None = None
        self._last_micro = True
        self._batch = _Batch()
        self._phase = RankPhase.STARTUP
        self._looping = False
        self._done = False

    # What a script may ask

    @property
    def rank(self) -> int:
        """This process's number in the world."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many ranks train together now."""
        return self._group.size

    @property
    def device(self) -> torch.device:
        """Where this rank's model belongs."""
        return self._group.device

    @property
    def generation(self) -> int:
        """The membership under which this attempt runs."""
        return self._attempt.pair.generation

    @property
    def attempt(self) -> int:
        """The attempt within its generation."""
        return self._attempt.pair.attempt

    @property
    def run_id(self) -> str:
        """Stable over restarts: for experiment trackers."""
        return self._attempt.run_id

    @property
    def committed_step(self) -> int:
        """The last global step that was applied."""
        return self._step

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that should print and write for all."""
        return self._group.rank == 0

    def log(self, **values: Any) -> None:
        """One line of the log, on the coordinator only."""
        if self.is_coordinator:
            _log.info("progress", extra={"fields": {"step": self._step, **values}})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what the script is doing while it makes no steps: `with job.phase("evaluation"):`."""
        before = self._phase
        self._enter(_phase(name))
        try:
            yield
        finally:
            self._enter(before)

    def audit(self) -> AuditResult:
        """Check the samples of all committed steps of this lineage against what they must be."""
        if self._loader is None or self._position is None:
            raise UsageError("job.audit() needs job.batches(): only the job's own cursor can be audited")
        position = self._position
        expected = expected_audit(size=self._loader.size, seed=position.seed, cursor=position.cursor)
        return AuditResult(ok=expected == position.audit, seen=position.audit, expected=expected)

    # What a script does

    def manage(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        **stateful: Stateful,
    ) -> None:
        """Take charge of the state: restore the newest good one if there is one, and save it from now on.

        Anything else with `state_dict` and `load_state_dict` may be given by a name of its own.
        """
        if self._managed:
            raise UsageError("job.manage() was called twice: give it everything at once")
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **stateful}
        self._objects = {name: _checked(name, thing) for name, thing in named.items() if thing is not None}
        flatten(self._objects)
        self._reducer = Reducer(self._trained(), self._group.sum_)
        self._max_grad_norm = max_grad_norm
        with self._no_blame():
            self._enter(RankPhase.RESTORE)
            self._begin()
        self._managed = True
        self._enter(RankPhase.STEP)

    def batches(
        self,
        dataset: MapDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        max_steps: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """This rank's micro-batches, step after step, until `max_steps` are committed.

        The samples of a step depend on the seed and the position only, not on how many ranks there are. Leave the
        loop by its end: that commits the last step and tells the launcher that the work is done.
        """
        self._need_manage()
        self._loader = make_loader(
            dataset, global_batch=global_batch_size, micro_batch=micro_batch_size, device=self.device, collate=collate
        )
        start = Position(fingerprint=fingerprint(dataset), seed=seed)
        self._position = start if self._saved_position is None else start.resumed(self._saved_position)
        return self._loop(self._loader, max_steps)

    def step(self, loss: torch.Tensor, *, samples: float | None = None) -> StepResult:
        """Backward; at the end of the global batch average, apply and, when one is due, commit a checkpoint.

        `loss` is the mean over the micro-batch. A script with a loader of its own makes one global step a call, and
        says by `samples` how many its rank had, if they differ between ranks.
        """
        self._need_manage()
        micro, self._micro = self._micro, None
        if self._loader is not None and micro is None:
            raise UsageError("job.step(loss) was called without a batch of job.batches: call it once for each batch")
        weight = micro.samples / self._loader.global_batch if micro and self._loader else float(samples or 1.0)
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        self._batch.loss += float(loss.detach()) * weight
        self._batch.weight += weight
        if micro is not None:
            self._batch.seen += micro.seen
            if not self._last_micro:
                return StepResult(committed=False, step=self._step, reason="Accumulating")
        return self._end_step(self._loader.global_batch if self._loader else None)

    def save(self) -> bool:
        """Commit a checkpoint now; every rank must call it at the same step. False if it failed (it was said why)."""
        self._need_manage()
        with self._no_blame():
            return self._commit(by_interval=False).committed

    # Restoring

    def _begin(self) -> None:
        found = Restored(loaded=None) if self._engine is None else self._engine.restore()
        if found.loaded is None:
            self._equalise()
        else:
            self._take(found.loaded)
        self._agent.send(
            "restored",
            step=found.step,
            fromPair=found.pair.to_json() if found.pair else None,
            quarantined=[{"path": bad.path, "reason": bad.reason} for bad in found.quarantined],
        )
        if self._engine is not None:
            claim = self._engine.claim(found)
            if self.is_coordinator:
                self._agent.send("claim", claim=claim.to_json())
        self._saved_step, self._saved_at = self._step, time.monotonic()
        _log.info(
            "training goes on from step %d of %s" if found.loaded else "training starts at step %d",
            *((found.step, found.loaded.name) if found.loaded else (0,)),
        )

    def _take(self, loaded: Loaded) -> None:
        manifest = loaded.manifest
        load_into(
            self._objects,
            manifest.state["objects"],
            lambda name: assemble(manifest.tensors[name], loaded.chunk),
        )
        counters = manifest.state.get("counters", {})
        self._step = manifest.step
        self._skipped = int(counters.get("skipped", 0))
        self._saved_position = None if manifest.data is None else Position.from_json(manifest.data)
        if loaded.alone is None:
            rng.seed(mix_all(manifest.step, self.rank))  # this rank was not there when the commit was made
        else:
            rng.apply(loaded.alone["rng"])
        if manifest.numerics != numerics():
            _log.warning("the checkpoint was made under other numerics; results may differ in their last bits")

    def _equalise(self) -> None:
        """All ranks start from rank 0's weights."""
        for module in self._modules():
            for tensor in (*module.parameters(), *module.buffers()):
                self._group.broadcast_(tensor.data)

    # Stepping

    def _loop(self, loader: Loader, max_steps: int) -> Iterator[Any]:
        self._looping = True
        while self._step < max_steps:
            yield from self._one_step(loader)
        with self._no_blame():
            self._finish()
        self._looping = False

    def _one_step(self, loader: Loader) -> Iterator[Any]:
        position = self._position
        if position is None:
            raise UsageError("job.batches() has not begun")
        self._batch = _Batch(started=time.monotonic())
        parts = loader.parts(position, rank=self.rank, world_size=self.world_size)
        for part in parts:
            micro = loader.fetch(part, position)
            self._micro, self._last_micro = micro, part is parts[-1]
            yield micro.data
            if self._micro is not None:
                raise UsageError("the loop took a batch and did not call job.step(loss) for it")
        if not parts:  # more ranks than samples: this one only adds zeros
            self._end_step(loader.global_batch)

    def _end_step(self, samples: int | None) -> StepResult:
        with self._no_blame():
            result = self._apply(samples)
        self._batch = _Batch(started=time.monotonic())
        return result

    def _apply(self, samples: int | None) -> StepResult:
        """Average, agree, apply; then whatever was agreed on."""
        touched = self._reducer.touched()
        self._reducer.reduce()
        norm = float(self._reducer.norm())
        agreed = self._agree(touched, norm)
        if agreed.non_finite:
            result = StepResult(committed=False, step=self._step + 1, loss=agreed.loss, reason="NonFinite")
        else:
            result = self._optimize(agreed, norm)
        self._reducer.clear()
        self._advance(agreed, result, samples)
        self._commit_if_due(agreed)
        return result

    def _agree(self, touched: list[bool], norm: float) -> Agreed:
        wanted = self._agent.requests()
        ballot = Ballot(
            checkpoint=bool(wanted.checkpoint) or (self.is_coordinator and self._interval_over()),
            quiesce=bool(wanted.quiesce),
            non_finite=not (math.isfinite(norm) and math.isfinite(self._batch.loss)),
            touched=touched,
            loss=self._batch.loss,
            weight=self._batch.weight,
            seen=self._batch.seen,
        )
        numbers = torch.tensor(
            agreement.encode(ballot, rank=self.rank, world_size=self.world_size), dtype=torch.float64
        )
        self._group.agree_(numbers)
        return agreement.decode(numbers.tolist(), world_size=self.world_size)

    def _optimize(self, agreed: Agreed, norm: float) -> StepResult:
        """The gradients are sums weighted by samples; a batch of ours has weights that add up to one already."""
        self._reducer.drop(agreed.touched)
        if not math.isclose(agreed.weight, 1.0, rel_tol=1e-9):
            self._reducer.scale(1.0 / agreed.weight)
            norm /= agreed.weight
        if self._max_grad_norm is not None:
            self._reducer.clip(self._max_grad_norm, norm)
        optimizer, scheduler = self._objects.get("optimizer"), self._objects.get("scheduler")
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(agreed.loss)
        elif scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]
        self._share_statistics()
        return StepResult(committed=True, step=self._step + 1, loss=agreed.loss, grad_norm=norm, reason="Committed")

    def _share_statistics(self) -> None:
        """Running statistics are no gradients: rank 0's count, so that every rank's model stays the same."""
        if self.world_size == 1:
            return
        for module in self._modules():
            for part in module.modules():
                if isinstance(part, torch.nn.modules.batchnorm._NormBase):
                    for buffer in part.buffers(recurse=False):
                        self._group.broadcast_(buffer)

    def _advance(self, agreed: Agreed, result: StepResult, samples: int | None) -> None:
        """The step is made: counters, cursor, and word to the launcher."""
        self._step += 1
        if self._position is not None and samples is not None:
            self._position = self._position.advanced(samples, agreed.seen)
        if not result.committed:
            self._count_skipped()
            return
        self._skipped_in_a_row = 0
        self._agent.send(
            "step",
            step=self._step,
            loss=result.loss,
            samples=samples or agreed.weight,
            seconds=round(time.monotonic() - self._batch.started, 6) if self._batch.started else 0.0,
        )

    def _count_skipped(self) -> None:
        self._skipped += 1
        self._skipped_in_a_row += 1
        _log.warning("step %d was not applied: its loss or gradients are not finite", self._step)
        if self._skipped_in_a_row >= NON_FINITE_STEPS:
            raise NonFiniteError(
                f"{NON_FINITE_STEPS} steps in a row were not finite: lower the learning rate, give max_grad_norm, "
                "or look for the cause in the data from that step on"
            )

    # Committing

    def _interval_over(self) -> bool:
        return self._engine is not None and self._config.interval.due_after(time.monotonic() - self._saved_at)

    def _commit_if_due(self, agreed: Agreed) -> None:
        due = self._engine is not None and self._config.interval.due_at(self._step)
        if not (due or agreed.checkpoint or agreed.quiesce):
            return
        result = self._commit(by_interval=due or (self.is_coordinator and self._interval_over()))
        # A commit that failed is tried again after the next step: the request stays. Without a folder there is
        # nothing to wait for.
        if agreed.quiesce and (result.committed or self._engine is None):
            self._agent.send("quiesced", step=self._step)
            self._agent.wait_for_the_end()

    def _commit(self, *, by_interval: bool) -> SaveResult:
        wanted, started = self._agent.requests(), time.monotonic()
        before = self._phase
        self._enter(RankPhase.CHECKPOINT)
        result = self._save()
        self._enter(before)
        ids = [*([_INTERVAL_ID] if by_interval else []), *wanted.checkpoint, *wanted.quiesce]
        self._tell_commit(result, ids, time.monotonic() - started)
        self._saved_at = time.monotonic()
        if result.committed:
            self._saved_step, self._failed_saves = self._step, 0
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))
        elif self._engine is None:
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))
        else:
            self._count_failed_save(result.message)
        return result

    def _save(self) -> SaveResult:
        if self._engine is None:
            return SaveResult(committed=False, message="the job has no checkpoint folder")
        flat = flatten(self._objects)
        return self._engine.save(self._snapshot(flat))

    def _snapshot(self, flat: Flat) -> Snapshot:
        position = self._position or self._saved_position
        return Snapshot(
            name=CommitName(step=self._step, pair=self._attempt.pair),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree, "counters": {"skipped": self._skipped}},
            data=None if position is None else position.to_json(),
            alone={"rank": self.rank, "worldSize": self.world_size, "rng": rng.capture()},
            numerics=numerics(),
        )

    def _tell_commit(self, result: SaveResult, ids: list[str], seconds: float) -> None:
        self._agent.send(
            "checkpoint",
            step=self._step,
            tier=SHARED_TIER,
            result="Committed" if result.committed else "Failed",
            seconds=round(seconds, 3),
            ids=ids,
            message=result.message,
        )

    def _count_failed_save(self, message: str) -> None:
        self._failed_saves += 1
        _log.error(
            "step %d could not be committed (%d in a row): %s; training goes on from what was committed before",
            self._step,
            self._failed_saves,
            message,
        )
        if self._failed_saves >= FAILED_SAVES:
            raise CheckpointError(
                f"{FAILED_SAVES} checkpoints in a row could not be written ({message}): "
                "make room in the checkpoint folder or make it writable; training goes on from the last commit"
            )

    def _finish(self) -> None:
        """The loop is over: its last step must be durable before anyone calls the job complete."""
        while self._engine is not None and self._saved_step != self._step:
            self._commit(by_interval=False)
        wanted = self._agent.requests()
        if self._engine is not None and wanted.checkpoint:
            self._tell_commit(SaveResult(committed=True), [*wanted.checkpoint], 0.0)
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))
        self._say_done()

    # Inside

    def _say_done(self) -> None:
        if not self._done:
            self._done = True
            self._agent.send("done", step=self._step)

    def _at_exit(self, failed: Callable[[], bool]) -> None:
        """A script without `job.batches` is done when it returns; leaving the loop half way is not being done."""
        if not failed() and not self._looping:
            self._say_done()
        self._agent.close()
        self._group.close()

    def _no_blame(self) -> AbstractContextManager[None]:
        return faults.no_blame(self._agent, lambda: self._step)

    def _enter(self, phase: RankPhase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._agent.send("phase", phase=str(phase), step=self._step)

    def _need_manage(self) -> None:
        if not self._managed:
            raise UsageError("call job.manage(model=…, optimizer=…) first: it restores the state and saves it")

    def _modules(self) -> list[torch.nn.Module]:
        return [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        for module in self._modules():
            yield from module.parameters()
        optimizer = self._objects.get("optimizer")
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                yield from group["params"]


def _checked(name: str, thing: Any) -> Stateful:
    if not isinstance(thing, Stateful):
        raise StateError(
            f"{name!r} is of type {type(thing).__name__}, which has no state_dict() and load_state_dict(): "
            "give it both, or leave it out of manage()"
        )
    return thing


def _phase(name: str) -> RankPhase:
    try:
        return RankPhase(name)
    except ValueError:
        known = ", ".join(repr(str(phase)) for phase in RankPhase)
        raise UsageError(f"phase {name!r} is none that the launcher knows: give one of {known}") from None


def init(
    *,
    checkpoint_dir: str | Path | None = None,
    checkpoint_interval: str | int | None = None,
    keep_last: int | None = None,
    resume: str | None = None,
) -> Job:
    """Join the world that the launcher formed; a script started by hand is a world of one.

    Under the operator every setting arrives in the environment. What is given here wins, and the effective values
    are logged once with where each came from.
    """
    environment = read_environment()
    config = effective(
        environment,
        checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
        checkpoint_interval=checkpoint_interval,
        keep_last=keep_last,
        resume=resume,
    )
    _configure_log(environment)
    agent = _connect(environment)
    place: dict[str, int] = {"step": 0}
    with faults.no_blame(agent, lambda: place["step"]):
        group = join(environment)
        attempt = _attempt(environment, config, agent, group)
    job = Job(group=group, agent=agent, attempt=attempt, config=config, engine=_engine(config, attempt, agent, group))
    reporter = faults.Reporter(agent, lambda: job.committed_step)
    reporter.install()
    atexit.register(job._at_exit, lambda: reporter.failed)
    if group.rank == 0:
        _log.info("configuration", extra={"fields": {"world_size": group.size, **config.described()}})
    return job


def _configure_log(environment: Environment) -> None:
    fields = {"pod": environment.pod_name, "generation": environment.generation, "attempt": environment.attempt}
    context = LogContext(fields={name: value for name, value in fields.items() if value})
    context.update(rank=environment.rank)
    configure(context)


def _connect(environment: Environment) -> Agent:
    if environment.agent_socket is None:
        return NoAgent()
    if environment.generation is None or environment.attempt is None:
        raise UsageError("HOLDFAST_AGENT_SOCKET is set without HOLDFAST_GENERATION and HOLDFAST_ATTEMPT: unset it")
    return RankAgent(
        environment.agent_socket,
        rank=environment.rank,
        local_rank=environment.local_rank,
        pair=Pair(environment.generation, environment.attempt),
    )


def _attempt(environment: Environment, config: JobConfig, agent: Agent, group: Group) -> Attempt:
    if environment.generation is None or environment.attempt is None:
        return attempt_by_hand(config.checkpoint_dir, group, environment.run_id)
    return Attempt(
        pair=Pair(environment.generation, environment.attempt),
        job_uid=environment.job_uid,
        publication=environment.publication,
        run_id=environment.run_id,
        known=agent.known_claims(),
    )


def _engine(config: JobConfig, attempt: Attempt, agent: Agent, group: Group) -> Engine | None:
    if config.checkpoint_dir is None:
        if group.rank == 0:
            _log.warning("no checkpoint folder is given: nothing outlives this world (checkpoint_dir=…)")
        return None

    def report(claims: tuple[Claim, ...]) -> None:
        agent.send("foreignClaims", claims=[claim.to_json() for claim in claims])

    return Engine(
        config.checkpoint_dir,
        attempt,
        group,
        keep_last=config.keep_last,
        resume=config.resume,
        on_foreign=report,
    )
