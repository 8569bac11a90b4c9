"""What the training code needs of its launcher, whether there is one or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.checkpoint.policy.interval import LauncherFailures
from holdfast.core.attempt import AttemptId, Claim
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.launcher_client.placement import RankPlacement


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What was asked and not answered yet, by id. `quiesce` ends the attempt after a commit, `pause` without one.
    With `near` that commit is wanted in memory and on other nodes as well, due there or not."""

    checkpoint: tuple[str, ...] = ()
    quiesce: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Parting:
    """What a rank says of itself when it leaves an attempt. `keep`: it can go on in another world."""

    step: int = 0
    in_doubt: bool = False
    keep: bool = True


class LauncherConnection(Protocol):
    """What the job needs of its launcher."""

    connected: bool
    parting: Callable[[], Parting]
    reached: int  # the highest step that the job committed, as far as the launcher knows
    durable: int  # the step of the newest checkpoint on the volume, as far as launcher and operator know
    trained: AttemptId | None  # the highest attempt before this one that had ranks under this launcher, dead ones too
    books: LauncherFailures | None  # the launcher's, when it welcomed this rank to its attempt
    tiers: Mapping[str, Mapping[str, Any]]  # the settings of the launcher's tiers, by name

    def send(self, kind: str, **body: Any) -> None:
        """Tell something."""

    def stands_by(self) -> bool:
        """Whether the launcher gave no place yet."""

    def next_place(self) -> RankPlacement:
        """The place in the next world; waits for it."""

    def enter(self, place: RankPlacement) -> CancelToken:
        """Take a place; the answer says when its attempt is over."""

    def known_claims(self) -> tuple[Claim, ...]:
        """The claims of the membership."""

    def begin_vote(self) -> None:
        """PeerLostError if the attempt is over. Until `end_vote` nobody says that this rank has left."""

    def end_vote(self) -> None:
        """The vote has come back, or failed for good."""

    def stay(self) -> None:
        """PeerLostError if the attempt is over. Until `go` it is not over for this rank: the script has failed, and
        its last step may have to be committed."""

    def go(self) -> None:
        """Leave if that was asked for meanwhile."""

    def hurried(self) -> bool:
        """Whether it was."""

    def leave(self, reason: str) -> None:
        """This rank votes no more in its attempt: its last step is made."""

    def lose_peers(self, message: str) -> None:
        """A collective failed: say so, unless the launcher ended the attempt; this rank votes no more in it."""

    def requests(self) -> Requests:
        """What is asked now."""

    def answered(self, requests: Requests) -> None:
        """Forget what a commit has answered."""

    def close(self) -> None:
        """Say nothing more."""
