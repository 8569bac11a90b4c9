"""One step in progress: the next state and the actions so far. The only mutable object of the state machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.core.attempt import AttemptId, highest
from holdfast.core.protocol import Cause
from holdfast.launcher.membership.document import Member, Membership, Rules
from holdfast.launcher.membership.events import Action, Send, StopRanks
from holdfast.launcher.membership.held_shards import HeldShards
from holdfast.launcher.membership.messages import Failure, Hello, Message, Priority, Refuse
from holdfast.launcher.membership.quorum import NOTHING, WeakenedQuorum
from holdfast.launcher.membership.state import Attempt, Peer, State

DRAINED = "Drained"


class Transition:
    """The state and actions that the rules read and change."""

    def __init__(self, state: State, now: float, weakened: WeakenedQuorum = NOTHING) -> None:
        self.state = state
        self.now = now
        self.weakened = weakened
        self.actions: list[Action] = []

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def set_attempt(self, **changes: Any) -> None:
        """Change the attempt, if there is one."""
        if self.state.attempt is not None:
            self.set(attempt=replace(self.state.attempt, **changes))

    def set_peer(self, uid: str, peer: Peer) -> None:
        self.set(peers={**self.state.peers, uid: peer})

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def send(self, to: str, message: Message) -> None:
        """Send a message to a peer with an open channel."""
        if to != self.state.me and self.up(to):
            self.do(Send(to=to, message=message))

    def broadcast(self, message: Message) -> None:
        """Send a message to all peers with an open channel."""
        for uid in sorted(self.state.peers):
            self.send(uid, message)

    def refuse(self, to: str, attempt_id: AttemptId, reason: str) -> None:
        self.send(to, Refuse(attempt_id=attempt_id, reason=reason, highest=self.state.accepted))

    def stop_ranks(self, reason: str) -> None:
        """Stop the local ranks, once."""
        if self.state.ranks is not None and not self.state.stopping:
            self.set(stopping=True)
            self.do(StopRanks(attempt_id=self.state.ranks, reason=reason))

    @property
    def membership(self) -> Membership | None:
        return self.state.membership

    @property
    def rules(self) -> Rules:
        """The job's settings; their defaults before the first membership."""
        return self.state.membership.rules if self.state.membership else Rules()

    @property
    def attempt(self) -> Attempt | None:
        """The current attempt of this launcher."""
        return self.state.attempt

    def up(self, uid: str) -> bool:
        """Whether the channel to a pod's launcher is open."""
        peer = self.state.peers.get(uid)
        return uid == self.state.me or (peer is not None and peer.up)

    def hello(self, uid: str) -> Hello | None:
        """Return the last `Hello` of a live peer."""
        peer = self.state.peers.get(uid)
        return peer.hello if peer is not None and peer.up else None

    def held(self, uid: str) -> HeldShards | None:
        """Return the shards of a sharded model that a member reported to have in memory."""
        hello = self.hello(uid)
        return self.state.held if uid == self.state.me else (None if hello is None else hello.held)

    def usable(self, uid: str) -> bool:
        """Whether a member can be in the next world: it lives, is ready, stays, and answers, as far as is known."""
        if uid == self.state.me:
            return self.state.ready and self.state.drain is None
        peer, hello = self.state.peers.get(uid), self.hello(uid)
        if peer is None or hello is None or peer.muted_until > self.now:
            return False
        return hello.ready and (not hello.draining or self.stays(uid))

    def stays(self, uid: str) -> bool:
        """Whether a draining member would be in the next world, after another worker's failure ended the attempt."""
        hello, last, failure = self.hello(uid), self.state.last_world, self.state.failure
        if hello is None or not hello.stays or last is None or failure is None or self.state.attempt is not None:
            return False
        ended = self.state.failed == last.attempt_id and uid in last.uids and failure.reason != DRAINED
        return ended and bool(failure.pod) and failure.pod != last.member(uid).pod

    def on_its_way_out(self, uid: str) -> bool:
        """Whether a member is lost or leaves."""
        hello = self.hello(uid)
        return uid != self.state.me and (hello is None or hello.draining)

    def usable_members(self) -> tuple[Member, ...]:
        """Return the members of the newest generation that can be in the next world, in order of index."""
        return tuple(m for m in self.membership.members if self.usable(m.pod_uid)) if self.membership else ()

    def started(self) -> AttemptId | None:
        """Return the highest attempt that started, as the operator, this launcher or a live peer reports."""
        peers = [hello.started for uid in self.state.peers if (hello := self.hello(uid))]
        operator = self.membership.active if self.membership else None
        return highest(self.state.started, operator, *peers)

    def fail(self, failure: Failure) -> None:
        attempt = self.state.attempt
        if attempt is None or failure in attempt.failures:
            return
        failed_at = self.now if attempt.failed_at is None else attempt.failed_at
        self.set_attempt(failures=(*attempt.failures, failure), failed_at=failed_at)


def lost(member: Member, how: str, now: float) -> Failure:
    """Return the failure for a lost member of the attempt."""
    return Failure(
        cause=Cause.INFRASTRUCTURE,
        reason="MemberLost",
        message=f"the launcher of {member.pod or member.pod_uid} is lost ({how})",
        priority=Priority.MEMBER_LOST,
        at=now,
        pod=member.pod,
        node=member.node,
    )
