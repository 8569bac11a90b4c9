"""The events that the launcher feeds to the state machine, and the actions that the state machine returns. Pure."""

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
    """The control channel listens. From now on this launcher can accept proposals."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed. Feed at least four per second; more have no effect."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Whether the local ranks could enter a world at once; False while standby processes start."""

    prepared: bool


@dataclass(frozen=True, kw_only=True)
class MembershipSeen:
    """`membership.json` changed."""

    membership: Membership


@dataclass(frozen=True, kw_only=True)
class PeerUp:
    """An authenticated channel to that pod's launcher is open in both directions."""

    pod_uid: str


@dataclass(frozen=True, kw_only=True)
class PeerDown:
    """The channel is lost, or could not be opened for `dead_after`."""

    pod_uid: str
    how: How


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message arrived over the channel of that pod."""

    sender: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class StoreOpened:
    """The result of `OpenStore`."""

    attempt_id: AttemptId
    master: Master


@dataclass(frozen=True, kw_only=True)
class StoreFailed:
    """The result of `OpenStore` if the store could not be opened."""

    attempt_id: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Entered:
    """All local ranks of the attempt sent `hello`. For a script without Holdfast's loop: they were started."""

    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class StepMade:
    """A completed step of the attempt.

    `restored` is the step from which the attempt continued (0: a fresh start), and `origin` the source of that state.
    One event per pass of the launcher's event loop is enough.
    """

    attempt_id: AttemptId
    step: int
    restored: int = 0
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class RankFailed:
    """A local rank process of the attempt failed, or reported that a peer is lost."""

    attempt_id: AttemptId
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """The complete list of long activities of the local ranks, from which other launchers detect hangs."""

    stalls: tuple[Stall, ...]


@dataclass(frozen=True, kw_only=True)
class HangFound:
    """A local rank of this attempt hangs. The launcher ends the rank after it has saved the stacks here."""

    attempt_id: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Holds:
    """The shards of a sharded model that the local ranks have in memory; None for another model."""

    held: HeldShards | None


@dataclass(frozen=True, kw_only=True)
class Saves:
    """Whether a local rank is writing a checkpoint."""

    saving: bool


@dataclass(frozen=True, kw_only=True)
class Quiesced:
    """All local ranks of the attempt completed their last step, and the checkpoint is durable if one was requested.

    This also happens without a local request: the request of another launcher reaches all ranks.
    """

    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class LocalDone:
    """Every local rank process ended with 0, after `done` if it uses Holdfast's loop.

    A rank that sent `hello` and ended with 0 without `done` is a `RankFailed` with `Priority.ENDED_EARLY`.
    """

    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class RanksEnded:
    """No local rank can vote in this attempt or a lower one any more.

    Its process is reaped, or *released*: it sent `left` and keeps its state in memory.
    """

    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class ForeignClaims:
    """A rank found claims that the membership does not list."""

    attempt_id: AttemptId
    claims: tuple[Claim, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointRequested:
    """A checkpoint is requested, by touch file, notice or directive. Each ID counts once."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DrainRequested:
    """This launcher must leave, after one agreed checkpoint (SIGTERM, SIGINT, notice, touch file with `drain`).

    `until`, on the state machine's clock, is the deadline of the checkpoint; None: the checkpoint deadline of the
    rules, counted from now. `cause` None means that the operator requested the drain, which is no incident. `node` is
    set if the whole node goes away: all workers of the attempt on it leave with this one.
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
    | CheckpointRequested
    | DrainRequested
)


# Actions


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send to a peer. Without a channel, the message is dropped."""

    to: str
    message: Message


@dataclass(frozen=True, kw_only=True)
class OpenStore:
    """Open a new store for this attempt on this launcher, and feed `StoreOpened` or `StoreFailed`.

    Close the other stores, except that of the attempt `beside`, which still trains.
    """

    attempt_id: AttemptId
    beside: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class StartRanks:
    """Fill this launcher's slots in the world, first with kept ranks. None of these votes in an older attempt.

    `trained` is the highest earlier attempt with ranks here, including earlier launchers of this pod.
    """

    world: World
    master: Master
    trained: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class StopRanks:
    """Prevent local ranks from voting in this attempt and lower ones; feed `RanksEnded` afterwards.

    A rank that reports `left` in time keeps its state in memory for the next `StartRanks`. Any other rank is killed.
    `grace`: seconds after SIGTERM for a script without Holdfast's loop.
    """

    attempt_id: AttemptId
    reason: str
    grace: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QuiesceRanks:
    """Request that all ranks end their attempt at an agreed step; feed `Quiesced` when all local ranks have done so.

    `commit`: write a checkpoint at that step. Otherwise a checkpoint is written only if some rank cannot keep its
    state in memory.
    """

    attempt_id: AttemptId
    id: str
    reason: str
    commit: bool


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint:
    """Request an agreed checkpoint from the local ranks."""

    attempt_id: AttemptId
    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class KeepStacks:
    """A remote rank hangs in this attempt, which is about to end: save the stacks of the local ranks."""

    attempt_id: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Exit with this code. This is the last action. The channels are flushed and closed first."""

    code: int
    reason: str
    message: str
    cause: Cause | None = None
    final: bool = False
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Note:
    """A transition that is logged."""

    phase: str
    message: str


Action = Send | OpenStore | StartRanks | StopRanks | QuiesceRanks | RequestCheckpoint | KeepStacks | Exit | Note
