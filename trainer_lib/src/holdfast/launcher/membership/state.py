"""The state of one launcher. Pure and frozen; `state_machine.step` creates the next state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.protocol import Cause
from holdfast.launcher.hang.stall_reports import Stall
from holdfast.launcher.membership.document import Membership
from holdfast.launcher.membership.events import Exit, How
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.messages import Failure, Hello, Incident, Master, World
from holdfast.launcher.membership.oom_incidents import Exhaustion


class Phase(StrEnum):
    """The launcher's phase in its status."""

    STARTING = "Starting"
    WAITING = "Waiting"
    AWAITING_FENCE = "AwaitingFence"
    FORMING = "Forming"
    RUNNING = "Running"
    DRAINING = "Draining"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The known state of another launcher."""

    up: bool
    since: float
    how: How | None = None
    hello: Hello | None = None
    met: bool = False
    shared_at: float = 0.0
    muted_until: float = 0.0
    refusals: int = 0


@dataclass(frozen=True, kw_only=True)
class Quiesce:
    """The attempt ends at an agreed step, for this reason."""

    id: str
    reason: str
    until: float


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The started attempt of this launcher. It ends, or the launcher leaves it by accepting a higher one."""

    world: World
    master: Master
    since: float
    entered: bool = False
    step: int | None = None
    restored: int | None = None
    origin: str = ""
    failures: tuple[Failure, ...] = ()
    failed_at: float | None = None
    quiesce: Quiesce | None = None
    quiesced_at: float | None = None
    done: bool = False
    started_sent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A proposal that is being accepted: first the agreed end of the attempt, then the end of the old ranks."""

    world: World
    incident: Incident | None
    promised: bool = False


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """This launcher's own proposal, until its world starts or the proposal is dropped."""

    world: World
    incident: Incident | None
    since: float
    sent: float
    accepted: frozenset[str] = frozenset()
    master: Master | None = None
    until: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Drain:
    id: str
    reason: str
    until: float
    cause: Cause | None
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of one launcher. `accepted`, `started`, `trained` and the newness of `membership` never decrease."""

    me: str
    ready: bool = False
    prepared: bool = True
    membership: Membership | None = None
    seen_at: float = 0.0
    conflict: int | None = None
    accepted: AttemptId | None = None
    accepted_world: World | None = None
    started: AttemptId | None = None
    trained: AttemptId | None = None  # the highest attempt that had ranks here
    peers: Mapping[str, Peer] = field(default_factory=dict)
    attempt: Attempt | None = None
    ranks: AttemptId | None = None
    stalls: tuple[Stall, ...] = ()
    held: HeldShards | None = None
    saving: bool = False
    stopping: bool = False
    pending: Pending | None = None
    proposal: Proposal | None = None
    refused: AttemptId | None = None
    retry_at: float = 0.0
    idle_since: float | None = None
    last: AttemptId | None = None
    last_world: World | None = None
    ended_at: float | None = None  # the time at which `last` ended
    failed: AttemptId | None = None
    failure: Failure | None = None
    incidents: tuple[Incident, ...] = ()
    history: tuple[tuple[AttemptId, Cause, float], ...] = ()
    counted: frozenset[AttemptId] = frozenset()
    exhausted: Exhaustion | None = None
    fruitless: int = 0
    not_before: float = 0.0
    foreign: tuple[Claim, ...] = ()
    drain: Drain | None = None
    postponed: Drain | None = None  # waits for the next attempt, because another worker's failure ended this one
    requests: frozenset[str] = frozenset()
    waiting_requests: tuple[tuple[str, str], ...] = ()
    confirmed: AttemptId | None = None
    confirmations: frozenset[str] = frozenset()
    confirm_sent: float = 0.0
    complete: AttemptId | None = None
    leaving: Exit | None = None
    leave_at: float | None = None
    exit: Exit | None = None
    hello: Hello | None = None
    hello_at: float = 0.0
    phase: Phase = Phase.STARTING
    message: str = "the control channel is not open yet"

    @property
    def world(self) -> World | None:
        """The world that runs here now."""
        return None if self.attempt is None else self.attempt.world
