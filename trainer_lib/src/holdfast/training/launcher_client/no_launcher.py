"""The connection of a script without a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from holdfast.checkpoint.policy.interval import LauncherFailures
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.launcher_client.connection import Parting, Requests
from holdfast.training.launcher_client.exit_watch import exit_peer_lost
from holdfast.training.launcher_client.placement import RankPlacement


class NoLauncher:
    """A script without a launcher: one world, which is never replaced."""

    connected = False
    parting: Callable[[], Parting] = Parting
    reached = 0
    durable = 0
    trained: AttemptId | None = None
    out_of_memory = OutOfMemory()
    tiers: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, place: RankPlacement) -> None:
        self.launcher_failures: LauncherFailures | None = LauncherFailures(id=uuid4().hex)
        self._place: RankPlacement | None = place
        self._cancel = CancelToken()

    def send(self, kind: str, **body: Any) -> None:
        """Discard the message."""

    def on_standby(self) -> bool:
        """Return False: the place is known from the start."""
        return False

    def next_place(self) -> RankPlacement:
        """Return the only place. On the second call, exit, because no other world can form."""
        place, self._place = self._place, None
        if place is None:
            exit_peer_lost(f"a peer is lost, and without a launcher no other world can form: {self._cancel.reason}")
        return place

    def enter(self, place: RankPlacement) -> CancelToken:
        """Return a token that is cancelled when a peer is lost."""
        if self._cancel.is_set():  # a roll-back has left the world, and enters it again
            self._cancel = CancelToken()
        return self._cancel

    def known_claims(self) -> tuple[Claim, ...]:
        """Return no claims: there is no membership."""
        return ()

    def begin_vote(self) -> None:
        """Do nothing: no launcher ends the attempt."""

    def end_vote(self) -> None:
        """Do nothing."""

    def stay(self) -> None:
        """Check that no peer is lost."""
        self._cancel.check()

    def go(self) -> None:
        """Do nothing."""

    def hurried(self) -> bool:
        """Return False: no launcher is waiting."""
        return False

    def leave(self, reason: str) -> None:
        """Cancel the attempt."""
        self._cancel.set(reason)

    def lose_peers(self, message: str) -> None:
        """Cancel the attempt."""
        self._cancel.set(message)

    def requests(self) -> Requests:
        """Return no requests."""
        return Requests()

    def answered(self, requests: Requests) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: there is no connection."""
