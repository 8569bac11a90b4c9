"""When a commit is due, and what follows from one that failed.

A commit that fails ends nothing: every rank has its state in memory, and to end the script would throw that away for
an outage of the storage. Training continues, and the commit is tried again until one succeeds (decision 0137). The
exception is a state whose weights are not finite: no other try would end better (decision 0139).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.interval import Cadence, Failures, retry_after
from holdfast.checkpoint.saving.background import Saving
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.tiers.tier import Tier
from holdfast.core.errors import CheckpointError, NoRoomError, PeerLostError
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
_MAKE_ROOM: Final = "make room in the checkpoint folder or make it writable"
_FREEZE: Final = "freeze the parameters that are meant to hold such values, with requires_grad_(False)"
_SPOILED_SAVES: Final = 3
_UNLIKE: Final = (
    "%r is managed, and its state on rank %s is not that of rank 0: a restore, and a rank that takes a lost one's "
    "place, get numbers of one rank and tensors of any. Have its state_dict() say what is true of the whole job, "
    "such as a position in all of the data from which each rank finds its own (job.batches does), or keep it out of "
    "job.manage() and make it anew from job.committed_step and job.rank"
)


class CheckpointScheduler:
    """Commits the job's steps and tells the launcher of each. Every rank makes the same calls."""

    def __init__(
        self, engine: CheckpointManager | None, agent: LauncherConnection, interval: Interval, lineage: TrainState
    ) -> None:
        self._engine = engine
        self._agent = agent
        self._interval = interval
        self._lineage = lineage
        self._coordinator = False
        self._saved_at = self._entered = time.monotonic()
        self._cadence = Cadence()
        self._every = interval.seconds
        self._failed = 0  # commits in a row
        self._retry_at = 0.0
        self._tried: frozenset[str] = frozenset()  # requests that the last commit, which failed, was to answer
        self._spoiled = 0  # of them, the last ones that failed since weights are not finite
        self._message = ""
        self._cancel = CancelToken()
        self._flight: _Flight | None = None
        self._broken_off = False
        self._troubles: dict[str, str] = {}  # the last message of each tier's failure
        self._beside: _Flight | None = None
        self._due: dict[str, Tier] = {}
        self._urgent = False
        self._apart: set[str] = set()

    @property
    def has_folder(self) -> bool:
        """Whether commits can be made at all."""
        return self._engine is not None

    @property
    def busy(self) -> bool:
        """Whether a commit is on its way."""
        return self._flight is not None

    def begin(self, *, coordinator: bool, cancel: CancelToken) -> None:
        """A world has lined up."""
        self._coordinator, self._cancel = coordinator, cancel
        self._beside, self._due = None, {}
        self._lineage.failures = self._lineage.failures.told(self._agent.books)
        self._entered = time.monotonic()
        self._choose()

    @property
    def failures(self) -> Failures:
        """What the job has lived through until now."""
        return self._lineage.failures.later(time.monotonic() - self._entered)

    def due_at(self, step: int) -> bool:
        """Whether every rank commits this step without being asked."""
        return self.has_folder and self._interval.due_at(step)

    def overdue(self) -> bool:
        """Whether this rank asks the others for a commit: somebody asked, it is time, says the coordinator, a lost
        peer broke the last one off, or it failed and is to be tried again.

        Not while one is on its way, to the node's disk neither. One that has ended is taken note of here, before each
        step's vote.
        """
        if not self.has_folder:
            return bool(self._agent.requests().checkpoint)
        flight = self._flight
        if (flight is not None and not flight.saving.ended) or self._writes_beside():
            return False
        if flight is not None:
            self._land(flight)
            if flight.saving.lost:
                raise PeerLostError(flight.saving.lost)
        asked = self._agent.requests().checkpoint  # not earlier: the save that has just ended may have answered it
        again = self._failed > 0 and time.monotonic() >= self._retry_at
        return again or not self._tried.issuperset(asked) or self._timed() or self._broken_off

    def hurry(self) -> None:
        """Somebody waits for a commit: neither the one on its way nor the next is held up by a limit of bandwidth."""
        self._urgent = True
        if self._engine is not None:
            self._engine.hurry()

    def behind(self, step: int) -> bool:
        """Whether the last step is not durable yet."""
        return self.has_folder and self._lineage.saved_step != step

    def commit(
        self, step: int, snapshot: Callable[[], Snapshot], *, spare: bool = False, onward: bool = False
    ) -> None:
        """Begin a commit, once the last one has ended.

        `spare`: no older one goes for it. `onward`: another step of this attempt follows, so that it answers nobody
        who wants the attempt's end: whoever hears of a commit then may take the machine away.
        """
        started = time.monotonic()
        self.settle()
        wanted = self._agent.requests()
        last = () if onward else wanted.quiesce
        ids = [*([INTERVAL_ID] if self.due_at(step) or self._timed() else []), *wanted.checkpoint, *last]
        if self._engine is None:
            none = "the job has no checkpoint folder"
            self._tell(step, SaveResult(committed=False, message=none, cause=FailureCause.NO_FOLDER), ids, 0.0)
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))
            return
        self._broken_off = True  # until all have made it
        taken, cancel = snapshot(), self._cancel
        waited = time.monotonic() - started

        def ended(result: SaveResult) -> None:
            """On the save's thread: whoever asked hears it at once, and not from a rank in another attempt."""
            if not cancel.is_set():
                self._tell(step, result, ids, time.monotonic() - started)
            if result.committed and self._coordinator:
                _say(step, result, waited + result.stalled)
                self._say_apart(result.apart)

        saving = self._engine.begin(taken, ended, spare=spare, urgent=self._urgent)
        self._urgent = False
        self._flight = _Flight(step=step, asked=wanted.checkpoint, saving=saving, waited=waited)
        self._saved_at = time.monotonic()

    def settle(self) -> None:
        """Wait for the commit that is on its way, as all ranks do at the same step; whether it succeeded is in
        `behind`. PeerLostError if the attempt ends before; CheckpointError if weights stay not finite.
        """
        flight = self._flight
        if flight is not None:
            began = time.monotonic()
            flight.saving.settle(lambda: self._cancel.check_since(began))
            self._land(flight)
            if flight.saving.lost:
                raise PeerLostError(flight.saving.lost)
        if self._spoiled >= _SPOILED_SAVES:
            spoiled, self._spoiled = self._spoiled, 0  # whoever mends the weights after all may save again
            raise CheckpointError(f"{spoiled} checkpoints in a row could not be written ({self._message}): {_FREEZE}")

    def await_retry(self, most: float) -> bool:
        """Wait until a commit that failed is to be tried again, for `most` seconds at most; whether it is time.

        PeerLostError if the attempt ends before.
        """
        until = min(self._retry_at, time.monotonic() + most)
        while (left := until - time.monotonic()) > 0:
            self._cancel.check()
            time.sleep(min(left, _SLICE))
        return time.monotonic() >= self._retry_at

    def leave(self) -> None:
        """The attempt is over: what has not ended is given up (see `checkpoint.saving`), and asked for anew."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.saving.ended:
            self._land(flight)
        self._lineage.failures, self._entered = self.failures, time.monotonic()

    def due_now(self, step: int, *, asked: bool) -> list[Tier]:
        """The tiers on which every rank saves this step before it goes on; `asked`: a worker must leave, so all."""
        return [tier for tier in self._tiers if not tier.in_background and (asked or tier.due_at(step))]

    def commit_now(self, tier: Tier, step: int, snapshot: Callable[[], Snapshot], *, asked: bool = False) -> None:
        """Save on a tier before training goes on. What fails is told; the save before it is still there.

        `asked`: to other nodes as well, due or not. NoRoomError if there is no room for the first save, and none was
        asked for: training would go on without what it was told to keep.
        """
        if self._engine is None:
            return
        started = time.monotonic()
        result = self._engine.save_on(tier, snapshot(), asked=asked)
        if result.full and not asked:
            raise NoRoomError(result.message)
        if result.committed or result.message != self._troubles.get(tier.name):  # the same each step is told once
            name = PEER_TIER if result.copy_failed else tier.name
            self._tell(step, result, (), time.monotonic() - started, tier=name)
            if not result.committed:
                _log.error(_NOT_ON_TIER, step, tier.name, result.cause, result.message)
        self._troubles[tier.name] = result.message

    def writes(self) -> bool:
        """Whether a commit of this rank is on its way, to whichever tier."""
        return (self._flight is not None and not self._flight.saving.ended) or self._writes_beside()

    def due_beside(self, step: int, *, busy: bool) -> Tier | None:
        """The tier on which every rank is to begin a save in the background; none while any of them is `busy`."""
        for tier in self._tiers:
            if tier.in_background and tier.due_at(step):
                self._due[tier.name] = tier
        return None if busy else next(iter(self._due.values()), None)

    def commit_beside(self, tier: Tier, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Begin a save on a tier. What fails is told, and training goes on, unless not even the first one fits:
        NoRoomError, on all ranks at the same step."""
        before, self._beside = self._beside, None
        self._due.pop(tier.name, None)
        if before is not None and not before.saving.lost and before.saving.result.full:
            raise NoRoomError(before.saving.result.message)
        if self._engine is None:
            return
        started, cancel, taken = time.monotonic(), self._cancel, snapshot()

        def ended(result: SaveResult) -> None:
            """On the save's thread."""
            if not cancel.is_set():
                self._tell(step, result, (), time.monotonic() - started, tier=tier.name)
            if self._coordinator and result.committed:
                _log.info(_ON_TIER, step, tier.name, result.stalled, result.nbytes / 1e6, result.seconds)
            elif self._coordinator:
                _log.warning(_NOT_ON_TIER, step, tier.name, result.cause, result.message)

        saving = self._engine.begin_on(tier, taken, ended)
        self._beside = _Flight(step=step, asked=(), saving=saving, waited=0.0)

    @property
    def _tiers(self) -> tuple[Tier, ...]:
        return () if self._engine is None else self._engine.tiers

    def _writes_beside(self) -> bool:
        return self._beside is not None and not self._beside.saving.ended

    def put_off(self) -> None:
        """Ask for a commit with the next step, as after one that was broken off."""
        self._broken_off = True

    def answer_rest(self, step: int) -> None:
        """What was asked after the last commit is answered by it, since no step was made since."""
        wanted = self._agent.requests()
        if self.has_folder and (ids := (*wanted.checkpoint, *wanted.quiesce)):
            self._tell(step, SaveResult(committed=True), ids, 0.0)
            self._agent.answered(Requests(checkpoint=wanted.checkpoint))

    def _timed(self) -> bool:
        """The coordinator's clock alone says so; the others hear it with the step's vote."""
        return self._coordinator and self._every is not None and time.monotonic() - self._saved_at >= self._every

    def _choose(self) -> None:
        """By what the last commits cost and how often the job fails."""
        if not self._interval.auto:
            return
        choice = self._cadence.choose(self.failures.mtbf)
        self._every = choice.seconds
        if choice.news and self._coordinator:
            _log.info("a commit is due every %.0f s: %s", choice.seconds, choice.reason)

    def _land(self, flight: _Flight) -> None:
        """Take note of how a commit ended."""
        self._flight = None
        if flight.saving.lost:
            return  # and is still broken off
        result, self._broken_off = flight.saving.result, False
        if result.committed:
            self._lineage.saved_step = flight.step
            self._failed, self._spoiled, self._retry_at, self._tried = 0, 0, 0.0, frozenset()
            self._agent.answered(Requests(checkpoint=flight.asked))
            self._cadence.took(stall=flight.waited + result.stalled, write=result.seconds)
            self._choose()
        else:
            self._tried = frozenset(flight.asked)
            self._count_failed(flight.step, result)

    def _tell(
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

    def _say_apart(self, apart: Mapping[str, Sequence[int]]) -> None:
        """Of each object once: what is wrong with it is wrong in each commit."""
        for name in sorted(apart.keys() - self._apart):
            self._apart.add(name)
            _log.error(_UNLIKE, name, ", ".join(map(str, apart[name])))

    def _count_failed(self, step: int, result: SaveResult) -> None:
        self._failed += 1
        self._retry_at = time.monotonic() + retry_after(self._failed)
        self._message = result.message
        self._spoiled = self._spoiled + 1 if result.cause == FailureCause.NON_FINITE else 0
        if self._spoiled >= _SPOILED_SAVES:
            return  # it ends the script, and says so there
        mend = _FREEZE if self._spoiled else _MAKE_ROOM
        _log.error(_FAILED, step, result.cause, self._failed, result.message, self._lineage.saved_step, mend)


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A commit on its way, and which requests it answers."""

    step: int
    asked: tuple[str, ...]
    saving: Saving
    waited: float


def _copying(result: SaveResult) -> dict[str, float]:
    """Of a commit that went to another node, how long that took of it."""
    return {"copying": round(result.copying, 6)} if result.copying else {}


def _say(step: int, result: SaveResult, stalled: float) -> None:
    """The one line of a commit."""
    rate = result.nbytes / result.seconds / 1e9 if result.seconds else 0.0
    _log.info(
        "step %d is durable: training stood still for %.3f s, rank 0 wrote %.1f MB in %.3f s (%.2f GB/s)",
        step,
        stalled,
        result.nbytes / 1e6,
        result.seconds,
        rate,
    )
