"""What the shell tells the core, and what the core asks of it. Pure records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.constants import Cause
from holdfast.worlds import Claim, Pair

from .membership import Membership
from .messages import Failure, Master, Message, World


class How(StrEnum):
    """How a launcher was lost."""

    SILENT = "Silent"
    CLOSED = "Closed"
    REFUSED = "Refused"
    LEFT = "Left"


# Events


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The control channel listens; from now on this launcher can accept proposals."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed. At least four a second; more is harmless."""


@dataclass(frozen=True, kw_only=True)
class MembershipSeen:
    """`membership.json` changed."""

    membership: Membership


@dataclass(frozen=True, kw_only=True)
class PeerUp:
    """An authenticated channel to that pod's launcher is open (both directions work)."""

    pod_uid: str


@dataclass(frozen=True, kw_only=True)
class PeerDown:
    """The channel is lost, or could not be opened for `dead_after`."""

    pod_uid: str
    how: How


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message came over the channel of that pod."""

    sender: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class StoreOpened:
    """Answer to `OpenStore`."""

    pair: Pair
    master: Master


@dataclass(frozen=True, kw_only=True)
class StoreFailed:
    """Answer to `OpenStore` that could not be done."""

    pair: Pair
    message: str


@dataclass(frozen=True, kw_only=True)
class Entered:
    """All local ranks of the pair said hello (a script that never says it: they were spawned)."""

    pair: Pair


@dataclass(frozen=True, kw_only=True)
class StepMade:
    """A committed step of the attempt; `restored` is the step from which it went on (0: fresh start). One a pass of
    the shell's loop is enough."""

    pair: Pair
    step: int
    restored: int = 0


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """A local rank process of the attempt failed, or said that a peer is lost."""

    pair: Pair
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Quiesced:
    """All local ranks of the pair made their last step, and its commit is durable. Also when nobody here asked:
    another launcher's request reaches all ranks."""

    pair: Pair


@dataclass(frozen=True, kw_only=True)
class LocalDone:
    """Every local rank process has ended with 0, after `done` if it speaks.

    One that said hello and ended with 0 without `done` is a `RankFailed` with `Priority.ENDED_EARLY`.
    """

    pair: Pair


@dataclass(frozen=True, kw_only=True)
class RanksEnded:
    """No process of any local rank of this pair or a lower one is left: killed and reaped."""

    pair: Pair


@dataclass(frozen=True, kw_only=True)
class ForeignClaims:
    """A rank found claims that the membership does not know."""

    pair: Pair
    claims: tuple[Claim, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointAsked:
    """Someone wants a commit soon (touch-file, notice, directive). An id counts once."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DrainAsked:
    """This launcher must leave (SIGTERM, notice, touch-file with `drain`): one agreed commit first.

    `until` (on the core's clock) ends the wait for it; None: the rules' checkpoint deadline from now.
    `cause` None means that the operator wanted it, which is no incident. `node` is set when the whole node goes: all
    workers of the attempt on it leave with this one.
    """

    id: str
    reason: str
    until: float | None = None
    cause: Cause | None = Cause.INTERRUPTION
    node: str = ""


Event = (
    Ready
    | Tick
    | MembershipSeen
    | PeerUp
    | PeerDown
    | Received
    | StoreOpened
    | StoreFailed
    | Entered
    | StepMade
    | RankFailed
    | Quiesced
    | LocalDone
    | RanksEnded
    | ForeignClaims
    | CheckpointAsked
    | DrainAsked
)


# Actions


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send to a peer; drop it silently if the channel is gone."""

    to: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """Open a fresh store for this attempt here; answer `StoreOpened` or `StoreFailed`. Close older ones."""

    pair: Pair


@dataclass(frozen=True, kw_only=True)
class StartRanks:
    """Start the local rank processes of this world. No older ones are left."""

    world: World
    master: Master


@dataclass(frozen=True, kw_only=True)
class KillRanks:
    """SIGKILL and reap all local ranks of this pair and lower ones; answer `RanksEnded`. `grace`: SIGTERM first."""

    pair: Pair
    grace: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QuiesceRanks:
    """Ask the local ranks for an agreed commit and no step after it; answer `Quiesced` when all said so."""

    pair: Pair
    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint:
    """Ask the local ranks for an agreed commit."""

    pair: Pair
    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Leave with this code; the last action ever. Its channel is flushed and closed first."""

    code: int
    reason: str
    message: str
    cause: Cause | None = None
    final: bool = False
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Note:
    """A transition worth a line in the log."""

    phase: str
    message: str


Action = Send | OpenStore | StartRanks | KillRanks | QuiesceRanks | RequestCheckpoint | Exit | Note
