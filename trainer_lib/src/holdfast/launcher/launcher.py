"""The shell around the core: what happens becomes events, what the core decides is done. One event loop.

Nothing here decides who may train; `core.step` does. This module owns the moving parts and their order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError
from holdfast.core.log_format import LogContext
from holdfast.core.protocol import Cause, ExitCode
from holdfast.core.tier_names import OBJECT_TIER
from holdfast.launcher.accounting.event_recorder import EventRecorder
from holdfast.launcher.accounting.timeline import Timeline
from holdfast.launcher.action_executor import ActionExecutor
from holdfast.launcher.config import LauncherConfig
from holdfast.launcher.drain.last_checkpoint import LastCheckpoint
from holdfast.launcher.drain.requests import LEAST_DRAIN_SECONDS, Requests
from holdfast.launcher.drain.touch_file import TouchFile
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.hang.detectors.observation import HangSettings
from holdfast.launcher.hang.monitor import HangWatch
from holdfast.launcher.hang.rank_watch import RankWatch
from holdfast.launcher.host import termination_log as termination
from holdfast.launcher.host.membership_file import MembershipFile
from holdfast.launcher.host.run_dir import AGENT_SOCKET_FILE, TIMELINE_FILE, clean
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.membership import events as e
from holdfast.launcher.membership import messages, state_machine
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.messages import Failure, Priority
from holdfast.launcher.membership.state import State
from holdfast.launcher.network.control_channel import Address, ControlChannel
from holdfast.launcher.network.tcp_store import StoreHost
from holdfast.launcher.process import script_imports
from holdfast.launcher.process.child import Reaper, is_child
from holdfast.launcher.process.spawn_pool import Pool
from holdfast.launcher.ranks.event_adapter import LocalRanks
from holdfast.launcher.ranks.rank_socket import AgentSocket, RankMessage
from holdfast.launcher.ranks.supervisor import Supervisor
from holdfast.launcher.status import status_document
from holdfast.launcher.status.recovered_state import remembered
from holdfast.launcher.status.status_file import StatusFile
from holdfast.launcher.tiers.upload_client import Uploads

if TYPE_CHECKING:
    from holdfast.launcher.tiers.local_disk_tier import LocalHost
    from holdfast.launcher.tiers.memory_tier import MemoryHost

_log = logging.getLogger("holdfast.launcher")
_TICK_SECONDS = 0.1
_TICKS_ALIVE = 5
_TICKS_REFILL = 50
_LEAVE_SECONDS = 5.0
# Who coordinates now, and who would if that one were lost.
_WARM_STORES = 2
# Without a world for so long, the script is started to stand by.
_IDLE_SECONDS = 0.5
# Nobody presses a launcher whose job is over: so long its last upload may take.
_UPLOAD_SECONDS = 3600.0
_UPLOAD_MARGIN_SECONDS = 2.0


class Launcher:
    """One launcher."""

    def __init__(self, config: LauncherConfig, context: LogContext) -> None:
        argv = config.command.argv
        self._config = config
        self._context = context
        self._me = config.identity.pod_uid
        self._origin = time.time() - time.monotonic()
        self._key: bytes | None = None
        self._configured: tuple[object, ...] = ()
        self._ending: Ending | None = None
        self._exit: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._signals = 0
        self._strangers = 0
        self._terminated_at: float | None = None
        self._stands_by = config.stand_by and script_imports.speaks(argv) and not script_imports.reads_place(argv)
        self._idle_since: float | None = None
        self.listening = asyncio.Event()
        self._touch = TouchFile(config.run_dir)
        timeline = Timeline(config.timeline or config.run_dir / TIMELINE_FILE, self.now)
        self._chronicle = EventRecorder(time.monotonic, timeline)
        self._uploads = Uploads(config.upload, config.checkpoint_dir, self._uploaded)
        self._socket = AgentSocket(config.run_dir / AGENT_SOCKET_FILE, self._heard)
        self._local = LocalRanks(
            feed=self.feed,
            now=self.now,
            place=(config.identity.pod, config.identity.node),
            touch=self._touch,
            chronicle=self._chronicle,
            committed=self._uploads.commit,
        )
        self._pool = Pool(argv=argv, warm=config.command.warm)
        self._supervisor = Supervisor(
            command=config.command, run_dir=config.run_dir, me=self._me, listener=self._local, spawner=self._pool
        )
        self._local.supervisor = self._supervisor
        self._memory = _memory_host(config)
        if self._memory is not None:
            self._local.memory = self._memory.describe
        self._disk = _local_host(config)
        if self._disk is not None:
            self._local.disk = self._disk.describe
        self._hangs = HangWatch(config.run_dir, self._local.hung, self._hang_found)
        self._control = ControlChannel(me=self._me, listener=self)
        self._store = StoreHost(self._store_lost, on_broken=self.fault)
        self._status = StatusFile(config.run_dir, self._document)
        self._membership = MembershipFile(config.run_dir, self.see_membership)
        self._reaper = Reaper(is_child)
        self._last_checkpoint = LastCheckpoint(
            now=self.now,
            node=config.identity.node,
            local=self._local,
            memory=self._memory,
            uploads=self._uploads,
        )
        self._requests = Requests(
            touch=self._touch,
            local=self._local,
            node=config.identity.node,
            state=lambda: self.state,
            feed=self.feed,
            now=self.now,
        )
        self._rank_watch = RankWatch(
            me=self._me,
            hangs=self._hangs,
            supervisor=self._supervisor,
            control=self._control,
            state=lambda: self.state,
            feed=self.feed,
        )
        self._actions = ActionExecutor(
            state=lambda: self.state,
            feed=self.feed,
            finish=self._finish,
            now=self.now,
            host=config.host,
            control=self._control,
            store=self._store,
            local=self._local,
            supervisor=self._supervisor,
            hangs=self._hangs,
            last_checkpoint=self._last_checkpoint,
        )
        observers = (self._label_log, self._reconnect, self._prepare, self._last_checkpoint.observe)
        self._pump = EventPump(
            remembered(config.run_dir, config.identity),
            self.now,
            observers=(*observers, self._chronicle.follow),
            execute=self._actions.execute,
            show=self._show,
        )

    def now(self) -> float:
        """The core's clock: Unix time that never jumps."""
        return self._origin + time.monotonic()

    @property
    def state(self) -> State:
        """What the core knows."""
        return self._pump.state

    @property
    def control_port(self) -> int:
        """Where the control channel listens."""
        return self._control.port

    def feed(self, event: e.Event) -> None:
        """Let the state machine see an event, and do what it decides."""
        self._pump.feed(event)

    # Life

    async def run(self) -> Ending:
        """Live until the core says how to leave."""
        tasks = [asyncio.create_task(self._guard(work)) for work in await self._start()]
        try:
            ending = await self._exit
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave(ending)
        return ending

    async def _start(self) -> list[Coroutine[Any, Any, None]]:
        clean(self._config.run_dir)
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)
        self._install_signals()
        if self._memory is not None:
            self._memory.start()
        if self._disk is not None:
            self._disk.start()
        self._supervisor.repair_compile_cache()  # a launcher before this one may have been killed with its ranks
        await self._socket.start()
        port = await self._control.start(self._config.host or None, self._config.control_port)
        _log.info("launcher started", extra={"fields": {"control": port, "pid": os.getpid()}})
        self._chronicle.begin(pod=self._config.identity.pod, job=self._context.fields.get("job"))
        if self._stands_by:
            self._local.await_standbys()
        self.feed(e.Ready())
        self.listening.set()
        work = [self._tick(), self._requests.watch()]
        return [*work, self._membership.watch()] if self._config.membership_from_file else work

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A fault of our own ends the launcher with 70: half a launcher is worse than none."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  (logged, and the end of this launcher)
            _log.exception("the launcher cannot go on")
            self.fault(f"{type(error).__name__}: {error}")

    def _callback_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _log.error("the launcher cannot go on: %s", context.get("message"), exc_info=error)
        self.fault(f"{type(error).__name__}: {error}" if error else str(context.get("message")))

    def fault(self, message: str) -> None:
        """Leave with 70."""
        self._finish(
            Ending(
                code=ExitCode.LAUNCHER_FAULT,
                cause=str(Cause.INFRASTRUCTURE),
                reason="LauncherFault",
                message=message,
            )
        )

    async def _tick(self) -> None:
        ticks = 0
        while True:
            self.feed(e.Tick())
            self._reaper.reap()
            self._stand_by()
            self._rank_watch.look()
            if (ticks := ticks + 1) % _TICKS_ALIVE == 0:
                self._status.alive()
            if ticks % _TICKS_REFILL == 0 and self._trains(self.state):
                self._pool.refill()  # for what has died meanwhile
            await asyncio.sleep(_TICK_SECONDS)

    def _hang_found(self, pair: AttemptId, message: str) -> None:
        self.feed(e.HangFound(pair=pair, message=message))

    async def _leave(self, ending: Ending) -> None:
        """End the ranks, say why, close everything. What peers must still hear is sent first."""
        self._ending = ending
        self._chronicle.close(ending.code, ending.reason)
        self._local.give_up_answers()
        if self._config.termination_log is not None:
            termination.write(self._config.termination_log, ending)
        self._status.flush()
        fields = {"code": ending.code, "reason": ending.reason}
        _log.info("launcher leaves: %s", ending.message or ending.reason, extra={"fields": fields})
        self._pool.close()
        await self._supervisor.close(self._actions.grace(0.0))
        await self._control.close()
        await self._socket.close()
        self._store.close()
        await self._uploads.finish(self._upload_seconds, self._status.alive)
        if self._memory is not None:
            self._memory.close(complete=ending.code == ExitCode.COMPLETE)
        if self._disk is not None:
            self._disk.close(complete=ending.code == ExitCode.COMPLETE)
        self._status.flush()

    def _upload_seconds(self) -> float:
        """What is left for the last upload: of the pod's grace period once that runs; nothing if it would be late."""
        if not self._last_checkpoint.uploaded:
            return 0.0
        if self._terminated_at is None:
            return _UPLOAD_SECONDS
        return self._terminated_at + self._config.grace_seconds - _UPLOAD_MARGIN_SECONDS - self.now()

    def _uploaded(self, name: CheckpointName) -> None:
        """It is newer there than what was there before."""
        self._local.progress.checkpoints[OBJECT_TIER] = {"step": name.step, **name.pair.to_json(), "time": self.now()}
        self._status.changed()

    def _finish(self, ending: Ending) -> None:
        if not self._exit.done():
            self._exit.set_result(ending)

    # Signals

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGUSR1, self._checkpoint_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # as PID 1 it waited for this (`__main__`)
        if os.getpid() == 1:
            loop.add_signal_handler(signal.SIGCHLD, self._reaper.reap)

    def _terminated(self) -> None:
        self._terminated_at = self._terminated_at or self.now()
        if self._ending is not None:
            return  # what is left is the last upload, which now has to hurry
        until = self.now() + max(LEAST_DRAIN_SECONDS, self._config.grace_seconds - _LEAVE_SECONDS)
        _log.info("SIGTERM: this worker leaves after an agreed commit")
        self.feed(e.DrainAsked(id="sigterm", reason="SIGTERM", until=until))

    def _interrupted(self) -> None:
        _log.info("SIGINT: stopping")
        self._finish(Ending(code=128 + signal.SIGINT, reason="Interrupted", message="stopped by SIGINT"))

    def _checkpoint_signal(self) -> None:
        self._signals += 1
        self.feed(e.CheckpointAsked(id=f"sigusr1-{self._signals}", reason="SIGUSR1"))

    # What happens

    def _label_log(self, before: State, after: State) -> None:
        if after.world is not before.world:
            pair = after.world.pair if after.world else None
            self._context.update(generation=pair.generation if pair else None, attempt=pair.attempt if pair else None)

    def _reconnect(self, before: State, after: State) -> None:
        if after.membership is not before.membership or after.accepted_world is not before.accepted_world:
            self._connect()

    def _prepare(self, before: State, after: State) -> None:
        """For the next failure. Not before a world has made its first step: that would cost it time."""
        if self._trains(after) and not self._trains(before):
            self._keep_store_warm()
            self._pool.refill()

    def _show(self, before: State, after: State) -> None:
        if _transition(before, after):
            self._status.soon()
        elif before is not after:
            self._status.changed()

    def _trains(self, state: State) -> bool:
        """A script without Holdfast's loop never shows a step."""
        attempt = state.attempt
        if attempt is None:
            return False
        return attempt.step is not None or (attempt.entered and not self._supervisor.speaks_holdfast)

    def _connect(self) -> None:
        membership = self.state.membership
        if membership is None or self._key is None:
            return
        members = state_machine.contacts(self.state)
        self._control.configure(
            key=self._key,
            peers={uid: Address(host=m.host, port=m.control_port) for uid, m in members.items()},
            heartbeat=membership.rules.heartbeat,
            dead_after=membership.rules.dead_after,
        )
        if self.state.attempt is None:
            self._keep_store_warm()

    def _keep_store_warm(self) -> None:
        """Never while a world forms: importing torch would cost it time."""
        known = [self.state.membership, self.state.world]
        first = {member.pod_uid for group in known if group is not None for member in group.members[:_WARM_STORES]}
        if self._me in first:
            self._store.warm()

    def _stand_by(self) -> None:
        """Waiting for a world for longer than a moment: let the script get ready meanwhile."""
        state = self.state
        busy = state.attempt is not None or state.ranks is not None
        if busy or state.membership is None or state.drain is not None or state.leaving is not None:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self.now()
        elif self._stands_by and self.now() >= self._idle_since + _IDLE_SECONDS:
            self._local.stand_by(state.membership)

    def see_membership(self, document: dict[str, Any]) -> None:
        """Take a membership document, from the file or from the endpoint's part of this program."""
        membership = Membership.from_json(document)
        self._hangs.configure(HangSettings.from_settings(document.get("settings", {})))
        self._key = _key(document)
        if self._memory is not None:
            self._memory.admit(self._key)
        if self._disk is not None:
            self._disk.admit(self._key)
        self.feed(e.MembershipSeen(membership=membership))
        self._connect()

    def peer_up(self, uid: str) -> None:
        """The control channel to a peer is open."""
        _log.info("connected to %s", uid)
        self.feed(e.PeerUp(pod_uid=uid))

    def peer_down(self, uid: str, how: e.How) -> None:
        """It is lost."""
        _log.info("lost %s (%s)", uid, how)
        self.feed(e.PeerDown(pod_uid=uid, how=how))

    def peer_said(self, uid: str, body: Mapping[str, Any]) -> None:
        """A peer's message; raises `DocumentError` on one that cannot be read, which closes the channel."""
        self.feed(e.Received(sender=uid, message=messages.from_json(body)))

    def stranger(self) -> None:
        """Somebody was turned away before it had proved that it holds the job's key."""
        self._strangers += 1
        self._status.changed()

    def _heard(self, message: RankMessage) -> None:
        self._local.heard(message)
        self._status.changed()

    def _store_lost(self, pair: AttemptId, message: str) -> None:
        attempt = self.state.attempt
        if attempt is None or attempt.world.pair != pair:
            self.feed(e.StoreFailed(pair=pair, message=message))
            return
        failure = Failure(
            cause=Cause.INFRASTRUCTURE,
            reason="StoreLost",
            message=message,
            priority=Priority.KILLED,
            at=self.now(),
            pod=self._config.identity.pod,
            node=self._config.identity.node,
        )
        self.feed(e.RankFailed(pair=pair, failure=failure))

    # What it shows

    def _document(self) -> dict[str, Any]:
        return status_document.status(
            identity=self._config.identity,
            state=self.state,
            ranks=self._supervisor.ranks,
            progress=self._local.progress,
            control_port=self._control.port,
            store_port=self._config.store_port,
            notices=self._requests.notices,
            ending=self._ending,
            accounting=self._chronicle.document(),
            warm_processes=self._pool.ready,
            uploads=self._uploads.counts.to_json() if self._uploads.wanted else None,
            refused_peers=self._strangers
            + (0 if self._memory is None else self._memory.strangers)
            + (0 if self._disk is None else self._disk.strangers),
        )


def _memory_host(config: LauncherConfig) -> MemoryHost | None:
    if config.memory is None:
        return None
    from holdfast.launcher.tiers import memory_tier  # most launchers have none, and need not load it

    return memory_tier.MemoryHost(config.memory, identity=config.identity, host=config.host)


def _local_host(config: LauncherConfig) -> LocalHost | None:
    if config.local is None:
        return None
    from holdfast.launcher.tiers import local_disk_tier

    return local_disk_tier.LocalHost(config.local, identity=config.identity, host=config.host)


def _transition(before: State, after: State) -> bool:
    """What the sidecar must see at once: anything but progress, heartbeats and patience."""
    names = (
        "phase",
        "ready",
        "accepted",
        "started",
        "incidents",
        "foreign",
        "complete",
    )
    return after.world is not before.world or any(getattr(before, n) != getattr(after, n) for n in names)


def _key(document: Mapping[str, Any]) -> bytes:
    try:
        key = bytes.fromhex(document["jobKey"])
    except (KeyError, TypeError, ValueError):
        raise DocumentError("membership.json has no valid jobKey (hex)") from None
    if len(key) < 16:
        raise DocumentError("membership.json has a jobKey of fewer than 16 bytes")
    return key
