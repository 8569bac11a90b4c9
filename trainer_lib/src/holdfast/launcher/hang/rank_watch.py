"""The input of the hang monitor: the local ranks, those that left an earlier world, and the other launchers."""

from __future__ import annotations

import time

from holdfast.core.attempt import AttemptId
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.hang.monitor import HangWatch, WatchInput
from holdfast.launcher.hang.stall_reports import NO_REMOTE_STALLS, RemoteStalls
from holdfast.launcher.membership.events import Stalled
from holdfast.launcher.network.control_channel import ControlChannel
from holdfast.launcher.ranks.supervisor import Supervisor


class RankWatch:
    """Shows the ranks to the monitor, and feeds their long activities to the state machine."""

    def __init__(
        self,
        pump: EventPump,
        me: str,
        hangs: HangWatch,
        supervisor: Supervisor,
        control: ControlChannel,
    ) -> None:
        self._me = me
        self._hangs = hangs
        self._supervisor = supervisor
        self._control = control
        self._pump = pump

    def check(self) -> None:
        """Look once at the ranks of the current world, and at those that left an earlier one."""
        attempt_id = self._supervisor.attempt_id or AttemptId(0, 0)
        now = time.monotonic()
        trains = [rank for rank in self._supervisor.ranks if rank.greeted and rank.alive and not rank.parked]
        ranks = [rank for rank in trains if not rank.ends(now)]
        absent = self._supervisor.absent
        size = next((rank.place.world_size for rank in (*trains, *absent) if rank.place), 0)
        self._hangs.keep_activity_pages(self._supervisor.slots)
        watched = WatchInput(
            attempt_id=attempt_id,
            world_size=size,
            ranks=ranks,
            absent=[(rank, rank.left_at or 0.0, not rank.parked) for rank in absent],
            remote=self._remote_stalls(attempt_id),
        )
        stalls = self._hangs.check(watched)
        if stalls is not None and stalls != self._pump.state.stalls:
            self._pump.feed(Stalled(stalls=stalls))

    def _remote_stalls(self, attempt_id: AttemptId) -> RemoteStalls:
        """Return what the other launchers of the current attempt report about their ranks."""
        world = self._pump.state.world
        if world is None or world.attempt_id != attempt_id:
            return NO_REMOTE_STALLS
        others = world.uids - {self._me}
        hellos = [peer.hello for uid in others if (peer := self._pump.state.peers.get(uid)) and peer.hello]
        return RemoteStalls(
            stalls=tuple(stall for hello in hellos for stall in hello.stalls if stall.attempt_id == attempt_id),
            outdated=not all(self._control.heard_lately(uid) for uid in others),
        )
