"""The local ranks of a launcher without processes: a test gives their messages, and sees the events that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

from holdfast.launcher.accounting.event_recorder import EventRecorder
from holdfast.launcher.drain.touch_file import TouchFile
from holdfast.launcher.membership.events import Event
from holdfast.launcher.membership.messages import Master, World
from holdfast.launcher.ranks.event_adapter import LocalRanks
from holdfast.launcher.ranks.progress import Progress
from holdfast.launcher.ranks.rank_process import Rank
from holdfast.launcher.ranks.rank_socket import RankMessage
from holdfast.launcher.status.status_document import Identity


class HeardRanks:
    """The ranks of one worker in a world. They are in an attempt already."""

    def __init__(self, world: World, ranks: list[Rank], folder: Path) -> None:
        self.events: list[Event] = []
        self._ranks = ranks
        self._adapter = LocalRanks(
            Mock(feed=self.events.append, now=lambda: 1000.0),
            Identity(pod_uid="uid-w0", pod="gpt-w0", node="node-1"),
            TouchFile(folder),
            recorder=EventRecorder(lambda: 0.0),
            uploads=Mock(),
            tiers=Mock(),
        )
        self._adapter.supervisor = Mock(handle=self._handle, ranks=ranks, standbys=[], uses_holdfast=True)
        self.enter(world)

    @property
    def progress(self) -> Progress:
        return self._adapter.progress

    def enter(self, world: World) -> None:
        """Begin an attempt."""
        for rank in self._ranks:
            rank.attempt_id = world.attempt_id
        self._adapter.start(world, Master(host="10.244.0.7", port=1), Mock(), None)

    def hear(self, body: dict[str, Any], *, slot: int = 0) -> None:
        """Process a message of one rank."""
        connection = Mock(slot=slot, rank=self._ranks[slot].number, pid=self._ranks[slot].pid)
        attempt_id = self._ranks[slot].attempt_id
        self._adapter.heard(RankMessage(connection=connection, attempt_id=attempt_id, type=body["type"], body=body))

    def _handle(self, message: RankMessage) -> Rank:
        slot = message.connection.slot
        assert slot is not None
        self._ranks[slot].handle(message)
        return self._ranks[slot]
