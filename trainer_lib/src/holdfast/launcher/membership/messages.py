"""What launchers say to each other, and the records that travel with it. Pure.

Gossip is level-triggered: a `Hello` is the sender's whole present and is said again, so that any message may be
lost, doubled or late. The launcher's control channel adds who sent it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Final

from holdfast.core.attempt import AttemptId, Claim, Json
from holdfast.core.errors import DocumentError
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
class Failure:
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

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": str(self.cause),
            "reason": self.reason,
            "message": self.message,
            "priority": int(self.priority),
            "at": self.at,
            "pod": self.pod,
            "node": self.node,
            "rank": self.rank,
            "exitCode": self.exit_code,
            "traceback": list(self.traceback),
            "step": self.step,
            "mistake": self.mistake,
        }

    @classmethod
    def from_json(cls, value: Json) -> Failure:
        return cls(
            cause=Cause(value["cause"]),
            reason=str(value["reason"]),
            message=str(value["message"]),
            priority=Priority(value["priority"]),
            at=float(value["at"]),
            pod=str(value["pod"]),
            node=str(value["node"]),
            rank=value["rank"],
            exit_code=value["exitCode"],
            traceback=tuple(value["traceback"]),
            step=value["step"],
            mistake=str(value["mistake"]),
        )


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
class Notice:
    """A node will go, as its cloud said to one of the workers there: all of them leave together."""

    node: str
    id: str
    reason: str
    until: float  # Unix time; all who read it are on that node, so they share its clock

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "id": self.id, "reason": self.reason, "until": self.until}

    @classmethod
    def from_json(cls, value: Json) -> Notice:
        return cls(
            node=str(value["node"]), id=str(value["id"]), reason=str(value["reason"]), until=float(value["until"])
        )


@dataclass(frozen=True, kw_only=True)
class World:
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

    def to_json(self) -> dict[str, Any]:
        return {
            "pair": self.pair.to_json(),
            "publication": self.publication,
            "members": [member.to_json() for member in self.members],
            "coordinator": self.coordinator,
        }

    @classmethod
    def from_json(cls, value: Json) -> World:
        return cls(
            pair=AttemptId.from_json(value["pair"]),
            publication=str(value["publication"]),
            members=tuple(Member.from_json(member) for member in value["members"]),
            coordinator=str(value["coordinator"]),
        )


@dataclass(frozen=True, kw_only=True)
class Master:
    """Where the attempt's store listens."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Hello:
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
class ShareMembership:
    """The newest membership that the sender knows, for a peer that knows an older one or none."""

    type: ClassVar[str] = "share"
    membership: Membership


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Form this world. `incident` is what ended the last one; `started` the highest pair that the sender knows."""

    type: ClassVar[str] = "propose"
    world: World
    started: AttemptId | None = None
    incident: Incident | None = None


@dataclass(frozen=True, kw_only=True)
class Accept:
    """Yes, to exactly this pair and world; all lower pairs are left and their ranks here have ended."""

    type: ClassVar[str] = "accept"
    world: World


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """No, and why; `highest` is what the sender accepted."""

    type: ClassVar[str] = "refuse"
    pair: AttemptId
    reason: str
    highest: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """All accepted: the world has started, its store listens at `master`."""

    type: ClassVar[str] = "start"
    world: World
    master: Master


@dataclass(frozen=True, kw_only=True)
class Confirm:
    """The coordinator asks: all are done; are you still in this attempt?"""

    type: ClassVar[str] = "confirm"
    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """Still in the attempt, done, and it accepts no other while the coordinator lives."""

    type: ClassVar[str] = "confirmed"
    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class Complete:
    """The job is complete; said by the coordinator of the attempt that every member confirmed."""

    type: ClassVar[str] = "complete"
    pair: AttemptId


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """A budget is spent: this incident ends the job."""

    type: ClassVar[str] = "giveUp"
    incident: Incident
    message: str


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank of the sender hangs in this attempt, and is about to be ended: keep the stacks of yours now."""

    type: ClassVar[str] = "hang"
    pair: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Leaving:
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

_TYPES: Final = {
    cls.type: cls
    for cls in (
        Hello,
        ShareMembership,
        Propose,
        Accept,
        Refuse,
        Start,
        Confirm,
        Confirmed,
        Complete,
        GiveUp,
        Hang,
        Leaving,
    )
}
_NULLABLE: Final[dict[str, Callable[[Any], Any]]] = {
    "accepted": AttemptId.from_json,
    "started": AttemptId.from_json,
    "highest": AttemptId.from_json,
    "failed": AttemptId.from_json,
    "left": AttemptId.from_json,
    "pair": AttemptId.from_json,
    "world": World.from_json,
    "failure": Failure.from_json,
    "incident": Incident.from_json,
    "notice": Notice.from_json,
    "membership": Membership.from_json,
    "held": HeldShards.from_json,
    "master": lambda value: Master(host=str(value["host"]), port=int(value["port"])),
    "foreign": lambda value: tuple(Claim.from_json(claim) for claim in value),
    "stalls": lambda value: tuple(Stall.from_json(stall) for stall in value),
}


def to_json(message: Message) -> dict[str, Any]:
    """Wire form: the fields under their names, and `type`."""
    out: dict[str, Any] = {"type": message.type}
    for part in fields(message):
        out[part.name] = _plain(getattr(message, part.name))
    return out


def _plain(value: Any) -> Any:
    match value:
        case Membership():
            return value.document
        case tuple():
            return [_plain(item) for item in value]
        case Master():
            return {"host": value.host, "port": value.port}
        case AttemptId() | World() | Failure() | Incident() | Claim() | Notice() | Stall() | HeldShards():
            return value.to_json()
    return value


def from_json(value: Json) -> Message:
    """Read a message; unknown fields are ignored, an unknown type is refused by name."""
    cls = _TYPES.get(str(value.get("type")))
    if cls is None:
        raise DocumentError(f"message of unknown type {value.get('type')!r}")
    try:
        return cls(**{part.name: _read(part.name, value[part.name]) for part in fields(cls) if part.name in value})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"message {cls.type} cannot be read: {error!r}") from error


def _read(name: str, value: Any) -> Any:
    read = _NULLABLE.get(name)
    return value if read is None or value is None else read(value)
