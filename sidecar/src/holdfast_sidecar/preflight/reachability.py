"""Connects to other workers' launchers. A connection is closed at once; a successful connect is the result."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast_sidecar import constants as c
from holdfast_sidecar.preflight.checks import Reachability
from holdfast_sidecar.protocol.preflight import Peer
from holdfast_sidecar.runtime.clock import Clock


def dial(peer: Peer) -> str:
    """Return the reason why the peer is not reached; empty if it is."""
    try:
        socket.create_connection((peer.ip, peer.port), timeout=c.DIAL_SECONDS).close()
    except TimeoutError:
        return f"no answer within {c.DIAL_SECONDS:.0f} s"
    except (OSError, OverflowError, UnicodeError) as error:
        code = error.errno if isinstance(error, OSError) else None
        return os.strerror(code).lower() if code else str(error)[:80]
    return ""


class PeerDialer:
    """`step` belongs to one thread, the other methods to all. Peers that the operator no longer names are removed."""

    def __init__(self, clock: Clock, dial_one: Callable[[Peer], str] = dial) -> None:
        self._clock, self._dial = clock, dial_one
        self._lock = threading.Lock()
        self._reach: Reachability | None = None
        self._since: dict[Peer, float] = {}
        self._turn = 0

    def set_peers(self, peers: tuple[Peer, ...] | None) -> None:
        """Set the peers that the operator names; None if it names none."""
        with self._lock:
            known = {peer.uid for peer in peers or ()}
            self._since = {peer: at for peer, at in self._since.items() if peer in (peers or ())}
            before = self._reach or Reachability()
            self._reach = Reachability(
                told=peers is not None,
                peers=peers or (),
                reached=before.reached & known,
                errors={uid: error for uid, error in before.errors.items() if uid in known},
            )

    def reach(self) -> Reachability | None:
        """Return the results so far."""
        with self._lock:
            return self._reach

    def step(self) -> None:
        """Connect to some of the peers that are not reached yet."""
        reach = self.reach()
        left = [] if reach is None else [peer for peer in reach.peers if peer.uid not in reach.reached]
        if not left:
            return
        self._turn = (self._turn + c.DIALS_A_ROUND) % len(left) if len(left) > c.DIALS_A_ROUND else 0
        chosen = [*left[self._turn :], *left[: self._turn]][: c.DIALS_A_ROUND]
        with ThreadPoolExecutor(min(len(chosen), c.DIALS_AT_ONCE)) as threads:
            self._take(chosen, list(threads.map(self._dial, chosen)))

    def _take(self, peers: Sequence[Peer], errors: Sequence[str]) -> None:
        now = self._clock.monotonic()
        with self._lock:
            reach = self._reach or Reachability()
            wanted = {peer.uid for peer in reach.peers}
            found = {peer: error for peer, error in zip(peers, errors, strict=True) if peer.uid in wanted}
            for peer, error in found.items():
                if error:
                    self._since.setdefault(peer, now)
                else:
                    self._since.pop(peer, None)
            told = {peer.uid: (error, now - self._since[peer]) for peer, error in found.items() if error}
            reached = reach.reached | {peer.uid for peer, error in found.items() if not error}
            kept = {uid: error for uid, error in reach.errors.items() if uid not in reached}
            self._reach = Reachability(told=reach.told, peers=reach.peers, reached=reached, errors={**kept, **told})
