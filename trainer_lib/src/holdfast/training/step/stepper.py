"""One global step of one rank: accumulate, average, vote and apply; or discard it without any effect.

No error of a lost peer reaches the script: these methods raise `PeerLostError` for the job, which enters the next
world. If the vote on a step does not return, this rank keeps everything that is needed to apply it without its peers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import NonFiniteError, UsageError
from holdfast.telemetry.activity import Activity, Meter
from holdfast.training.data import Audit
from holdfast.training.distributed.fsdp import whole_norm
from holdfast.training.distributed.process_group import Group
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.options.validation import Structure, check_loss
from holdfast.training.protocol import step_ballot, step_commit
from holdfast.training.protocol.step_ballot import Agreed, Ballot
from holdfast.training.protocol.step_commit import RankState
from holdfast.training.step.batchnorm_stats import Statistics
from holdfast.training.step.gradient_reducer import Reducer
from holdfast.training.step.rollback import Undo
from holdfast.training.step.train_state import TrainState, finite
from holdfast.training.step.weight_check import Weights

_log = logging.getLogger("holdfast.job")

NON_FINITE_STEPS: Final = 10

_GO_BACK: Final = (
    "If each restart ends like this, end the job and resume from an older checkpoint: holdfast checkpoints rewind "
    "FOLDER --step N"
)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of `job.step`. `committed` is True if the call ended a global batch and the optimizer applied it.

    A step that a lost peer undid has the reason `Retried`: the same samples are repeated. A rank that missed steps
    gets the newest `step` as committed, without a `loss`, because it did not take part.
    """

    committed: bool
    step: int
    loss: float | None = None
    grad_norm: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A step that was applied or skipped, and the values that the ranks agreed on."""

    result: StepResult
    agreed: Agreed


@dataclass
class _Batch:
    """The current global batch."""

    loss: float = 0.0
    weight: float = 0.0
    seen: Audit = Audit()  # noqa: RUF009  (frozen)
    started: float = 0.0


@dataclass(kw_only=True)
class _Kept:
    """The data for applying a prepared step, without the averages. `norm` is set once they became gradients."""

    agreed: Agreed
    samples: int | None
    world_size: int
    statistics: torch.Tensor | None
    spoiled: str = ""
    """For a loss that is not finite: the name of a weight that is not finite either, if there is one."""
    norm: float | None = None


class Stepper:
    """Executes the steps of a train state, in successive worlds."""

    def __init__(
        self,
        lineage: TrainState,
        agent: LauncherConnection,
        meter: Meter,
        *,
        wants_commit: Callable[[], bool],
        busy: Callable[[], bool],
        max_grad_norm: float | None,
        scaler: Any = None,
    ) -> None:
        self._lineage = lineage
        self._agent = agent
        self._meter = meter
        self._wants_commit = wants_commit
        self._busy = busy
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._sharding = lineage.sharding
        self._mates: Group | None = None
        self._reducer = Reducer(lineage.trained(), optimizer=lineage.optimizer)
        self._structure = Structure(lineage.objects)
        self._statistics = Statistics(lineage.modules())
        self._undo = Undo(lineage.modules(), scaler)
        self._batch = _Batch()
        self.weights = Weights(lineage.objects)
        self._kept: _Kept | None = None
        self._group: Group | None = None
        self._pair: AttemptId | None = None
        self.torn = False  # the optimizer failed in a step: no other rank may use this state
        # the result of the last prepared step that was applied without its vote
        self.rolled: StepResult | None = None

    def attach(
        self, group: Group, pair: AttemptId, *, peers: Group | None = None, mates: Group | None = None
    ) -> None:
        """Make the next steps with these ranks.

        For a sharded model, `peers` have our shard, and `mates` the others.
        """
        self._group, self._pair, self._mates = group, pair, mates
        self._reducer.attach(group, peers)
        if self._lineage.step:
            self.weights.remember()
        else:
            self.weights.forget()
        self.begin()

    def begin(self) -> None:
        """Begin the next global batch."""
        self._batch = _Batch(started=time.monotonic())
        self._undo.remember()

    def add(self, loss: torch.Tensor, weight: float, seen: Audit | None, *, last: bool) -> None:
        """Run backward of one micro-batch. During that of the last one, the averages are sent.

        Raise `PeerLostError` if the attempt ended meanwhile.
        """
        self._refuse_torn()
        if weight or self._sharding is not None:
            # The mean over no samples is NaN, which would corrupt the step on all ranks. But with shards, ranks wait
            # for each other.
            check_loss(loss)
            if self._sharding is not None:
                self._sharding.watch()
            self._reducer.arm(last=last)
            weighted = loss * weight
            # FSDP2 has its own hooks in backward, which must not be interrupted.
            with self._reducer.leaving() if self._sharding is None else nullcontext():
                (weighted if self._scaler is None else self._scaler.scale(weighted)).backward()
            self._batch.loss += float(loss.detach()) * weight
        self._batch.weight += weight
        if seen is not None:
            self._batch.seen += seen

    def finish(self, samples: int | None) -> Made:
        """Average, vote and apply."""
        if self._group is None or self._pair is None:
            raise UsageError("call job.manage(model=…, optimizer=…) first")
        kept = self._prepare(self._group, self._pair, samples)
        self._vote(kept, self._group, self._pair)
        return self._apply(kept)

    def check(self) -> None:
        """Check before a save that the state is that of the optimizer's parameters."""
        self._refuse_torn()
        if self._sharding is not None:
            self._sharding.reset()
        self._structure.check_now()

    def rewind(self) -> bool:
        """Revert the unfinished next step. Return whether the state is then exactly that of the last step."""
        if self.torn or self._kept is not None or self._lineage.standing.doubt is not None:
            return False
        self._take_back()
        return True

    def settle(self, standing: RankState, *, apply: bool) -> None:
        """After an attempt, apply or discard its prepared step, and set the rank state.

        Both are one change: a failure between them would leave marks that do not match the state.
        """
        lineage, kept = self._lineage, self._kept
        doubt, lineage.standing = lineage.standing.doubt, standing
        if apply and doubt is not None and kept is not None:
            lineage.origin = doubt.pair
            self.rolled = self._apply(kept).result
            return
        self._kept = None
        self._take_back()

    # Internal

    def _take_back(self) -> None:
        self._reducer.discard()
        if self._sharding is not None:
            self._sharding.reset()
        self._undo.restore()

    def _refuse_torn(self) -> None:
        if self.torn:
            raise UsageError("the optimizer failed in an earlier step: let that exception end the script")

    def _prepare(self, group: Group, pair: AttemptId, samples: int | None) -> _Kept:
        self._structure.check(self._lineage.step)
        self._meter.enter(Activity.AVERAGE)
        touched = self._touched()
        numbers = step_ballot.encode(self._ballot(touched), rank=group.rank, world_size=group.size)
        agreed = step_ballot.decode(self._reducer.finish(numbers), world_size=group.size)
        statistics = self._statistics.collect(group)
        if agreed.weight == 0:
            raise UsageError("no rank had a sample in this step: call job.step(loss, samples=…) only while one has")
        spoiled = self._spoiled() if agreed.non_finite else ""
        self._kept = _Kept(
            agreed=agreed, samples=samples, world_size=group.size, statistics=statistics, spoiled=spoiled
        )
        if self._mates is not None:
            self._norm(self._kept)
        self._lineage.standing = step_commit.prepared(self._lineage.standing, pair)
        return self._kept

    def _spoiled(self) -> str:
        """Return the name of a weight that is not finite; "" if all are finite on all ranks of the replica group."""
        own = self.weights.not_finite()
        if self._mates is None or finite(whole_norm(math.inf if own else 0.0, self._mates)):
            return own
        return own or "a weight of another shard"

    def _touched(self) -> list[bool]:
        if self._sharding is None:
            return self._reducer.touched()
        return self._sharding.used(self._reducer.parameters)

    def _ballot(self, touched: list[bool]) -> Ballot:
        wanted = self._agent.requests()
        return Ballot(
            checkpoint=self._wants_commit(),
            quiesce=bool(wanted.quiesce),
            pause=bool(wanted.pause),
            near=bool(wanted.near),
            busy=self._busy(),
            urgent=bool(wanted.checkpoint or wanted.quiesce),
            bound=not self._agent.parting().keep,
            non_finite=not math.isfinite(self._batch.loss),
            touched=touched,
            loss=self._batch.loss,
            weight=self._batch.weight,
            seen=self._batch.seen,
        )

    def _vote(self, kept: _Kept, group: Group, pair: AttemptId) -> None:
        """Vote, and compute the norm meanwhile.

        Raise `PeerLostError` if the vote does not return (see `step_commit`).
        """
        self._meter.enter(Activity.VOTE)
        self._agent.begin_vote()
        try:
            self._lineage.standing = step_commit.voted(self._lineage.standing, pair)
            vote = torch.ones(1, device="cpu")
            pending = group.launch_sum(vote)
            self._norm(kept)
            pending.wait()
            self._lineage.stepped(pair)
        finally:
            self._agent.end_vote()

    def _norm(self, kept: _Kept) -> float:
        """Set the averages as the gradients, and return their norm, which is the same on every rank.

        For a sharded model, this needs the other shards, so it is part of the preparation.
        """
        if kept.norm is not None:
            return kept.norm
        self._reducer.adopt(kept.agreed.touched)
        weight = kept.agreed.weight
        if not math.isclose(weight, 1.0, rel_tol=1e-9):
            self._reducer.scale(1.0 / weight)
        if self._scaler is not None and self._lineage.optimizer is not None:
            self._scaler.unscale_(self._lineage.optimizer)
        own = self._reducer.norm(anew=self._scaler is not None)
        kept.norm = own if self._mates is None else whole_norm(own, self._mates)
        return kept.norm

    def _apply(self, kept: _Kept) -> Made:
        """Apply the step, which is already counted. A lost peer cannot make this fail."""
        self._meter.enter(Activity.APPLY)
        lineage, agreed, norm = self._lineage, kept.agreed, self._norm(kept)
        good = finite(norm) and not agreed.non_finite
        by_scale = not good and self._overflowed_by_scale(agreed)
        if good or self._scaler is not None:
            try:
                with lineage.rates.applied(kept.world_size, lineage.step):
                    self._optimize(norm, good=good)
                self._schedule(agreed)
            except BaseException:
                self.torn = True  # not before: a rank with a request to leave still ends its step
                raise
        if good:
            self.weights.remember()
        self._statistics.take(kept.statistics)  # also after a skipped step, so that all ranks stay equal
        self._reducer.clear()
        self._kept = None
        if self._sharding is not None:
            self._sharding.settled()
        if lineage.position is not None and kept.samples is not None:
            lineage.position = lineage.position.advanced(kept.samples, agreed.seen)
        result = self._told(kept, norm) if good else self._passed_over(kept, counts=not by_scale)
        self.begin()
        return Made(result=result, agreed=agreed)

    def _optimize(self, norm: float, *, good: bool) -> None:
        if self._max_grad_norm is not None and good:
            self._reducer.clip(self._max_grad_norm, norm)
        optimizer = self._lineage.optimizer
        if optimizer is not None and good:  # checked here, because a disabled scaler accepts everything
            optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if optimizer is not None and self._scaler is not None:
            self._scaler.update()

    def _schedule(self, agreed: Agreed) -> None:
        scheduler = self._lineage.objects.get("scheduler")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(agreed.loss)
        elif scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]

    def _told(self, kept: _Kept, norm: float) -> StepResult:
        self._lineage.skipped_in_a_row = 0
        agreed, step = kept.agreed, self._lineage.step
        self._agent.send(
            "step",
            at=time.monotonic(),
            step=step,
            loss=agreed.loss,
            samples=kept.samples or agreed.weight,
            seconds=round(time.monotonic() - self._batch.started, 6),
            lr=self._lineage.rates.lr,
            worldSize=kept.world_size,
            gradNorm=norm,
        )
        return StepResult(committed=True, step=step, loss=agreed.loss, grad_norm=norm, reason="Committed")

    def _overflowed_by_scale(self, agreed: Agreed) -> bool:
        """Return whether the scaler's scale may have caused the overflow, instead of the state.

        The scale then decreases.
        """
        return not agreed.non_finite and self._scaler is not None and self._scaler.get_scale() > 1.0

    def _passed_over(self, kept: _Kept, *, counts: bool) -> StepResult:
        lineage = self._lineage
        lineage.skipped += 1
        lineage.skipped_in_a_row += counts
        _log.warning("step %d was not applied: its loss or gradients are not finite", lineage.step)
        if kept.spoiled:
            self.begin()  # the next step must begin without this one
            raise NonFiniteError(
                f"{kept.spoiled} holds values that are not finite, so no later step can be finite: this state is not "
                f"saved, and a restart continues from step {lineage.saved_step}. Lower the learning rate, give "
                f"max_grad_norm, or look for what else writes to the weights. {_GO_BACK}"
            )
        if lineage.skipped_in_a_row >= NON_FINITE_STEPS:
            self.begin()  # the next step must begin without this one
            raise NonFiniteError(
                f"{NON_FINITE_STEPS} steps in a row were not finite: lower the learning rate, give max_grad_norm, "
                f"or look for the cause in the data from that step on. {_GO_BACK}"
            )
        return StepResult(committed=False, step=lineage.step, loss=kept.agreed.loss, reason="NonFinite")


def let_go(loss: torch.Tensor) -> None:
    """Free the graph that backward did not free.

    The script may still hold the loss, and the repeated step needs memory.
    """
    with suppress(RuntimeError):  # a view cannot be detached in place
        loss.detach_()
