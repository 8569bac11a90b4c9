"""One global step of one rank: accumulate, average, vote and apply; or discard it without any effect.

No error of a lost peer reaches the script: these methods raise `PeerLostError` for the job, which enters the next
world. If the vote on a step does not return, this rank keeps everything that is needed to apply it without its peers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import UsageError
from holdfast.fault_injection.injector import Injector
from holdfast.telemetry.activity import Activity, Meter
from holdfast.telemetry.rank_time import Ledger
from holdfast.telemetry.step_pace import PaceWindow, StepPace
from holdfast.training.data import Audit, BadSample, Unreadable
from holdfast.training.data.bad_samples import gather_bad_samples
from holdfast.training.distributed.fsdp import whole_norms
from holdfast.training.distributed.process_group import Group
from holdfast.training.guards.judgement import Judgement, judge
from holdfast.training.guards.non_finite import Response, respond
from holdfast.training.guards.settings import Guards, SpikeResponse
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.options.validation import Structure, check_loss
from holdfast.training.protocol import step_ballot, step_commit
from holdfast.training.protocol.slow_ranks import SlowRanks
from holdfast.training.protocol.step_ballot import Agreed, Ballot
from holdfast.training.protocol.step_commit import RankState
from holdfast.training.step.batchnorm_stats import Statistics
from holdfast.training.step.gradient_reducer import Reducer
from holdfast.training.step.rollback import Undo
from holdfast.training.step.step_result import StepOutcome, StepResult, group_names
from holdfast.training.step.train_state import TrainState, finite
from holdfast.training.step.weight_check import Weights

_log = logging.getLogger("holdfast.job")


@dataclass
class _Batch:
    """The current global batch."""

    loss: float = 0.0
    weight: float = 0.0
    seen: Audit = Audit()  # noqa: RUF009  (frozen)
    unreadable: tuple[Unreadable, ...] = ()
    started: float = 0.0


@dataclass(kw_only=True)
class _PreparedStep:
    """The data for applying a prepared step, without the averages. `norm` is set once they became gradients."""

    agreed: Agreed
    samples: int | None
    world_size: int
    statistics: torch.Tensor | None
    non_finite_weight: str = ""
    """For a loss that is not finite: the name of a weight that is not finite either, if there is one."""
    bad_samples: tuple[BadSample, ...] = ()
    norm: float | None = None
    group_norms: dict[str, float] = field(default_factory=dict)
    counted: bool = False


class Stepper:
    """Executes the steps of a train state, in successive worlds."""

    def __init__(
        self,
        state: TrainState,
        agent: LauncherConnection,
        meter: Meter,
        ledger: Ledger,
        *,
        checkpoint_requested: Callable[[], bool],
        busy: Callable[[], bool],
        max_grad_norm: float | None,
        group_norms: bool,
        guards: Guards,
        scaler: Any = None,
    ) -> None:
        self._state = state
        self._guards = guards
        self._agent = agent
        self._meter = meter
        self._ledger = ledger
        self._checkpoint_requested = checkpoint_requested
        self._busy = busy
        self._max_grad_norm = max_grad_norm
        self._group_norms = group_norms
        self._scaler = scaler
        self._sharding = state.sharding
        self._shard_group: Group | None = None
        self._reducer = Reducer(state.trained(), optimizer=state.optimizer)
        self._structure = Structure(state.objects)
        self._statistics = Statistics(state.modules())
        self._undo = Undo(state.modules(), scaler)
        self._batch = _Batch()
        self._paces = PaceWindow(ledger.seconds)
        self._pace = StepPace()
        self._slow_ranks = SlowRanks()
        self.weights = Weights(state.objects)
        self._faults = [one.numbers for one in meter.listeners if isinstance(one, Injector)]  # of `holdfast chaos`
        for numbers in self._faults:
            numbers.manage(state.trained, torch.OutOfMemoryError)
        self._prepared: _PreparedStep | None = None
        self._group: Group | None = None
        self._attempt_id: AttemptId | None = None
        self.optimizer_failed = False  # the optimizer failed in a step: no other rank may use this state
        # the last prepared step that was applied without its vote
        self.applied_in_recovery: StepOutcome | None = None

    @property
    def counted(self) -> bool:
        """Whether the step is counted, but not completely applied, so that it cannot be repeated."""
        return self.optimizer_failed or (self._prepared is not None and self._prepared.counted)

    @property
    def accumulates(self) -> bool:
        """Whether this rank has computed a part of the next global batch."""
        return self._batch.seen.count > 0

    def attach(
        self, group: Group, attempt_id: AttemptId, *, peers: Group | None = None, shard_group: Group | None = None
    ) -> None:
        """Make the next steps with these ranks.

        For a sharded model, `peers` have our shard, and `shard_group` the others.
        """
        self._group, self._attempt_id, self._shard_group = group, attempt_id, shard_group
        self._reducer.attach(group, peers)
        self._paces, self._slow_ranks = PaceWindow(self._ledger.seconds), SlowRanks()
        if self._state.step:
            self.weights.remember()
        else:
            self.weights.forget()
        self.begin()

    def begin(self) -> None:
        """Begin the next global batch."""
        self._batch = _Batch(started=time.monotonic())
        self._undo.remember()
        self._seed()

    def skip_unreadable(self, samples: tuple[Unreadable, ...]) -> None:
        """Record samples that the next micro-batch lacks."""
        self._batch.unreadable += samples

    def add(self, loss: torch.Tensor, weight: float, seen: Audit | None, *, last: bool) -> None:
        """Run backward of one micro-batch. During that of the last one, the averages are sent.

        Raise `PeerLostError` if the attempt ended meanwhile.
        """
        self._check_optimizer()
        for numbers in self._faults:
            loss = numbers.loss(loss)
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

    def finish(self, samples: int | None) -> StepOutcome:
        """Average, vote and apply."""
        if self._group is None or self._attempt_id is None:
            raise UsageError("call job.manage(model=…, optimizer=…) first")
        prepared = self._prepare(self._group, self._attempt_id, samples)
        self._vote(prepared, self._group, self._attempt_id)
        prepared.counted = True
        return self._apply(prepared)

    def check(self) -> None:
        """Check before a save that the state is that of the optimizer's parameters."""
        self._check_optimizer()
        if self._sharding is not None:
            self._sharding.reset()
        self._structure.check_now()

    def rewind(self) -> bool:
        """Revert the unfinished next step. Return whether the state is then exactly that of the last step."""
        if self.optimizer_failed or self._prepared is not None or self._state.rank_state.prepared_step is not None:
            return False
        self._take_back()
        return True

    def settle(self, rank_state: RankState, *, apply: bool) -> None:
        """After an attempt, apply or discard its prepared step, and set the rank state.

        Both are one change: a failure between them would leave marks that do not match the state.
        """
        state, prepared = self._state, self._prepared
        prepared_step, state.rank_state = state.rank_state.prepared_step, rank_state
        if apply and prepared_step is not None and prepared is not None:
            state.origin = prepared_step.attempt_id
            self.applied_in_recovery = self._apply(prepared)
            return
        self._prepared = None
        self._take_back()

    # Internal

    def _take_back(self) -> None:
        self._reducer.discard()
        if self._sharding is not None:
            self._sharding.reset()
        self._undo.restore()
        self._seed()

    def _seed(self) -> None:
        """Seed the random generators for the next step."""
        if self._group is not None:
            self._state.seed(self._group.rank)

    def _check_optimizer(self) -> None:
        if self.optimizer_failed:
            raise UsageError("the optimizer failed in an earlier step: let that exception end the script")

    def _prepare(self, group: Group, attempt_id: AttemptId, samples: int | None) -> _PreparedStep:
        self._structure.check(self._state.step)
        self._meter.enter(Activity.AVERAGE)
        touched = self._touched()
        numbers = step_ballot.encode(self._ballot(touched), rank=group.rank, world_size=group.size)
        numbers = self._reducer.finish(numbers)
        agreed = step_ballot.decode(numbers, world_size=group.size)
        self._look_for_slow_ranks(numbers, group)
        statistics = self._statistics.collect(group)
        bad_samples: tuple[BadSample, ...] = ()
        if agreed.bad_samples:
            bad_samples = gather_bad_samples(group, self._batch.unreadable, self._state.step + 1)
        if agreed.weight == 0 and not bad_samples:
            raise UsageError("no rank had a sample in this step: call job.step(loss, samples=…) only while one has")
        non_finite_weight = self._non_finite_weight() if agreed.non_finite else ""
        self._prepared = _PreparedStep(
            agreed=agreed,
            samples=samples,
            world_size=group.size,
            statistics=statistics,
            non_finite_weight=non_finite_weight,
            bad_samples=bad_samples,
        )
        if self._shard_group is not None:
            self._norm(self._prepared)
        self._state.rank_state = step_commit.prepared(self._state.rank_state, attempt_id)
        return self._prepared

    def _look_for_slow_ranks(self, numbers: Sequence[float], group: Group) -> None:
        """Report changes to the launcher. All ranks have the same numbers, so one of them is enough."""
        now = time.monotonic()
        if group.rank == 0 and self._slow_ranks.due(now):
            slow = self._slow_ranks.look(step_ballot.paces(numbers, world_size=group.size), now)
            if slow is not None:
                self._agent.send("slowRanks", ranks=[rank.to_json() for rank in slow])

    def _non_finite_weight(self) -> str:
        """Return the name of a weight that is not finite; "" if all are finite on all ranks of the shard group."""
        own = self.weights.not_finite()
        if self._shard_group is None or finite(*whole_norms([math.inf if own else 0.0], self._shard_group)):
            return own
        return own or "a weight of another shard"

    def _touched(self) -> list[bool]:
        if self._sharding is None:
            return self._reducer.touched()
        return self._sharding.used(self._reducer.parameters)

    def _ballot(self, touched: list[bool]) -> Ballot:
        requests = self._agent.requests()
        self._pace = self._paces.add(self._batch.weight)
        return Ballot(
            checkpoint=self._checkpoint_requested(),
            quiesce=bool(requests.quiesce),
            pause=bool(requests.pause),
            node_local=bool(requests.node_local),
            busy=self._busy(),
            urgent=bool(requests.checkpoint or requests.quiesce),
            bound=not self._agent.parting().keep,
            non_finite=not math.isfinite(self._batch.loss),
            bad_samples=bool(self._batch.unreadable),
            touched=touched,
            loss=self._batch.loss,
            weight=self._batch.weight,
            seen=self._batch.seen,
            pace=self._pace,
        )

    def _vote(self, prepared: _PreparedStep, group: Group, attempt_id: AttemptId) -> None:
        """Vote, and compute the norm meanwhile.

        Raise `PeerLostError` if the vote does not return (see `step_commit`).
        """
        self._meter.enter(Activity.VOTE)
        self._agent.begin_vote()
        try:
            self._state.rank_state = step_commit.voted(self._state.rank_state, attempt_id)
            vote = torch.ones(1, device="cpu")
            pending = group.launch_sum(vote)
            self._norm(prepared)
            pending.wait()
            self._state.stepped(attempt_id)
        finally:
            self._agent.end_vote()

    def _norm(self, prepared: _PreparedStep) -> float:
        """Set the averages as the gradients, and return their norm, which is the same on every rank.

        For a sharded model, this needs the other shards, so it is part of the preparation.
        """
        if prepared.norm is not None:
            return prepared.norm
        self._reducer.adopt(prepared.agreed.touched)
        weight = prepared.agreed.weight
        if weight and not math.isclose(weight, 1.0, rel_tol=1e-9):
            self._reducer.scale(1.0 / weight)
        if weight and self._scaler is not None and self._state.optimizer is not None:
            self._scaler.unscale_(self._state.optimizer)
        own = self._reducer.norms(recompute=self._scaler is not None, of_groups=self._group_norms)
        norms = own if self._shard_group is None else whole_norms(own, self._shard_group)
        names = group_names(self._state.optimizer) if self._group_norms else []
        prepared.norm, prepared.group_norms = norms[0], dict(zip(names, norms[1:], strict=True))
        return prepared.norm

    def _apply(self, prepared: _PreparedStep) -> StepOutcome:
        """Apply the step, which is already counted. A lost peer cannot make this fail."""
        self._meter.enter(Activity.APPLY)
        state, agreed, norm = self._state, prepared.agreed, self._norm(prepared)
        scale = None if self._scaler is None else self._scaler.get_scale()
        found = judge(self._guards, state.recent, agreed, norm, scale=scale)
        if found.reason in ("Committed", "Spike"):
            state.recent = state.recent.with_step(self._guards, agreed.loss, norm)
        if found.applied or (self._scaler is not None and not found.empty):
            try:
                extra = state.non_finite.factor_at(state.step)
                with state.rates.applied(prepared.world_size, state.step, extra):
                    self._optimize(norm, good=found.applied)
                self._schedule(agreed)
            except BaseException:
                self.optimizer_failed = True  # not before: a rank with a request to leave still ends its step
                raise
        if found.applied:
            self.weights.remember()
        if found.counts or found.empty:
            self._undo.restore_buffers()  # a sample that is not finite spoils running statistics
        else:
            self._statistics.take(prepared.statistics)  # also after an overflow, so that all ranks stay equal
        self._reducer.clear()
        self._prepared = None
        if self._sharding is not None:
            self._sharding.settled()
        response = None if found.applied or found.empty else self._skip(prepared, found)
        state.bad_samples = state.bad_samples.with_skipped(prepared.bad_samples)
        if state.position is not None and prepared.samples is not None:
            state.position = state.position.advanced(prepared.samples, agreed.seen)
        result = self._completed(prepared, norm) if found.applied else self._skipped(agreed, found)
        self.begin()
        weight = prepared.non_finite_weight
        return StepOutcome(
            result=result,
            agreed=agreed,
            world_size=prepared.world_size,
            response=response,
            non_finite_weight=weight,
            bad_samples=prepared.bad_samples,
            spike=found.spike,
        )

    def _optimize(self, norm: float, *, good: bool) -> None:
        if self._max_grad_norm is not None and good:
            self._reducer.clip(self._max_grad_norm, norm)
        optimizer = self._state.optimizer
        if optimizer is not None and good:  # checked here, because a disabled scaler accepts everything
            optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if optimizer is not None and self._scaler is not None:
            self._scaler.update()

    def _schedule(self, agreed: Agreed) -> None:
        scheduler = self._state.objects.get("scheduler")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(agreed.loss)
        elif scheduler is not None:
            scheduler.step()  # type: ignore[attr-defined]

    def _completed(self, prepared: _PreparedStep, norm: float) -> StepResult:
        self._state.non_finite = self._state.non_finite.with_finite()
        agreed, step = prepared.agreed, self._state.step
        self._agent.send(
            "step",
            at=time.monotonic(),
            step=step,
            loss=agreed.loss,
            samples=prepared.samples or agreed.weight,
            seconds=round(time.monotonic() - self._batch.started, 6),
            lr=self._state.rates.lr,
            worldSize=prepared.world_size,
            gradNorm=norm,
            dataSeconds=round(self._pace.data, 6),
            computeSeconds=round(self._pace.compute, 6),
        )
        return StepResult(
            committed=True,
            step=step,
            loss=agreed.loss,
            grad_norm=norm,
            group_norms=prepared.group_norms,
            reason="Committed",
        )

    def _skip(self, prepared: _PreparedStep, found: Judgement) -> Response | None:
        """Record a step that is not applied, and return the response. The position is still that before the step."""
        state, agreed, step = self._state, prepared.agreed, self._state.step
        state.skipped += 1
        if not found.counts:
            _log.warning("step %d was not applied: its gradients overflowed, and the scale falls", step)
            return None
        position = state.position
        samples = () if position is None or prepared.samples is None else position.ranges(prepared.samples)
        spike = found.spike
        record = state.non_finite.with_skipped(step, samples, agreed.non_finite_ranks, spiked=spike is not None)
        rolls_back = spike is not None and spike.response == SpikeResponse.ROLL_BACK
        response = respond(self._guards, record, at_once=rolls_back or bool(prepared.non_finite_weight))
        if response is Response.LOWER:
            record = record.lowered(self._guards, step)
        state.non_finite = record
        not_finite = "its loss is not finite" if agreed.non_finite else "its gradients are not finite"
        _log.warning("step %d was not applied: %s", step, not_finite if spike is None else spike)
        return response

    def _skipped(self, agreed: Agreed, found: Judgement) -> StepResult:
        loss = None if found.empty else agreed.loss
        return StepResult(committed=False, step=self._state.step, loss=loss, reason=found.reason)
