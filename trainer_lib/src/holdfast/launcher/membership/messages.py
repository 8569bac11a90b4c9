"""The messages between launchers, and the records in them. Pure.

Gossip is level-triggered: a `Hello` contains the sender's complete state and is repeated. So any message may be lost,
duplicated or late. The control channel adds the sender.
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
    """Selects the root of an attempt's failures: the lowest number, then the earliest time."""

    OOM = 0
    MEMBER_LOST = 1
    KILLED = 2
    ENDED_EARLY = 3
    EXCEPTION = 4
    DEADLINE = 5
    PEER_LOST = 9


class Remedy(StrEnum):
    """The response to an incident."""

    IN_PLACE = "InPlace"
    SHRINK = "Shrink"
    WAIT = "Wait"
    FAIL = "FailJob"


@dataclass(frozen=True, kw_only=True)
class Failure(JsonFields):
    """One failure in an attempt, as the launcher that detected it reports it.

    `mistake`: type and place of an error in the program, which a restart does not fix; empty for any other failure.
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
        """The sort key that puts the root cause first."""
        return (self.priority, self.at)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure from detection to resumption. Its key is the ID of the attempt that it ended.

    `part_of`: the attempt ID of the incident with which it is counted (`oom_incidents`). Each launcher determines it.
    """

    attempt_id: AttemptId
    failure: Failure
    action: Remedy
    detected: float
    part_of: AttemptId | None = None
    resumed: float | None = None
    lost_steps: int | None = None
    restored_from: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Wire form between launchers. The status has its own form."""
        return {
            "pair": self.attempt_id.to_json(),
            "failure": self.failure.to_json(),
            "action": str(self.action),
            "detected": self.detected,
        }

    @classmethod
    def from_json(cls, value: Json) -> Incident:
        """Read the wire form. Each launcher observes the resumption itself."""
        return cls(
            attempt_id=AttemptId.from_json(value["pair"]),
            failure=Failure.from_json(value["failure"]),
            action=Remedy(value["action"]),
            detected=float(value["detected"]),
        )


@dataclass(frozen=True, kw_only=True)
class Notice(JsonFields):
    """A cloud's notice that a node will go away. One worker there receives it, and all of them leave together."""

    node: str
    id: str
    reason: str
    until: float  # Unix time; only workers on that node use it, so they share its clock


@dataclass(frozen=True, kw_only=True)
class World(JsonFields):
    """The members of an attempt in order of index. Ranks follow from this order and the processes per worker."""

    attempt_id: AttemptId
    publication: str
    members: tuple[Member, ...]
    coordinator: str

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(member.pod_uid for member in self.members)

    def member(self, pod_uid: str) -> Member:
        return next(member for member in self.members if member.pod_uid == pod_uid)

    def position(self, pod_uid: str) -> int:
        """Return the worker's place in the order of ranks (GROUP_RANK)."""
        return next(place for place, member in enumerate(self.members) if member.pod_uid == pod_uid)


@dataclass(frozen=True, kw_only=True)
class Master(JsonFields):
    """The address of the attempt's store."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Hello(JsonFields):
    """The sender's complete state, sent on every change and once per second.

    `failure` is what ended (or, while `draining`, will end) the sender's attempt `failed`. `left` is the last attempt
    that ended for the sender. `notice`: the sender drains because its whole node goes away. `stays`: although
    `draining`, the sender would be in the next world if another worker's failure ended its attempt now.

    `prepared`: its ranks could enter a world at once. `stalls`: long activities, from which the others detect hangs.
    `held`: the shards of a sharded model that its ranks have in memory; None if the model is not sharded.
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
    """The newest membership of the sender, for a peer with an older one or none."""

    type: ClassVar[str] = "share"
    membership: Membership


@dataclass(frozen=True, kw_only=True)
class Propose(JsonFields):
    """Form this world. `incident` ended the last one. `started` is the sender's highest started attempt."""

    type: ClassVar[str] = "propose"
    world: World
    started: AttemptId | None = None
    incident: Incident | None = None


@dataclass(frozen=True, kw_only=True)
class Accept(JsonFields):
    """Accepts exactly this world. The sender has left all lower attempts, and their local ranks have ended."""

    type: ClassVar[str] = "accept"
    world: World


@dataclass(frozen=True, kw_only=True)
class Refuse(JsonFields):
    """Refuses a proposal, with a reason. `highest` is the attempt that the sender accepted."""

    type: ClassVar[str] = "refuse"
    attempt_id: AttemptId
    reason: str
    highest: AttemptId | None = None


@dataclass(frozen=True, kw_only=True)
class Start(JsonFields):
    """All members accepted: the world has started, and its store listens at `master`."""

    type: ClassVar[str] = "start"
    world: World
    master: Master


@dataclass(frozen=True, kw_only=True)
class Confirm(JsonFields):
    """A request of the coordinator when all members are done: confirm that you are still in this attempt."""

    type: ClassVar[str] = "confirm"
    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class Confirmed(JsonFields):
    """The sender is done and still in the attempt. It accepts no other one while the coordinator lives."""

    type: ClassVar[str] = "confirmed"
    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class Complete(JsonFields):
    """The job is complete. The coordinator of the attempt sends it after every member confirmed."""

    type: ClassVar[str] = "complete"
    attempt_id: AttemptId


@dataclass(frozen=True, kw_only=True)
class GiveUp(JsonFields):
    """A budget is exceeded: this incident fails the job."""

    type: ClassVar[str] = "giveUp"
    incident: Incident
    message: str


@dataclass(frozen=True, kw_only=True)
class Hang(JsonFields):
    """A rank of the sender hangs in this attempt and will be ended: save the stacks of your ranks now."""

    type: ClassVar[str] = "hang"
    attempt_id: AttemptId
    message: str


@dataclass(frozen=True, kw_only=True)
class Leaving(JsonFields):
    """The sender exits now. Its ranks have ended."""

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
    """Return the fields by name, and `type`."""
    return {"type": message.type, **message.to_json()}


def from_json(value: Json) -> Message:
    """Read a message. Unknown fields are ignored. An unknown type raises an error that names it."""
    cls = _TYPES.get(str(value.get("type")))
    if cls is None:
        raise DocumentError(f"message of unknown type {value.get('type')!r}")
    try:
        message: Message = cls.from_json(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"message {cls.type} cannot be read: {error!r}") from error
    return message
