"""Reads of object ranges over plain connections, with a signed URL for each object. No torch.

botocore builds, signs and checks each request separately, and copies its bodies twice, which takes as long as the
transfer. This module receives a reply's bytes directly into their target. If anything fails, the caller falls back to
the general reads, which have retries, new credentials, and error messages.
"""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final
from urllib.parse import urlsplit

# A smaller part is not worth a signed URL.
LEAST_BYTES: Final = 1 << 20
SIGNED_SECONDS: Final = 3600
_USED_SECONDS: Final = 600.0
_READ_AT_ONCE: Final = 1 << 20
# After this many consecutive failures, the server is not tried again.
_GIVEN_UP: Final = 16

Sign = Callable[[str], str]
"""Returns the signed URL of an object; empty if it cannot be created."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The timeouts in seconds."""

    connect: float
    read: float


@dataclass
class Ranges:
    """Reads ranges of the objects of one bucket. Any thread may use it."""

    sign: Sign
    timeouts: Timeouts
    authorities: str | None = None
    """The file of CA certificates, unless the system's are used."""
    clock: Callable[[], float] = time.monotonic
    _signed: dict[str, tuple[str, float]] = field(default_factory=dict)
    _idle: dict[str, list[http.client.HTTPConnection]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _failed: int = 0  # consecutive failures

    def read(self, key: str, tag: str, offset: int, target: memoryview) -> int:
        """Fill `target` from the object with this tag, and return how many bytes were read from its beginning."""
        scheme, place, path = self._address(key)
        proxied = scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(place)
        if not place or self._failed >= _GIVEN_UP or proxied:
            return 0
        headers = {"Range": f"bytes={offset}-{offset + target.nbytes - 1}", "If-Match": tag}
        connection, good, filled = None, False, 0
        try:
            connection = self._connection(scheme, place)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            good = answer.status == http.client.PARTIAL_CONTENT and answer.length == target.nbytes
            while good and filled < target.nbytes:
                count = answer.readinto(target[filled : filled + _READ_AT_ONCE])
                good, filled = count > 0, filled + count
        except (OSError, http.client.HTTPException):
            good = False
        if good and connection is not None:
            self._keep(place, connection)
        else:
            self._drop(key, connection)
        return filled

    def _drop(self, key: str, connection: http.client.HTTPConnection | None) -> None:
        self._failed += 1
        self._signed.pop(key, None)
        if connection is not None:
            connection.close()

    def _address(self, key: str) -> tuple[str, str, str]:
        now = self.clock()
        url, since = self._signed.get(key, ("", 0.0))
        if not url or now - since > _USED_SECONDS:
            url = self.sign(key)
            self._signed[key] = url, now
        parts = urlsplit(url)
        return parts.scheme, parts.netloc, url.partition(parts.netloc)[2] if url else ""

    def _connection(self, scheme: str, place: str) -> http.client.HTTPConnection:
        with self._lock:
            idle = self._idle.setdefault(place, [])
            if idle:
                return idle.pop()
        return self._connected(scheme, place)

    def _connected(self, scheme: str, place: str) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if scheme == "https":
            context = ssl.create_default_context(cafile=self.authorities)
            connection = http.client.HTTPSConnection(place, timeout=self.timeouts.connect, context=context)
        else:
            connection = http.client.HTTPConnection(place, timeout=self.timeouts.connect)
        connection.connect()
        connection.sock.settimeout(self.timeouts.read)
        return connection

    def _keep(self, place: str, connection: http.client.HTTPConnection) -> None:
        self._failed = 0
        with self._lock:
            self._idle[place].append(connection)
