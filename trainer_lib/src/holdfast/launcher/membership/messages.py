"""What launchers say to each other, and the records that travel with it. Pure.

Gossip is level-triggered: a `Hello` is the sender's whole present and is said again, so that any message may be
lost, doubled or late. The launcher's control channel adds who sent it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Final, get_args

from holdfast.core.attempt import AttemptId, Claim, Json
from holdfast.core.errors import DocumentError
from holdfast.core.json_fields import JsonFields
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import Stall
from holdfast.launcher.membership.document import Member, Membership
from holdfast.launcher.membership.held_shards import HeldShards


class Priority(IntEnum):
    """Which of an attempt's failures is its root: the lowest number, then the earliest."""

    OOM = 0
    MEMBER_LOST = 1
    KILLED = 2
    ENDED_EARLY = 3
    EXCEPTION = 4
    DEADLINE = 5
    PEER_LOST = 9


class Remedy(StrEnum):
    """What was done about an incident."""

    IN_PLACE = "InPlace"
    SHRINK = "Shrink"
    WAIT = "Wait"
    FAIL = "FailJob"


@dataclass(frozen=True, kw_only=True)
class Failure(JsonFields):
    """One thing that went wrong in an attempt, as the launcher that saw it says it.

    `mistake`: type and place of an error in the program, which a restart does not cure; empty for any other failure.
    """

    cause: Cause
    reason: str
    message: str
    priority: Priority
    at: float = 0.0
    pod: str = ""
    node: str = ""
    rank: int | None = None
    exit_code: int | None = None
    traceback: tuple[str, ...] = ()
    step: int | None = None
    mistake: str = ""

    @property
    def rank_of_root(self) -> tuple[int, float]:
        """Sorts the root cause first."""
        return (self.priority, self.at)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure from detection to resumption, identified by the pair that it ended.

    `part_of`: the pair of the incident that it is counted with (`exhaustion`), as each launcher finds out by itself.
    """

    pair: AttemptId
    failure: Failure
    action: Remedy
    detected: float
    part_of: AttemptId | None = None
    resumed: float | None = None
    lost_steps: int | None = None
    restored_from: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Wire form between launchers (the status has its own)."""
        return {
            "pair": self.pair.to_json(),
            "failure": self.failure.to_json(),
            "action": str(self.action),
            "detected": self.detected,
        }

    @classmethod
    def from_json(cls, value: Json) -> Incident:
        """Read the wire form; resumption is each launcher's own observation."""
        return cls(
            pair=AttemptId.from_json(value["pair"]),
            failure=Failure.from_json(value["failure"]),
            action=Remedy(value["action"]),
            detected=float(value["detected"]),
        )


@dataclass(frozen=True, kw_only=True)
class Notice(JsonFields):
    """A node will go, as its cloud said to one of the workers there: all of them leave together."""

    node: str
    id: str
    reason: str
    until: float  # Unix time; all who read it are on that node, so they share its clock


@dataclass(frozen=True, kw_only=True)
class World(JsonFields):
    """An attempt's members in order of index; ranks follow by this order × processes a worker."""

    pair: AttemptId
    publication: str
    members: tuple[Member, ...]
    coordinator: str

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(member.pod_uid for member in self.members)

    def member(self, pod_uid: str) -> Member:
        return next(member for member in self.members if member.pod_uid == pod_uid)

    def position(self, pod_uid: str) -> int:
        """The worker's place in the order of ranks (GROUP_RANK)."""
        return next(place for place, member in enumerate(self.members) if member.pod_uid == pod_uid)


@dataclass(frozen=True, kw_only=True)
class Master(JsonFields):
    """Where the attempt's store listens."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Hello(JsonFields):
    """The sender's whole present. Said on every change and once a second.

    `failure` is what ended (or, while `draining`, will end) the sender's attempt `failed`; `left` is the last attempt
    that is over for it. `notice` says that the sender drains because its whole node goes. `stays`: though `draining`,
    it is in the next world too, should a failure of somebody else end its attempt now.
    `prepared`: its ranks could enter a world at once. `stalls`: what the others must know to judge who hangs.
    `held`: the shards of a sharded model that its ranks have in memory; None if it is not sharded.
    """

    type: ClassVar[str] = "hello"
    generation: int = 0
    revision: int = 0
    publication: str = ""
    accepted: AttemptId | None = None
    started: AttemptId | None = None
    world: World | None = None
    left: AttemptId | None = None
    ready: bool = False
    prepared: bool = True
    draining: bool = False
    stays: bool = False
    notice: Notice | None = None
    done: bool = False
    failed: AttemptId | None = None
    failure: Failure | None = None
    foreign: tuple[Claim, ...] = ()
    stalls: tuple[Stall, ...] = ()
    held: HeldShards | None = None


@dataclass(frozen=True, kw_only=True)
class ShareMembership(JsonFields):
    """The newest membership that the sender knows, for a peer that knows an older one or none."""

    type: ClassVar[str] = "share"
    membership: Membership


@dataclass(frozen=True, kw_only=True)
class Propose(JsonFields):
    """Form this world. `incident` is what ended the last one; `started` the highest pair that the sender knows."""

    type: ClassVar[str] = "propose"
    world: World
    started: AttemptId | None = None
    incident: Incident | None = None


@dataclass(frozen=True, kw_only=True)
class Accept(JsonFields):
    """Yes, to exactly this pair and world; all lower pairs are left and their ranks here have ended."""

    type: ClassVar[str] = "accept"
    world: World


@dataclass(frozen=True, kw_only=True)
class Refuse(JsonFields):
    """No, and why; `highest` is what the sender accepted."""

    type: ClassVar[str] = "refuse"
    pair: AttemptId
    reason: str
    highest: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class Start(JsonFields):
    """All accepted: the world has started, its store listens at `master`."""

    type: ClassVar[str] = "start"
    world: World
    master: Master


@dataclass(frozen=True, kw_only=True)
class Confirm(JsonFields):
    """The coordinator asks: all are done; are you still in this attempt?"""

    type: ClassVar[str] = "confirm"
    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class Confirmed(JsonFields):
    """Still in the attempt, done, and it accepts no other while the coordinator lives."""

    type: ClassVar[str] = "confirmed"
    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class Complete(JsonFields):
    """The job is complete; said by the coordinator of the attempt that every member confirmed."""

    type: ClassVar[str] = "complete"
    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class GiveUp(JsonFields):
    """A budget is spent: this incident ends the job."""

    type: ClassVar[str] = "giveUp"
    incident: Incident
    message: str


@dataclass(frozen=True, kw_only=True)
class Hang(JsonFields):
    """A rank of the sender hangs in this attempt, and is about to be ended: keep the stacks of yours now."""

    type: ClassVar[str] = "hang"
    pair: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Leaving(JsonFields):
    """The sender exits now; its ranks have ended."""

    type: ClassVar[str] = "leaving"
    code: int


Message = (
    Hello
    | ShareMembership
    | Propose
    | Accept
    | Refuse
    | Start
    | Confirm
    | Confirmed
    | Complete
    | GiveUp
    | Hang
    | Leaving
)

_TYPES: Final = {cls.type: cls for cls in get_args(Message)}


def to_json(message: Message) -> dict[str, Any]:
    """Return the fields under their names, and `type`."""
    return {"type": message.type, **message.to_json()}


def from_json(value: Json) -> Message:
    """Read a message. Unknown fields are ignored; an unknown type is an error that names it."""
    cls = _TYPES.get(str(value.get("type")))
    if cls is None:
        raise DocumentError(f"message of unknown type {value.get('type')!r}")
    try:
        message: Message = cls.from_json(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"message {cls.type} cannot be read: {error!r}") from error
    return message
