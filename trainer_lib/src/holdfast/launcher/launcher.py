"""The launcher: creates its parts, starts and stops them in order, and runs the event loop.

Nothing here decides which launchers train; `state_machine.step` does. All events pass through the event pump.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import DocumentError
from holdfast.core.log_format import LogContext
from holdfast.core.protocol import OBJECT_TIER, Cause, ExitCode
from holdfast.launcher.accounting.event_recorder import EventRecorder
from holdfast.launcher.accounting.timeline import Timeline
from holdfast.launcher.action_executor import ActionExecutor
from holdfast.launcher.config import LauncherConfig
from holdfast.launcher.drain.last_checkpoint import LastCheckpoint
from holdfast.launcher.drain.requests import Requests
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
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.state import State
from holdfast.launcher.peer_links import PeerLinks
from holdfast.launcher.process.child import Reaper, is_child
from holdfast.launcher.process.spawn_pool import Pool
from holdfast.launcher.ranks.event_adapter import LocalRanks
from holdfast.launcher.ranks.rank_socket import AgentSocket, RankMessage
from holdfast.launcher.ranks.supervisor import Supervisor
from holdfast.launcher.signals import Signals
from holdfast.launcher.standby import Standby
from holdfast.launcher.status import status_document
from holdfast.launcher.status.recovered_state import remembered
from holdfast.launcher.status.status_file import StatusFile
from holdfast.launcher.tiers.node_tiers import NodeTiers
from holdfast.launcher.tiers.upload_client import Uploads

_log = logging.getLogger("holdfast.launcher")
_TICK_SECONDS = 0.1
_TICKS_ALIVE = 5
# Without SIGTERM, the exit of the launcher has no deadline. This is the maximum duration of its last upload.
_UPLOAD_SECONDS = 3600.0
_UPLOAD_MARGIN_SECONDS = 2.0


class Launcher:
    """Runs one launcher."""

    def __init__(self, config: LauncherConfig, context: LogContext) -> None:
        me, run_dir = config.identity, config.run_dir
        self._config = config
        self._context = context
        self._ending: Ending | None = None
        self._exit: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.listening = asyncio.Event()
        self.pump = pump = EventPump(remembered(run_dir, me))
        self._reaper = Reaper(is_child)
        self._status = StatusFile(run_dir, self._document)
        self._membership = MembershipFile(run_dir, self.see_membership)
        timeline = Timeline(config.timeline or run_dir / TIMELINE_FILE, pump.now)
        self._recorder = EventRecorder(time.monotonic, timeline)
        self._uploads = Uploads(config.upload, config.checkpoint_folder, self._uploaded)
        self.peers = PeerLinks(me, pump, changed=self._status.changed, broken=self.fault)
        self._tiers = NodeTiers(config)
        self._socket = AgentSocket(run_dir / AGENT_SOCKET_FILE, self._on_rank_message)
        touch = TouchFile(run_dir)
        self._local = LocalRanks(pump, me, touch, recorder=self._recorder, uploads=self._uploads, tiers=self._tiers)
        self._pool = Pool(argv=config.command.argv, warm=config.command.warm)
        self._supervisor = Supervisor(
            command=config.command, run_dir=run_dir, me=me.pod_uid, listener=self._local, spawner=self._pool
        )
        self._local.supervisor = self._supervisor
        self._signals = Signals(
            pump, grace_seconds=config.grace_seconds, finish=self._finish, kill=self._supervisor.kill_all
        )
        self._hangs = HangWatch(run_dir, self._local.hung, self._hang_found)
        self._rank_watch = RankWatch(pump, me.pod_uid, self._hangs, self._supervisor, self.peers.control)
        self._last_checkpoint = LastCheckpoint(pump, me.node, self._local, self._tiers, self._uploads)
        self._requests = Requests(pump, touch, self._local, me.node)
        self._standby = Standby(
            pump, config, self._local, pool=self._pool, supervisor=self._supervisor, peers=self.peers
        )
        self._actions = ActionExecutor(
            pump,
            finish=self._finish,
            host=config.host,
            peers=self.peers,
            local=self._local,
            hangs=self._hangs,
            last_checkpoint=self._last_checkpoint,
        )
        first = (self._label_log, self.peers.observe, self._standby.observe, self._last_checkpoint.observe)
        pump.connect((*first, self._recorder.follow), execute=self._actions.execute, show=self._status.show)

    async def run(self) -> Ending:
        """Run until the state machine decides to exit. Return the reason and the exit code."""
        tasks = [asyncio.create_task(self._guard(work)) for work in await self._start()]
        try:
            ending = await self._exit
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave(ending)
        return ending

    def see_membership(self, document: dict[str, Any]) -> None:
        """Process a membership document, from the file or from the endpoint in this process."""
        membership = Membership.from_json(document)
        self._hangs.configure(HangSettings.from_settings(document.get("settings", {})))
        key = _key(document)
        self._tiers.admit(key)
        self.peers.take(e.MembershipSeen(membership=membership), key)

    def fault(self, message: str) -> None:
        """Exit with code 70."""
        cause = str(Cause.INFRASTRUCTURE)
        self._finish(Ending(code=ExitCode.LAUNCHER_FAULT, cause=cause, reason="LauncherFault", message=message))

    def _finish(self, ending: Ending) -> None:
        if not self._exit.done():
            self._exit.set_result(ending)

    async def _start(self) -> list[Coroutine[Any, Any, None]]:
        clean(self._config.run_dir)
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)
        self._signals.install(self._reaper)
        self._tiers.start()
        self._supervisor.repair_compile_cache()  # an earlier launcher may have been killed with its ranks
        await self._socket.start()
        port = await self.peers.control.start(self._config.host or None, self._config.control_port)
        _log.info("launcher started", extra={"fields": {"control": port, "pid": os.getpid()}})
        self._recorder.begin(pod=self._config.identity.pod, job=self._context.fields.get("job"))
        self._standby.start()
        self.pump.feed(e.Ready())
        self.listening.set()
        work = [self._tick(), self._requests.watch()]
        return [*work, self._membership.watch()] if self._config.membership_from_file else work

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Exit with code 70 if a part fails: a launcher must not run with only some of its parts."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  (logged, and the end of this launcher)
            _log.exception("the launcher cannot continue")
            self.fault(f"{type(error).__name__}: {error}")

    def _callback_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _log.error("the launcher cannot continue: %s", context.get("message"), exc_info=error)
        self.fault(f"{type(error).__name__}: {error}" if error else str(context.get("message")))

    async def _tick(self) -> None:
        ticks = 0
        while True:
            self.pump.feed(e.Tick())
            self._reaper.reap()
            self._standby.tick()
            self._rank_watch.check()
            if (ticks := ticks + 1) % _TICKS_ALIVE == 0:
                self._status.alive()
            await asyncio.sleep(_TICK_SECONDS)

    async def _leave(self, ending: Ending) -> None:
        """Write the reason, end the ranks and close everything. The control channel sends queued messages first."""
        self._ending = ending
        self._signals.leaving = True
        self._recorder.close(ending.code, ending.reason)
        self._local.give_up_answers()
        if self._config.termination_log is not None:
            termination.write(self._config.termination_log, ending)
        self._status.flush()
        fields = {"code": ending.code, "reason": ending.reason}
        _log.info("launcher exits: %s", ending.message or ending.reason, extra={"fields": fields})
        self._pool.close()
        await self._supervisor.close(self._actions.grace(0.0))
        await self.peers.control.close()
        await self._socket.close()
        self.peers.store.close()
        await self._uploads.finish(self._upload_seconds, self._status.alive)
        self._tiers.close(complete=ending.code == ExitCode.COMPLETE)
        self._status.flush()

    def _upload_seconds(self) -> float:
        """Return the seconds for the last upload: the rest of the grace period, or 0 if the plan excludes it."""
        if not self._last_checkpoint.uploaded:
            return 0.0
        left = self._signals.left()
        return _UPLOAD_SECONDS if left is None else left - _UPLOAD_MARGIN_SECONDS

    def _uploaded(self, name: CheckpointName) -> None:
        now = self.pump.now()
        self._local.progress.checkpoints[OBJECT_TIER] = {"step": name.step, **name.attempt_id.to_json(), "time": now}
        self._status.changed()

    def _hang_found(self, attempt_id: AttemptId, message: str) -> None:
        self.pump.feed(e.HangFound(attempt_id=attempt_id, message=message))

    def _on_rank_message(self, message: RankMessage) -> None:
        self._local.heard(message)
        self._status.changed()

    def _label_log(self, before: State, after: State) -> None:
        if after.world is not before.world:
            attempt_id = after.world.attempt_id if after.world else None
            self._context.update(
                generation=attempt_id.generation if attempt_id else None,
                attempt=attempt_id.attempt if attempt_id else None,
            )

    def _document(self) -> dict[str, Any]:
        return status_document.status(
            identity=self._config.identity,
            state=self.pump.state,
            ranks=self._supervisor.ranks,
            progress=self._local.progress,
            control_port=self.peers.control.port,
            store_port=self._config.store_port,
            notices=self._requests.notices,
            ending=self._ending,
            accounting=self._recorder.document(),
            warm_processes=self._pool.ready,
            uploads=self._uploads.counts.to_json() if self._uploads.wanted else None,
            refused_peers=self.peers.rejected + self._tiers.rejected,
        )


def _key(document: Mapping[str, Any]) -> bytes:
    try:
        key = bytes.fromhex(document["jobKey"])
    except (KeyError, TypeError, ValueError):
        raise DocumentError("membership.json has no valid jobKey (hex)") from None
    if len(key) < 16:
        raise DocumentError("membership.json has a jobKey of fewer than 16 bytes")
    return key
