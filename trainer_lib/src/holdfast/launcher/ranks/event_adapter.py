"""Connects the local ranks with the state machine: their messages and exits become events, and actions reach them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import DocumentError
from holdfast.core.protocol import MEMORY_TIER, PEER_TIER, SHARED_TIER, Cause, RankPhase
from holdfast.launcher.accounting.event_recorder import EventRecorder
from holdfast.launcher.drain.last_checkpoint_plan import Speed
from holdfast.launcher.drain.touch_file import TouchFile
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.events import (
    Entered,
    ForeignClaims,
    Holds,
    LocalDone,
    Prepared,
    Quiesced,
    RankFailed,
    RanksEnded,
    Saves,
    StepMade,
)
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.messages import Failure, Master, Priority, World
from holdfast.launcher.ranks import exit_cause
from holdfast.launcher.ranks.exit_cause import FailureContext, RankEnd
from holdfast.launcher.ranks.progress import SLOW, Progress, Wish, origin, set_aside, slow_rank, smoothed
from holdfast.launcher.ranks.rank_process import Rank
from holdfast.launcher.ranks.rank_socket import RankMessage
from holdfast.launcher.ranks.supervisor import Supervisor
from holdfast.launcher.status.status_document import Identity
from holdfast.launcher.tiers.node_tiers import NodeTiers
from holdfast.launcher.tiers.upload_client import Uploads

_log = logging.getLogger("holdfast.launcher.local")
# A script that has not sent `hello` by then has no Holdfast loop. It receives signals instead of messages.
_PLAIN_AFTER_SECONDS = 20.0


class LocalRanks:
    """Mediates between the supervisor and the rank socket on one side and the state machine on the other."""

    def __init__(
        self,
        pump: EventPump,
        identity: Identity,
        touch: TouchFile,
        *,
        recorder: EventRecorder,
        uploads: Uploads,
        tiers: NodeTiers,
    ) -> None:
        self._feed = pump.feed
        self._now = pump.now
        self._identity = identity
        self._touch = touch
        self._recorder = recorder
        self._tiers = tiers
        self._committed = uploads.commit
        self._restored: int | None = None  # the step from which the attempt continues
        self._origin = ""
        self._untold: int | None = None  # a step of the attempt that is not fed to the state machine yet
        self._reported: set[int] = set()  # slots whose failure in this attempt is reported
        self._quiesced = False
        self._stopping = False
        self._prepared = True
        self._held: HeldShards | None = None  # as last fed to the state machine
        self._saving = False  # as last fed to the state machine
        self._may_stand_by = True
        self._wishes: list[Wish] = []
        self._unanswered: dict[str, float] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._membership: Membership | None = None
        self._trained: AttemptId | None = None
        self._world: World | None = None
        self.progress = Progress()
        self.speeds = {tier: Speed() for tier in (MEMORY_TIER, PEER_TIER, SHARED_TIER)}
        self.supervisor: Supervisor

    def start(self, world: World, master: Master, membership: Membership, trained: AttemptId | None) -> None:
        """Start this launcher's ranks of a world; `trained` is the highest attempt that had ranks here before."""
        self._restored, self._origin, self._untold = None, "", None
        self._reported = set()
        self._quiesced = self._stopping = False
        self._may_stand_by = True
        self._wishes = []
        self._cancel_timers()
        self._membership, self._trained, self._world = membership, trained, world
        self.progress.slow_ranks = []
        self.supervisor.start(world, master, membership)
        if not self.supervisor.uses_holdfast:
            wait = min(_PLAIN_AFTER_SECONDS, membership.rules.startup_deadline / 2)
            self._later(wait, lambda: self._enter_plain(world.attempt_id))
        self.tell_prepared()

    def await_standbys(self) -> None:
        """Announce standby processes. Until they are ready, this launcher is not prepared."""
        self._prepared = False
        self._feed(Prepared(prepared=False))

    def stand_by(self, membership: Membership) -> None:
        """Start standby processes, since no world is expected soon."""
        if self._may_stand_by:
            self.supervisor.stand_by(membership)
        self.tell_prepared()

    def tell_prepared(self) -> None:
        """Report to the state machine whether this launcher's ranks could enter a world at once."""
        prepared = all(rank.ready for rank in self.supervisor.standbys)
        if prepared is not self._prepared:
            self._prepared = prepared
            self._feed(Prepared(prepared=prepared))

    def stop(self, attempt_id: AttemptId, reason: str, grace: float) -> None:
        """Prevent local ranks from voting in attempts up to this one."""
        self._stopping = True
        self.supervisor.stop(attempt_id, reason, grace)

    def hung(self, slot: int, message: str, cause: Cause = Cause.INFRASTRUCTURE, *, kill: bool = True) -> None:
        """Process a hang verdict.

        With `kill`, the process is killed because of its own activity. Its attempt ends. If it is in no attempt, it
        is only removed, and the next world gets a new process.
        """
        rank = self.supervisor.rank(slot)
        if rank is None or not rank.alive:
            return
        if rank.parked:
            _log.warning("%s", message)
            self.supervisor.dismiss(rank)
            return
        if kill:
            self.supervisor.kill(rank)  # at once: its end takes a while, and the next attempt waits for it
        self._fail(rank, exit_cause.hung(rank.number, message, self._place(), cause=cause, step=rank.step))

    def quiesce(self, attempt_id: AttemptId, wish_id: str, reason: str, *, commit: bool, node_local: bool) -> None:
        """Request an agreed end of the attempt; a script without Holdfast's loop gets SIGTERM.

        `node_local`: the checkpoint is also written to memory and copied to other nodes, due there or not.
        """
        self._wish(
            Wish(
                type="quiesce", attempt_id=attempt_id, id=wish_id, reason=reason, commit=commit, node_local=node_local
            )
        )
        if not self.supervisor.uses_holdfast and self.supervisor.ranks:
            age = asyncio.get_running_loop().time() - self.supervisor.ranks[0].started_at
            self._later(max(0.0, _PLAIN_AFTER_SECONDS - age), lambda: self._terminate_plain(attempt_id))
        self._check_quiesced(attempt_id)

    def checkpoint(self, attempt_id: AttemptId, wish_id: str, reason: str) -> None:
        """Request an agreed checkpoint."""
        self._wish(Wish(type="checkpoint", attempt_id=attempt_id, id=wish_id, reason=reason))

    def expect_answer(self, request_id: str) -> None:
        """Note that the writer of the touch file expects an acknowledgement."""
        self._unanswered[request_id] = self._now()

    def give_up_answers(self) -> None:
        """Acknowledge every open request as not answered by a checkpoint."""
        for request_id in list(self._unanswered):
            self._answer([request_id], {"step": self.progress.committed_step or 0, "result": "Failed"})

    def heard(self, message: RankMessage) -> None:
        """Process a message of a rank process. Messages of other attempts are dropped."""
        try:
            self._recorder.heard(message.connection.pid, message.type, message.body)
            rank = self.supervisor.handle(message)
            if rank is not None:
                self._react(rank, message)
        except (KeyError, TypeError, ValueError, DocumentError) as error:
            _log.warning("%s cannot be read: %r", message, error)

    def _react(self, rank: Rank, message: RankMessage) -> None:
        if message.type in ("standby", "ready"):
            self.tell_prepared()
        elif message.attempt_id is not None and message.attempt_id == rank.attempt_id:  # a `left` may have changed it
            self._react_in(message.attempt_id, rank, message)
            self._tell_saving()

    def _react_in(self, attempt_id: AttemptId, rank: Rank, message: RankMessage) -> None:
        body = message.body
        match message.type:
            case "hello":
                self._greet(rank)
            case "restored":
                self._restored, self._origin = int(body["step"]), origin(body)
                self.progress.tallies.restored(attempt_id, body)
                self.progress.quarantined = [set_aside(bad, body) for bad in body["quarantined"]]
                self._tell_step(attempt_id)
                self._tell_held()
            case "claim":
                claim = Claim.from_json(body["claim"])
                self.progress.claims[claim.attempt_id] = claim
            case "foreignClaims":
                self._feed(ForeignClaims(attempt_id=attempt_id, claims=tuple(map(Claim.from_json, body["claims"]))))
            case "step":
                self._stepped(attempt_id, body)
            case "checkpoint":
                self._saved(attempt_id, rank, body)
            case "peerLost":
                text = str(body["message"])
                self._fail(rank, exit_cause.peer_lost(rank.number, text, self._place(), step=rank.step))
            case "skipped" | "rolledBack" | "badSamples" | "spike" | "outOfMemory":
                self._guarded(rank, message)
            case "exception":
                self.progress.memory_record = body.get("outOfMemory", self.progress.memory_record)
                self._fail(
                    rank,
                    exit_cause.raised(rank.number, rank.exception, rank.traceback, self._place(), step=rank.step),
                )
            case "left":
                self._left(rank)
            case "quiesced" | "done":
                self._check_quiesced(attempt_id)
            case _:
                self._note(rank, message)

    def _note(self, rank: Rank, message: RankMessage) -> None:
        """Record what only the status shows."""
        match message.type:
            case "diverged":
                self.progress.count_divergence(rank.number, message.body, self._now())
            case "slowRanks":
                self._note_slow(rank, message.body)

    def _guarded(self, rank: Rank, message: RankMessage) -> None:
        kind, body = message.type, message.body
        if rank.local_rank == 0 or kind == "outOfMemory":
            self.progress.count_guarded(kind, body)
        if kind in exit_cause.REPEATS:
            text = str(body["message"])
            self._fail(rank, exit_cause.repeated(kind, rank.number, text, self._place(), step=rank.step))

    def _durable(self, membership: Membership) -> int:
        """Return the step of the newest checkpoint on the volume, as the operator and the local ranks reported it."""
        own = self.progress.checkpoints.get(SHARED_TIER, {}).get("step", 0)
        return max(int(own), int(membership.document.get("durableStep") or 0))

    def _greet(self, rank: Rank) -> None:
        membership = self._membership
        if membership is None or rank.attempt_id is None:
            return
        claims = {claim.attempt_id: claim for claim in membership.claims} | self.progress.claims
        welcome = {
            "type": "welcome",
            **rank.attempt_id.to_json(),
            "claims": [claims[attempt_id].to_json() for attempt_id in sorted(claims)],
            "settings": membership.document.get("settings", {}),
            "reached": self._recorder.accounts.highest,
            "durable": self._durable(membership),
            "trained": None if self._trained is None else self._trained.to_json(),
            "books": self._recorder.accounts.failure_counters.to_json(),
            "outOfMemory": self.progress.memory_record,
            "tiers": self._tiers.describe(),
        }
        rank.send(welcome)
        for wish in self._wishes:
            if wish.attempt_id == rank.attempt_id:
                rank.send(wish.to_json())
        if all(other.greeted for other in self.supervisor.ranks):
            self._feed(Entered(attempt_id=rank.attempt_id))

    def _stepped(self, attempt_id: AttemptId, body: Mapping[str, Any]) -> None:
        step = int(body["step"])
        seconds = float(body["seconds"])
        loss = float(body["loss"])
        norm = body.get("gradNorm")
        self.progress.loss = loss if math.isfinite(loss) else None
        self.progress.gradient_norm = None if norm is None else float(norm)
        if seconds > 0:
            rate = float(body["samples"]) / seconds
            self.progress.throughput = smoothed(self.progress.throughput, rate)
            self.progress.step_seconds = smoothed(self.progress.step_seconds, seconds)
        if step != self.progress.committed_step:
            self.progress.committed_step, self.progress.committed_at = step, self._now()
            self._untold = step
            self._tell_step(attempt_id)

    def _note_slow(self, rank: Rank, body: Mapping[str, Any]) -> None:
        if self._world is None or rank.place is None:
            return
        processes, before = rank.place.local_world_size, {one["rank"] for one in self.progress.slow_ranks}
        self.progress.slow_ranks = [slow_rank(one, self._world, processes) for one in body["ranks"]]
        for one in self.progress.slow_ranks:
            if one["rank"] not in before:
                _log.warning("%s", SLOW.format(**one), extra={"fields": one})
        if not self.progress.slow_ranks:
            _log.info("no rank is slow any more")

    def _tell_step(self, attempt_id: AttemptId) -> None:
        """Feed the step once `restored` has arrived: a prepared step may be applied before."""
        if self._untold is not None and self._restored is not None:
            made, self._untold = self._untold, None
            self._feed(StepMade(attempt_id=attempt_id, step=made, restored=self._restored, origin=self._origin))

    def _tell_held(self) -> None:
        held = self.supervisor.held
        if held != self._held:
            self._held = held
            self._feed(Holds(held=held))

    def _tell_saving(self) -> None:
        saving = any(rank.alive and rank.phase == RankPhase.CHECKPOINT for rank in self.supervisor.ranks)
        if saving != self._saving:
            self._saving = saving
            self._feed(Saves(saving=saving))

    def _saved(self, attempt_id: AttemptId, rank: Rank, body: Mapping[str, Any]) -> None:
        if body["result"] == "Committed":
            self.progress.checkpoints[str(body["tier"])] = {
                "step": int(body["step"]),
                **attempt_id.to_json(),
                "time": self._now(),
            }
            self.progress.tallies.committed(attempt_id, body)
            self._measure(body)
            if rank.number == 0 and body["tier"] == SHARED_TIER:
                self._committed(CheckpointName(step=int(body["step"]), attempt_id=attempt_id))
        else:
            self._say_failed(attempt_id, body)
        self._answer(body["ids"], body)

    def _say_failed(self, attempt_id: AttemptId, body: Mapping[str, Any]) -> None:
        """Log a failed checkpoint once for all ranks."""
        cause = self.progress.tallies.failed(attempt_id, body, self._now())
        if cause:
            fields = {"step": body["step"], "tier": body["tier"], "cause": cause}
            said = "the checkpoint of step %s on the %s tier failed (%s): %s"
            _log.error(said, body["step"], body["tier"], cause, body["message"], extra={"fields": fields})

    def _measure(self, body: Mapping[str, Any]) -> None:
        """Record the duration of a checkpoint. One in memory includes the copy to another node."""
        nbytes, copying = int(body.get("bytes", 0)), float(body.get("copying", 0.0))
        if body["tier"] in self.speeds:
            self.speeds[body["tier"]].took(nbytes, float(body["seconds"]) - copying)
        self.speeds[PEER_TIER].took(nbytes, copying)

    def _answer(self, ids: Iterable[str], body: Mapping[str, Any]) -> None:
        for request_id in ids:
            requested_at = self._unanswered.pop(request_id, None)
            if requested_at is not None:
                self._touch.acknowledge(
                    request_id=request_id,
                    step=int(body["step"]),
                    tier=str(body.get("tier", "")),
                    result=str(body["result"]),
                    seconds=round(self._now() - requested_at, 3),
                )

    def rank_ended(self, rank: Rank, end: RankEnd) -> None:
        """Judge the end of a process that was in an attempt."""
        attempt_id, failure = rank.attempt_id, exit_cause.judge(end, self._place())
        if attempt_id is not None and failure is not None and failure.priority is Priority.OOM:
            self._tell(rank, attempt_id, failure)  # even if that attempt is over: its incident may lack the cause
            return
        if attempt_id is None or attempt_id != self.supervisor.attempt_id:
            return
        if failure is not None:
            if rank.slot not in self._reported or failure.priority < Priority.EXCEPTION:
                self._tell(rank, attempt_id, failure)
            return
        self._check_quiesced(attempt_id)
        if end.ended_well and all(other.ended_well for other in self.supervisor.ranks):
            self._feed(LocalDone(attempt_id=attempt_id))

    def process_ended(self, pid: int, *, killed: bool) -> None:
        """A process ended, whatever its state was."""
        self._recorder.ended(pid, hung=killed)
        self._tell_held()
        self._tell_saving()

    def standby_ended(self) -> None:
        """A standby process ended. Another one starts, and is judged, when there is a world."""
        _log.warning("a standby process ended; another one starts when a world needs it")
        self._may_stand_by = False
        self.tell_prepared()

    def cannot_start(self, attempt_id: AttemptId, program: str, message: str) -> None:
        """Report that the command cannot be started."""
        self._feed(RankFailed(attempt_id=attempt_id, failure=exit_cause.not_started(program, message, self._place())))

    def all_ended(self, attempt_id: AttemptId) -> None:
        """No process of this attempt or a lower one can vote any more."""
        self._cancel_timers()
        self._feed(RanksEnded(attempt_id=attempt_id))

    def _wish(self, wish: Wish) -> None:
        self._wishes.append(wish)
        for rank in self.supervisor.ranks:
            if rank.greeted and rank.attempt_id == wish.attempt_id:
                rank.send(wish.to_json())

    def _left(self, rank: Rank) -> None:
        """A rank left by itself. This ends its attempt, unless the end was agreed."""
        if not self._stopping and not rank.quiesced:
            text = "it left the attempt without a request"
            self._fail(rank, exit_cause.peer_lost(rank.number, text, self._place(), step=rank.step))

    def _fail(self, rank: Rank, failure: Failure) -> None:
        if rank.slot not in self._reported and rank.attempt_id is not None:
            self._tell(rank, rank.attempt_id, failure)

    def _tell(self, rank: Rank, attempt_id: AttemptId, failure: Failure) -> None:
        self._reported.add(rank.slot)
        fields = {"cause": failure.cause, "reason": failure.reason, "rank": rank.number}
        _log.warning("%s", failure.message, extra={"fields": fields})
        self._feed(RankFailed(attempt_id=attempt_id, failure=failure))

    def _check_quiesced(self, attempt_id: AttemptId) -> None:
        """Feed `Quiesced` if all ranks made their last step. The request may come from another launcher."""
        ranks = self.supervisor.ranks
        requested = any(wish.type == "quiesce" and wish.attempt_id == attempt_id for wish in self._wishes)
        begun = requested or any(rank.quiesced for rank in ranks)
        if self._quiesced or self.supervisor.attempt_id != attempt_id or not begun:
            return
        if all(rank.quiesced or rank.done or rank.ended for rank in ranks):
            self._quiesced = True
            self._feed(Quiesced(attempt_id=attempt_id))

    def _terminate_plain(self, attempt_id: AttemptId) -> None:
        if self.supervisor.attempt_id == attempt_id and not self.supervisor.uses_holdfast:
            _log.info("the script has no Holdfast loop; SIGTERM ends it")
            self.supervisor.terminate(self.supervisor.ranks)

    def _enter_plain(self, attempt_id: AttemptId) -> None:
        ranks = self.supervisor.ranks
        if self.supervisor.attempt_id == attempt_id and ranks and not any(rank.greeted for rank in ranks):
            self._feed(Entered(attempt_id=attempt_id))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _place(self) -> FailureContext:
        return FailureContext(pod=self._identity.pod, node=self._identity.node, at=self._now())
