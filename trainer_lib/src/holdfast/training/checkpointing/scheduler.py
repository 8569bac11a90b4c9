"""When a checkpoint is due, and what happens after a failed one.

A failed checkpoint does not end the script: every rank has its state in memory, which would be lost because of a
storage outage. Training continues, and the checkpoint is repeated until one succeeds (decision 0137). The exception
is a state whose weights are not finite, which no repetition can fix (decision 0139).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.interval import Failures, IntervalChooser, retry_after
from holdfast.checkpoint.saving.background import Saving
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.tiers.tier import Tier
from holdfast.core.errors import CheckpointError, NoCapacityError, PeerLostError
from holdfast.core.protocol import PEER_TIER, SHARED_TIER
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.launcher_client.connection import LauncherConnection, Requests
from holdfast.training.options.config import Interval
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.checkpoint")

INTERVAL_ID: Final = "interval"
_SLICE: Final = 0.05
_ON_TIER: Final = "step %d is on the %s tier: training stood still for %.3f s, rank 0 wrote %.1f MB in %.3f s"
_NOT_ON_TIER: Final = "step %d could not be saved on the %s tier (%s): %s"
_FAILED: Final = (
    "step %d could not be saved (%s, %d in a row): %s. Training continues, and the checkpoint is tried again; if all "
    "workers are lost before one succeeds, training resumes from step %d: %s"
)
_WRITABLE: Final = "make the checkpoint directory writable, with free space"
_FREEZE: Final = "freeze the parameters that are meant to hold such values, with requires_grad_(False)"
_NON_FINITE_SAVES: Final = 3
_UNLIKE: Final = (
    "%r is managed, but its state on rank %s differs from rank 0. A restored or replaced rank gets the numbers of "
    "one rank and the tensors of any rank. Return the same state_dict() on every rank, such as one position in all "
    "of the data (job.batches does this). Or leave the object out of job.manage(), and create it again from "
    "job.committed_step and job.rank"
)


class CheckpointScheduler:
    """Saves the job's steps and reports each save to the launcher. Every rank makes the same calls."""

    def __init__(
        self, engine: CheckpointManager | None, agent: LauncherConnection, interval: Interval, state: TrainState
    ) -> None:
        self._engine = engine
        self._agent = agent
        self._interval = interval
        self._state = state
        self._coordinator = False
        self._saved_at = self._entered = time.monotonic()
        self._cadence = IntervalChooser()
        self._interval_seconds = interval.seconds
        self._failed = 0  # consecutive failed checkpoints
        self._retry_at = 0.0
        self._tried: frozenset[str] = frozenset()  # requests for the last checkpoint, which failed
        self._non_finite = 0  # consecutive failures because weights are not finite
        self._message = ""
        self._cancel = CancelToken()
        self._running: _RunningSave | None = None
        self._interrupted = False
        self._tier_errors: dict[str, str] = {}  # the last error message of each tier
        self._background: _RunningSave | None = None
        self._due: dict[str, Tier] = {}
        self._urgent = False
        self._differing: set[str] = set()

    @property
    def has_folder(self) -> bool:
        """Whether the job has a checkpoint folder."""
        return self._engine is not None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._running is not None

    def begin(self, *, coordinator: bool, cancel: CancelToken) -> None:
        """Begin in a new world."""
        self._coordinator, self._cancel = coordinator, cancel
        self._background, self._due = None, {}
        self._state.failures = self._state.failures.with_counters(self._agent.launcher_failures)
        self._entered = time.monotonic()
        self._choose()

    @property
    def failures(self) -> Failures:
        """The failures of the job until now."""
        return self._state.failures.later(time.monotonic() - self._entered)

    def due_at(self, step: int) -> bool:
        """Return whether every rank saves this step without a request."""
        return self.has_folder and self._interval.due_at(step)

    def overdue(self) -> bool:
        """Return whether this rank requests a checkpoint from the others.

        The reasons are a request, the end of the coordinator's interval, a lost peer that interrupted the last
        checkpoint, and the retry of a failed one. While a checkpoint is being written, also to the node's disk, the
        result is False. A finished checkpoint is recorded here, before each step's vote.
        """
        if not self.has_folder:
            return bool(self._agent.requests().checkpoint)
        running = self._running
        if (running is not None and not running.saving.ended) or self._writes_in_background():
            return False
        if running is not None:
            self._land(running)
            if running.saving.lost:
                raise PeerLostError(running.saving.lost)
        # not earlier, because the save that has just ended may have answered it
        requested = self._agent.requests().checkpoint
        again = self._failed > 0 and time.monotonic() >= self._retry_at
        return again or not self._tried.issuperset(requested) or self._timed() or self._interrupted

    def lift_rate_limit(self) -> None:
        """Lift the rate limit of the running checkpoint and of the next one, because something waits for it."""
        self._urgent = True
        if self._engine is not None:
            self._engine.lift_rate_limit()

    def behind(self, step: int) -> bool:
        """Return whether the last step is not durable yet."""
        return self.has_folder and self._state.saved_step != step

    def save(self, step: int, snapshot: Callable[[], Snapshot], *, spare: bool = False, onward: bool = False) -> None:
        """Begin a checkpoint, after the last one has ended.

        With `spare`, retention deletes no older one for it. With `onward`, another step of this attempt follows. The
        checkpoint then answers no request to end the attempt, because the machine may be removed after such an
        answer.
        """
        started = time.monotonic()
        self.settle()
        requests = self._agent.requests()
        last = () if onward else requests.quiesce
        ids = [*([INTERVAL_ID] if self.due_at(step) or self._timed() else []), *requests.checkpoint, *last]
        if self._engine is None:
            none = "the job has no checkpoint folder"
            self._report(step, SaveResult(committed=False, message=none, cause=FailureCause.NO_FOLDER), ids, 0.0)
            self._agent.answered(Requests(checkpoint=requests.checkpoint))
            return
        self._interrupted = True  # until all ranks have written it
        taken, cancel = snapshot(), self._cancel
        waited = time.monotonic() - started

        def ended(result: SaveResult) -> None:
            """Report the result on the save's thread at once, and not through a rank in another attempt."""
            if not cancel.is_set():
                self._report(step, result, ids, time.monotonic() - started)
            if result.committed and self._coordinator:
                _log_durable(step, result, waited + result.stalled)
                self._log_differing(result.differing)

        saving = self._engine.begin(taken, ended, spare=spare, urgent=self._urgent)
        self._urgent = False
        self._running = _RunningSave(step=step, requested=requests.checkpoint, saving=saving, waited=waited)
        self._saved_at = time.monotonic()

    def settle(self) -> None:
        """Wait for the running checkpoint, as all ranks do at the same step. `behind` shows whether it succeeded.

        Raise `PeerLostError` if the attempt ends before. Raise `CheckpointError` if the weights repeatedly are not
        finite.
        """
        running = self._running
        if running is not None:
            began = time.monotonic()
            running.saving.settle(lambda: self._cancel.check_since(began))
            self._land(running)
            if running.saving.lost:
                raise PeerLostError(running.saving.lost)
        if self._non_finite >= _NON_FINITE_SAVES:
            failed, self._non_finite = self._non_finite, 0  # a script that corrects the weights may save again
            raise CheckpointError(f"{failed} checkpoints in a row could not be written ({self._message}): {_FREEZE}")

    def await_retry(self, most: float) -> bool:
        """Wait at most `most` seconds for the retry of a failed checkpoint. Return whether it is due.

        Raise `PeerLostError` if the attempt ends before.
        """
        until = min(self._retry_at, time.monotonic() + most)
        while (left := until - time.monotonic()) > 0:
            self._cancel.check()
            time.sleep(min(left, _SLICE))
        return time.monotonic() >= self._retry_at

    def leave(self) -> None:
        """Abandon the unfinished checkpoint of an attempt that is over (see `saving.background`), and request
        another.
        """
        running, self._running = self._running, None
        if running is not None and running.saving.ended:
            self._land(running)
        self._state.failures, self._entered = self.failures, time.monotonic()

    def due_now(self, step: int, *, requested: bool) -> list[Tier]:
        """Return the tiers on which every rank saves this step before the next one.

        With `requested`, a worker must leave, so these are all tiers without background saves.
        """
        return [tier for tier in self._tiers if not tier.in_background and (requested or tier.due_at(step))]

    def save_now(self, tier: Tier, step: int, snapshot: Callable[[], Snapshot], *, requested: bool = False) -> None:
        """Save on a tier while training is paused. A failure is reported, and the previous save stays.

        With `requested`, also copy to other nodes, whether due or not. Raise `NoCapacityError` if the first save does
        not fit and none was requested: training would otherwise continue without the configured checkpoints.
        """
        if self._engine is None:
            return
        started = time.monotonic()
        result = self._engine.save_on(tier, snapshot(), requested=requested)
        if result.full and not requested:
            raise NoCapacityError(result.message)
        # repeated messages are logged once
        if result.committed or result.message != self._tier_errors.get(tier.name):
            name = PEER_TIER if result.copy_failed else tier.name
            self._report(step, result, (), time.monotonic() - started, tier=name)
            if not result.committed:
                _log.error(_NOT_ON_TIER, step, tier.name, result.cause, result.message)
        self._tier_errors[tier.name] = result.message

    def writes(self) -> bool:
        """Return whether this rank is writing a checkpoint to any tier."""
        return (self._running is not None and not self._running.saving.ended) or self._writes_in_background()

    def due_in_background(self, step: int, *, busy: bool) -> Tier | None:
        """Return the tier on which every rank begins a background save; None while any rank is `busy`."""
        for tier in self._tiers:
            if tier.in_background and tier.due_at(step):
                self._due[tier.name] = tier
        return None if busy else next(iter(self._due.values()), None)

    def save_in_background(self, tier: Tier, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Begin a background save on a tier. A failure is reported, and training continues.

        If even the first save does not fit, raise `NoCapacityError` on all ranks at the same step.
        """
        before, self._background = self._background, None
        self._due.pop(tier.name, None)
        if before is not None and not before.saving.lost and before.saving.result.full:
            raise NoCapacityError(before.saving.result.message)
        if self._engine is None:
            return
        started, cancel, taken = time.monotonic(), self._cancel, snapshot()

        def ended(result: SaveResult) -> None:
            """Report the result on the save's thread."""
            if not cancel.is_set():
                self._report(step, result, (), time.monotonic() - started, tier=tier.name)
            if self._coordinator and result.committed:
                _log.info(_ON_TIER, step, tier.name, result.stalled, result.nbytes / 1e6, result.seconds)
            elif self._coordinator:
                _log.warning(_NOT_ON_TIER, step, tier.name, result.cause, result.message)

        saving = self._engine.begin_on(tier, taken, ended)
        self._background = _RunningSave(step=step, requested=(), saving=saving, waited=0.0)

    @property
    def _tiers(self) -> tuple[Tier, ...]:
        return () if self._engine is None else self._engine.tiers

    def _writes_in_background(self) -> bool:
        return self._background is not None and not self._background.saving.ended

    def postpone(self) -> None:
        """Request a checkpoint with the next step, as after an interrupted one."""
        self._interrupted = True

    def answer_rest(self, step: int) -> None:
        """Answer the requests since the last checkpoint with this checkpoint, because no step followed it."""
        requests = self._agent.requests()
        if self.has_folder and (ids := (*requests.checkpoint, *requests.quiesce)):
            self._report(step, SaveResult(committed=True), ids, 0.0)
            self._agent.answered(Requests(checkpoint=requests.checkpoint))

    def _timed(self) -> bool:
        """Return whether the interval is over, by the coordinator's clock only.

        The step's vote informs the others.
        """
        return (
            self._coordinator
            and self._interval_seconds is not None
            and time.monotonic() - self._saved_at >= self._interval_seconds
        )

    def _choose(self) -> None:
        """Choose the interval from the costs of the last checkpoints and the failures of the job."""
        if not self._interval.auto:
            return
        choice = self._cadence.choose(self.failures.mtbf)
        self._interval_seconds = choice.seconds
        if choice.changed and self._coordinator:
            _log.info("a checkpoint is due every %.0f s: %s", choice.seconds, choice.reason)

    def _land(self, running: _RunningSave) -> None:
        self._running = None
        if running.saving.lost:
            return  # it still counts as interrupted
        result, self._interrupted = running.saving.result, False
        if result.committed:
            self._state.saved_step = running.step
            self._failed, self._non_finite, self._retry_at, self._tried = 0, 0, 0.0, frozenset()
            self._agent.answered(Requests(checkpoint=running.requested))
            self._cadence.record(stall=running.waited + result.stalled, write=result.seconds)
            self._choose()
        else:
            self._tried = frozenset(running.requested)
            self._count_failed(running.step, result)

    def _report(
        self, step: int, result: SaveResult, ids: Sequence[str], seconds: float, tier: str = SHARED_TIER
    ) -> None:
        self._agent.send(
            "checkpoint",
            step=step,
            tier=tier,
            result="Committed" if result.committed else "Failed",
            seconds=round(seconds, 6),
            bytes=result.nbytes,
            ids=list(ids),
            message=result.message,
            **_copying(result),
            **({} if result.committed else {"cause": result.cause}),
        )

    def _log_differing(self, differing: Mapping[str, Sequence[int]]) -> None:
        """Log each object once, because its fault is the same in each checkpoint."""
        for name in sorted(differing.keys() - self._differing):
            self._differing.add(name)
            _log.error(_UNLIKE, name, ", ".join(map(str, differing[name])))

    def _count_failed(self, step: int, result: SaveResult) -> None:
        self._failed += 1
        self._retry_at = time.monotonic() + retry_after(self._failed)
        self._message = result.message
        self._non_finite = self._non_finite + 1 if result.cause == FailureCause.NON_FINITE else 0
        if self._non_finite >= _NON_FINITE_SAVES:
            return  # the error that ends the script reports it
        advice = _FREEZE if self._non_finite else _WRITABLE
        _log.error(_FAILED, step, result.cause, self._failed, result.message, self._state.saved_step, advice)


@dataclass(frozen=True, kw_only=True)
class _RunningSave:
    """A running checkpoint, and the requests that it answers."""

    step: int
    requested: tuple[str, ...]
    saving: Saving
    waited: float


def _copying(result: SaveResult) -> dict[str, float]:
    """Return the seconds for the copy to another node, if there was one."""
    return {"copying": round(result.copying, 6)} if result.copying else {}


def _log_durable(step: int, result: SaveResult, stalled: float) -> None:
    rate = result.nbytes / result.seconds / 1e9 if result.seconds else 0.0
    _log.info(
        "step %d is durable: training stood still for %.3f s, rank 0 wrote %.1f MB in %.3f s (%.2f GB/s)",
        step,
        stalled,
        result.nbytes / 1e6,
        result.seconds,
        rate,
    )
