"""The interface of the launcher that the training code uses, with or without a launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.checkpoint.policy.interval import LauncherFailures
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.launcher_client.placement import RankPlacement


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The unanswered requests, by ID. `quiesce` ends the attempt after a checkpoint, `pause` without one.

    With `node_local`, the checkpoint is also saved in memory and on other nodes, whether due or not.
    """

    checkpoint: tuple[str, ...] = ()
    quiesce: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    node_local: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Parting:
    """A rank's report when it leaves an attempt. `keep`: it can continue in another world."""

    step: int = 0
    in_doubt: bool = False
    keep: bool = True


class LauncherConnection(Protocol):
    """The operations of the launcher that a job needs."""

    connected: bool
    parting: Callable[[], Parting]
    reached: int  # the highest step that the job completed, as far as the launcher knows
    durable: int  # the step of the newest checkpoint on the volume, as far as launcher and operator know
    trained: AttemptId | None  # the highest earlier attempt in which this launcher had ranks, including exited ones
    launcher_failures: LauncherFailures | None  # the launcher's failure counters at its welcome to this attempt
    out_of_memory: OutOfMemory  # the record that the last process with a full GPU memory left at this launcher
    tiers: Mapping[str, Mapping[str, Any]]  # the settings of the launcher's tiers, by name

    def send(self, kind: str, **body: Any) -> None:
        """Send a message."""

    def on_standby(self) -> bool:
        """Return whether the launcher has not sent a place yet."""

    def next_place(self) -> RankPlacement:
        """Wait for the place in the next world, and return it."""

    def enter(self, place: RankPlacement) -> CancelToken:
        """Take a place. The returned token is cancelled when its attempt is over."""

    def known_claims(self) -> tuple[Claim, ...]:
        """Return the claims of the membership."""

    def begin_vote(self) -> None:
        """Begin a vote. Until `end_vote`, no thread reports that this rank has left.

        Raise `PeerLostError` if the attempt is over.
        """

    def end_vote(self) -> None:
        """End a vote that has returned or has failed permanently."""

    def stay(self) -> None:
        """Delay the end of the attempt for this rank until `go`.

        The script has failed, and its last step may have to be saved. Raise `PeerLostError` if the attempt is over.
        """

    def go(self) -> None:
        """Leave if this was requested meanwhile."""

    def hurried(self) -> bool:
        """Return whether leaving was requested since `stay`."""

    def leave(self, reason: str) -> None:
        """Leave the attempt. This rank has made its last step in it, and does not vote again."""

    def lose_peers(self, message: str) -> None:
        """Report a failed collective, unless the launcher ended the attempt, and leave the attempt."""

    def requests(self) -> Requests:
        """Return the current requests."""

    def answered(self, requests: Requests) -> None:
        """Remove the requests that a checkpoint has answered."""

    def close(self) -> None:
        """Send nothing more."""
