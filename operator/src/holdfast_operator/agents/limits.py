"""The limits of a server for its clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast_operator.runtime.rate_limit import RateLimit

ALERTS_PATH = "/v1/alerts"
# Memory of one connection in the worst case: TLS, HTTP and buffers.
CONNECTION_BYTES = 50 * 1024
# Of the process's memory limit. Of 512 MiB, the interpreter takes 100, jobs a quarter, and lists about as much.
_CONNECTIONS_SHARE = 3 / 8
_FEWEST_CONNECTIONS = 500


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Every limit of a server. A client that exceeds one loses its connection and affects no other client."""

    # A worker of 1,024 that has lost all others reports about 200 KiB.
    body_bytes: int = 256 * 1024
    bodies_of_a_pod: int = 4
    alerts_bytes: int = 8 * 1024 * 1024
    alert_bodies: int = 1
    alerts_seconds: float = 10.0
    """The time limit for the results of alerts. Afterwards the sender must repeat them."""
    header_bytes: int = 8190
    headers: int = 32
    token_bytes: int = 8000
    connections: int = 20_000
    connections_per_peer: int = 2_000
    unproved: int = 1_000
    """Connections without an accepted token, TLS handshakes included. Another one closes the oldest."""
    unproved_of_a_peer: int = 64
    hold_seconds: float = 30.0
    first_request_seconds: float = 10.0
    idle_seconds: float = 75.0
    body_seconds: float = 10.0
    handshake_seconds: float = 10.0
    authentications: int = 16
    authentications_waiting: int = 1_000
    authentications_waiting_of_a_peer: int = 250
    # Of the concurrent token reviews: neither one address nor renewals of known tokens may use all of them.
    authentications_of_a_peer: int = 4
    renewals: int = 12
    of_a_pod: RateLimit = field(default_factory=lambda: RateLimit(a_second=10.0, at_once=50))
    """Requests per second, for reports and polls separately.

    A sidecar needs one per second, and more after many changes.
    """
    bytes_of_a_pod: RateLimit = field(default_factory=lambda: RateLimit(a_second=256 * 1024.0, at_once=1024 * 1024))
    """Bytes of reports per second: the largest report once per second."""
    report_bytes_at_once: int = 16 * 1024
    """Larger reports are parsed in a thread, in turns, while the event loop serves other requests."""

    @classmethod
    def within(cls, memory_bytes: int | None) -> Limits:
        """Return the limits of a process with this much memory (None: no limit), most of which has other uses."""
        most = cls()
        if memory_bytes is None:
            return most
        share = int(memory_bytes * _CONNECTIONS_SHARE) // CONNECTION_BYTES
        connections = min(most.connections, max(share, _FEWEST_CONNECTIONS))
        unproved = min(most.unproved, connections // 4)
        return replace(most, connections=connections, unproved=unproved)

    def most_of_body(self, path: str) -> int:
        """Return the largest body that this path takes, in bytes."""
        return self.alerts_bytes if path == ALERTS_PATH else self.body_bytes

    @property
    def request_seconds(self) -> float:
        """Return the longest time that a request may keep its connection without an answer."""
        return self.hold_seconds + 20.0
