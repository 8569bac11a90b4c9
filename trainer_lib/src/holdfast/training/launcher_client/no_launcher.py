"""The connection of a script that was started by hand, which has no launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from holdfast.checkpoint.policy.interval import LauncherFailures
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.launcher_client.connection import Parting, Requests
from holdfast.training.launcher_client.exit_watch import exit_peer_lost
from holdfast.training.launcher_client.placement import RankPlacement


class NoLauncher:
    """A script that was started by hand: one world, and nobody to form another."""

    connected = False
    parting: Callable[[], Parting] = Parting
    reached = 0
    durable = 0
    trained: AttemptId | None = None
    tiers: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, place: RankPlacement) -> None:
        self.books: LauncherFailures | None = LauncherFailures(id=uuid4().hex)
        self._place: RankPlacement | None = place
        self._cancel = CancelToken()

    def send(self, kind: str, **body: Any) -> None:
        """Nobody listens."""

    def stands_by(self) -> bool:
        """There is one from the beginning."""
        return False

    def next_place(self) -> RankPlacement:
        """The only one."""
        place, self._place = self._place, None
        if place is None:
            exit_peer_lost(f"a peer is lost, and nobody forms another world: {self._cancel.reason}")
        return place

    def enter(self, place: RankPlacement) -> CancelToken:
        """It is over when a peer is lost."""
        return self._cancel

    def known_claims(self) -> tuple[Claim, ...]:
        """There is no membership."""
        return ()

    def begin_vote(self) -> None:
        """Nobody ends the attempt."""

    def end_vote(self) -> None:
        """Nobody waits for it."""

    def stay(self) -> None:
        """Nobody asks to leave, but a peer may be lost."""
        self._cancel.check()

    def go(self) -> None:
        """Nobody waits for it."""

    def hurried(self) -> bool:
        """Nobody asks."""
        return False

    def leave(self, reason: str) -> None:
        """Remember why."""
        self._cancel.set(reason)

    def lose_peers(self, message: str) -> None:
        """Remember why."""
        self._cancel.set(message)

    def requests(self) -> Requests:
        """Nobody asks."""
        return Requests()

    def answered(self, requests: Requests) -> None:
        """Nothing was asked."""

    def close(self) -> None:
        """Nothing is open."""
