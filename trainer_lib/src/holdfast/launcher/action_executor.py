"""Carries out the actions that the state machine decides."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.core.attempt import AttemptId
from holdfast.core.errors import StoreError
from holdfast.launcher.drain.last_checkpoint import LastCheckpoint
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.hang.monitor import HangWatch
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.membership import events as e
from holdfast.launcher.membership import messages
from holdfast.launcher.peer_links import PeerLinks
from holdfast.launcher.ranks.event_adapter import LocalRanks

_log = logging.getLogger("holdfast.launcher")
_PLAIN_GRACE_SECONDS = 2.0


class ActionExecutor:
    def __init__(
        self,
        pump: EventPump,
        *,
        finish: Callable[[Ending], None],
        host: str,
        peers: PeerLinks,
        local: LocalRanks,
        hangs: HangWatch,
        last_checkpoint: LastCheckpoint,
    ) -> None:
        self._pump = pump
        self._finish = finish
        self._host = host
        self._control = peers.control
        self._store = peers.store
        self._local = local
        self._supervisor = local.supervisor
        self._hangs = hangs
        self._last_checkpoint = last_checkpoint

    def execute(self, action: e.Action) -> None:
        """Carry out an action. Its results come back as events."""
        match action:
            case e.Send(to=to, message=message):
                self._control.send(to, messages.to_json(message))
            case e.OpenStore(attempt_id=attempt_id, beside=beside):
                self._open_store(attempt_id, beside)
            case e.StartRanks(world=world, master=master, trained=trained):
                self._start_ranks(world, master, trained)
            case e.StopRanks(attempt_id=attempt_id, reason=reason, grace=grace):
                self._local.stop(attempt_id, reason, self.grace(grace))
            case e.QuiesceRanks(attempt_id=attempt_id, id=wish, reason=reason, commit=commit):
                self._local.quiesce(
                    attempt_id,
                    wish,
                    reason,
                    commit=commit,
                    node_local=commit and self._last_checkpoint.copies_to_peer,
                )
            case e.RequestCheckpoint(attempt_id=attempt_id, id=wish, reason=reason):
                self._local.checkpoint(attempt_id, wish, reason)
            case e.KeepStacks(attempt_id=attempt_id, message=message):
                self._hangs.save_stacks(attempt_id, self._supervisor.ranks, message)
            case e.Note(phase=phase, message=text):
                _log.info("%s", text, extra={"fields": {"phase": phase}})
            case e.Exit():
                self._finish(_ending(action))

    def _open_store(self, attempt_id: AttemptId, beside: AttemptId | None) -> None:
        try:
            master = self._store.open(attempt_id, self._host, beside=beside)
        except StoreError as error:
            self._pump.feed(e.StoreFailed(attempt_id=attempt_id, message=str(error)))
            return
        self._pump.feed(e.StoreOpened(attempt_id=attempt_id, master=master))

    def _start_ranks(self, world: messages.World, master: messages.Master, trained: AttemptId | None) -> None:
        membership = self._pump.state.membership
        if membership is not None:
            self._local.start(world, master, membership, trained)

    def grace(self, wanted: float) -> float:
        """Return the grace period. Only a script without Holdfast's loop needs one: it may handle SIGTERM itself."""
        if self._supervisor.uses_holdfast:
            return wanted
        drain = self._pump.state.drain
        return max(wanted, _PLAIN_GRACE_SECONDS if drain is None else drain.until - self._pump.now())


def _ending(action: e.Exit) -> Ending:
    return Ending(
        code=action.code,
        cause=str(action.cause or ""),
        reason=action.reason,
        message=action.message,
        traceback=action.traceback,
        final=action.final,
    )
