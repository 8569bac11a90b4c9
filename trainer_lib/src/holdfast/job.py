"""The surface that a training script sees: `job = holdfast.init()`, and the loop over `job.batches` with `job.step`.

A step is applied on all ranks or the attempt ends: gradients are averaged by sample weight over the global batch,
the ranks agree on what comes with the step (a commit that somebody asked for, the last step of the attempt, numbers
that are not finite), and only then the optimizer runs. An attempt that ends goes on from the newest commit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast import agreement, faults
from holdfast.agreement import Agreed, Ballot
from holdfast.checkpoint import rng
from holdfast.checkpoint.engine import Attempt, Engine
from holdfast.checkpoint.names import CommitName
from holdfast.checkpoint.numerics import fingerprint as numerics
from holdfast.checkpoint.reader import Loaded, Restored
from holdfast.checkpoint.state import Stateful, assemble, flatten, load_into
from holdfast.checkpoint.writer import SaveResult, Snapshot
from holdfast.committer import Committer
from holdfast.config import JobConfig
from holdfast.constants import RankPhase
from holdfast.data import Audit, Position, expected_audit
from holdfast.data.loader import Loader, MapDataset, MicroBatch, fingerprint, make_loader
from holdfast.data.mix import mix_all
from holdfast.errors import ForeignClaimError, NonFiniteError, StateError, UsageError
from holdfast.group import Group
from holdfast.rank_agent import Agent
from holdfast.reducer import Reducer

_log = logging.getLogger("holdfast.job")

NON_FINITE_STEPS: Final = 10


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
        self._engine = engine
        self._committer = Committer(engine, agent, config.interval, coordinator=group.rank == 0)
        self._objects: dict[str, Stateful] = {}
        self._reducer = Reducer((), group.sum_)
        self._max_grad_norm: float | None = None
        self._managed = False
        self._step = 0
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
        says by `samples` how many its rank had, if they differ between ranks; 0 if it had none in this step.
        """
        self._need_manage()
        micro, self._micro = self._micro, None
        if self._loader is not None and micro is None:
            raise UsageError("job.step(loss) was called without a batch of job.batches: call it once for each batch")
        own = 1.0 if samples is None else float(samples)
        weight = micro.samples / self._loader.global_batch if micro and self._loader else own
        if weight:  # the mean over no samples is not a number, and would spoil everyone's step
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
            return self._commit().committed

    def close(self, *, failed: Callable[[], bool] = lambda: False) -> None:
        """Leave the world; done by itself when the script ends.

        A script without `job.batches` is done when it returns; leaving the loop half way is not being done.
        """
        if not failed() and not self._looping:
            self._say_done()
        self._agent.close()
        self._group.close()

    # Restoring

    def _begin(self) -> None:
        try:
            self._restore_and_claim()
        except ForeignClaimError:
            if not self._agent.connected:
                raise
            self._agent.wait_for_the_end()  # the launcher was told, and ends this attempt

    def _restore_and_claim(self) -> None:
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
        self._committer.begin(self._step)
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
        if agreed.weight == 0:
            raise UsageError("no rank had a sample in this step: call job.step(loss, samples=…) only while one has")
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
            checkpoint=bool(wanted.checkpoint) or self._committer.interval_over(),
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

    def _commit_if_due(self, agreed: Agreed) -> None:
        if not (self._committer.due_at(self._step) or agreed.checkpoint or agreed.quiesce):
            return
        result = self._commit()
        # A commit that failed is tried again after the next step: the request stays. Without a folder there is
        # nothing to wait for.
        if agreed.quiesce and (result.committed or not self._committer.has_folder):
            self._agent.send("quiesced", step=self._step)
            self._agent.wait_for_the_end()

    def _commit(self) -> SaveResult:
        before = self._phase
        self._enter(RankPhase.CHECKPOINT)
        result = self._committer.commit(self._step, self._snapshot)
        self._enter(before)
        return result

    def _snapshot(self) -> Snapshot:
        flat = flatten(self._objects)
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

    def _finish(self) -> None:
        """The loop is over: its last step must be durable before anyone calls the job complete."""
        while self._committer.behind(self._step):
            self._commit()
        self._committer.answer_rest(self._step)
        self._say_done()

    # Inside

    def _say_done(self) -> None:
        if not self._done:
            self._done = True
            self._agent.send("done", step=self._step)

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
