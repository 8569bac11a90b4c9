"""Keeps processes ready in advance: for the next failure, and for a world that forms later."""

from __future__ import annotations

from holdfast.launcher.config import LauncherConfig
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.membership.state import State
from holdfast.launcher.peer_links import PeerLinks
from holdfast.launcher.process import script_imports
from holdfast.launcher.process.spawn_pool import Pool
from holdfast.launcher.ranks.event_adapter import LocalRanks
from holdfast.launcher.ranks.supervisor import Supervisor

_TICKS_REFILL = 50
# Without a world for this long (seconds), the script starts on standby.
_IDLE_SECONDS = 0.5


class Standby:
    """Fills the pool while a world trains, and starts the script on standby while there is no world."""

    def __init__(
        self,
        pump: EventPump,
        config: LauncherConfig,
        local: LocalRanks,
        *,
        pool: Pool,
        supervisor: Supervisor,
        peers: PeerLinks,
    ) -> None:
        argv = config.command.argv
        self._pump = pump
        self._local = local
        self._pool = pool
        self._supervisor = supervisor
        self._peers = peers
        self._starts_script = (
            config.stand_by and script_imports.speaks(argv) and not script_imports.reads_rank_variables(argv)
        )
        self._idle_since: float | None = None
        self._ticks = 0

    def start(self) -> None:
        """Announce that processes will be on standby."""
        if self._starts_script:
            self._local.await_standbys()

    def observe(self, before: State, after: State) -> None:
        """Fill the pool once a world has made its first step: filling it earlier would delay that step."""
        if self._trains(after) and not self._trains(before):
            self._peers.keep_store_warm()
            self._pool.refill()

    def tick(self) -> None:
        """Replace pool processes that ended, and start the script on standby if no world forms for a while."""
        self._ticks += 1
        state = self._pump.state
        if self._ticks % _TICKS_REFILL == 0 and self._trains(state):
            self._pool.refill()
        busy = state.attempt is not None or state.ranks is not None
        if busy or state.membership is None or state.drain is not None or state.leaving is not None:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._pump.now()
        elif self._starts_script and self._pump.now() >= self._idle_since + _IDLE_SECONDS:
            self._local.stand_by(state.membership)

    def _trains(self, state: State) -> bool:
        """Whether the world trains. A script without Holdfast's loop never reports a step."""
        attempt = state.attempt
        if attempt is None:
            return False
        return attempt.step is not None or (attempt.entered and not self._supervisor.uses_holdfast)
