"""What the shell tells the core, and what the core asks of it. Pure records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import Stall
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.messages import Failure, Master, Message, World


class How(StrEnum):
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
class Prepared:
    """Whether this launcher's ranks could enter a world at once; false while processes that stand by get ready."""

    prepared: bool


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

    pair: AttemptId
    master: Master


@dataclass(frozen=True, kw_only=True)
class StoreFailed:
    """Answer to `OpenStore` that could not be done."""

    pair: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Entered:
    """All local ranks of the pair said hello (a script that never says it: they were spawned)."""

    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class StepMade:
    """A committed step of the attempt; `restored` is the step from which it went on (0: fresh start), `origin` where
    that was. One a pass of the shell's loop is enough."""

    pair: AttemptId
    step: int
    restored: int = 0
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """A local rank process of the attempt failed, or said that a peer is lost."""

    pair: AttemptId
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """What the other launchers must know of the ranks here to judge who hangs; all of it, each time."""

    stalls: tuple[Stall, ...]


@dataclass(frozen=True, kw_only=True)
class HangFound:
    """A rank here hangs in this attempt, says this line; it is ended once the stacks here are kept."""

    pair: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Holds:
    """Which shards of a sharded model the ranks here have in memory now; None of another model."""

    held: HeldShards | None


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Whether a rank here is in a checkpoint now."""

    saving: bool


@dataclass(frozen=True, kw_only=True)
class Quiesced:
    """All local ranks of the pair made their last step; if a commit was asked for, it is durable. Also when nobody
    here asked: another launcher's request reaches all ranks."""

    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class LocalDone:
    """Every local rank process has ended with 0, after `done` if it speaks.

    One that said hello and ended with 0 without `done` is a `RankFailed` with `Priority.ENDED_EARLY`.
    """

    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class RanksEnded:
    """No local rank can vote in this pair or a lower one any more: its process is reaped, or *released*: it said
    `left` and keeps its state in memory."""

    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class ForeignClaims:
    """A rank found claims that the membership does not know."""

    pair: AttemptId
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
    | Prepared
    | MembershipSeen
    | PeerUp
    | PeerDown
    | Received
    | StoreOpened
    | StoreFailed
    | Entered
    | StepMade
    | RankFailed
    | Stalled
    | HangFound
    | Holds
    | Saves
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
    """Open a fresh store for this attempt here; answer `StoreOpened` or `StoreFailed`. Close the others, but not that
    of the attempt `beside` it, which still trains."""

    pair: AttemptId
    beside: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class StartRanks:
    """Fill this launcher's places in the world, first with the ranks that were kept. None votes in an older one.

    `trained` is the highest attempt before this one that had ranks here, in this or an earlier life of the launcher.
    """

    world: World
    master: Master
    trained: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class StopRanks:
    """Let no local rank vote in an attempt up to this pair any more; answer `RanksEnded`. A rank that says so in time
    keeps its state in memory, for the next `StartRanks`; any other is killed. `grace`: SIGTERM first, to a script
    without Holdfast's loop."""

    pair: AttemptId
    reason: str
    grace: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QuiesceRanks:
    """Ask the local ranks to end their attempt at a step on which all agree; answer `Quiesced` when all said so.
    `commit`: that step is committed to the checkpoints. Else only if some rank cannot keep its state in memory."""

    pair: AttemptId
    id: str
    reason: str
    commit: bool


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint:
    """Ask the local ranks for an agreed commit."""

    pair: AttemptId
    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class KeepStacks:
    """A rank of another launcher hangs in this attempt, and all are about to leave it: keep what those here do."""

    pair: AttemptId
    message: str


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


Action = Send | OpenStore | StartRanks | StopRanks | QuiesceRanks | RequestCheckpoint | KeepStacks | Exit | Note
