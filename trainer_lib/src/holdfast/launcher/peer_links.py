"""The links to other launchers: the control channels, and the TCP store that the first members serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.event_pump import EventPump
from holdfast.launcher.membership import events as e
from holdfast.launcher.membership import messages, state_machine
from holdfast.launcher.membership.messages import Failure, Priority
from holdfast.launcher.membership.state import State
from holdfast.launcher.network.control_channel import Address, ControlChannel
from holdfast.launcher.network.tcp_store import StoreHost
from holdfast.launcher.status.status_document import Identity

_log = logging.getLogger("holdfast.launcher")
# The coordinator, and the member that replaces a lost coordinator.
_WARM_STORES = 2


class PeerLinks:
    """Turns reports of peers and of the store into events, and adapts the channels to the membership."""

    def __init__(
        self, identity: Identity, pump: EventPump, *, changed: Callable[[], None], broken: Callable[[str], None]
    ) -> None:
        self._identity = identity
        self._pump = pump
        self._changed = changed
        self._key: bytes | None = None
        self.rejected = 0
        self.control = ControlChannel(me=identity.pod_uid, listener=self)
        self.store = StoreHost(self._store_lost, on_broken=broken)

    def observe(self, before: State, after: State) -> None:
        """Adapt the channels to a change of the membership or of the accepted world."""
        if after.membership is not before.membership or after.accepted_world is not before.accepted_world:
            self._connect()

    def take(self, event: e.MembershipSeen, key: bytes) -> None:
        """Process a membership, whose members authenticate with this key."""
        self._key = key
        self._pump.feed(event)
        self._connect()

    def keep_store_warm(self) -> None:
        """Keep a store process ready on the first members, but never start it while a world forms."""
        known = [self._pump.state.membership, self._pump.state.world]
        first = {member.pod_uid for group in known if group is not None for member in group.members[:_WARM_STORES]}
        if self._identity.pod_uid in first:
            self.store.warm()

    def peer_up(self, uid: str) -> None:
        _log.info("connected to %s", uid)
        self._pump.feed(e.PeerUp(pod_uid=uid))

    def peer_down(self, uid: str, how: e.How) -> None:
        _log.info("lost %s (%s)", uid, how)
        self._pump.feed(e.PeerDown(pod_uid=uid, how=how))

    def peer_message(self, uid: str, body: Mapping[str, Any]) -> None:
        """Process a message of a peer. Raises `DocumentError` if it is not valid, which closes the channel."""
        self._pump.feed(e.Received(sender=uid, message=messages.from_json(body)))

    def connection_rejected(self) -> None:
        """Count a connection that was refused because it did not prove that it has the job's key."""
        self.rejected += 1
        self._changed()

    def _connect(self) -> None:
        state = self._pump.state
        membership = state.membership
        if membership is None or self._key is None:
            return
        members = state_machine.contacts(state)
        self.control.configure(
            key=self._key,
            peers={uid: Address(host=m.host, port=m.control_port) for uid, m in members.items()},
            heartbeat=membership.rules.heartbeat,
            dead_after=membership.rules.dead_after,
        )
        if state.attempt is None:
            self.keep_store_warm()

    def _store_lost(self, attempt_id: AttemptId, message: str) -> None:
        attempt = self._pump.state.attempt
        if attempt is None or attempt.world.attempt_id != attempt_id:
            self._pump.feed(e.StoreFailed(attempt_id=attempt_id, message=message))
            return
        failure = Failure(
            cause=Cause.INFRASTRUCTURE,
            reason="StoreLost",
            message=message,
            priority=Priority.KILLED,
            at=self._pump.now(),
            pod=self._identity.pod,
            node=self._identity.node,
        )
        self._pump.feed(e.RankFailed(attempt_id=attempt_id, failure=failure))
