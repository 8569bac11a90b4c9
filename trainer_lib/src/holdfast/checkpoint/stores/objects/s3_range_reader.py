"""Parts of objects over plain connections, by an address that is signed once for each object. No torch.

botocore makes, signs and judges each request anew, and its bodies are copied twice on their way, which takes as long
as the bytes themselves. Here an answer's bytes go from the socket to where they stay. Whatever does not go as it
should is left to the caller, whose general way has retries, new credentials, and words for what is wrong.
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

# A smaller part is not worth an address of its own.
LEAST_BYTES: Final = 1 << 20
SIGNED_SECONDS: Final = 3600
_USED_SECONDS: Final = 600.0
_READ_AT_ONCE: Final = 1 << 20
# A server that wants something else gets no more tries.
_GIVEN_UP: Final = 16

Sign = Callable[[str], str]
"""The address of an object; empty if none can be made."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """In seconds."""

    connect: float
    read: float


@dataclass
class Ranges:
    """Reads ranges of the objects of one bucket; any thread may."""

    sign: Sign
    timeouts: Timeouts
    authorities: str | None = None
    """The file of certificates, if not the system's."""
    clock: Callable[[], float] = time.monotonic
    _signed: dict[str, tuple[str, float]] = field(default_factory=dict)
    _idle: dict[str, list[http.client.HTTPConnection]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _failed: int = 0  # in a row

    def read(self, key: str, tag: str, offset: int, target: memoryview) -> int:
        """Fill `target` from the object that has this tag; how many bytes came, from its beginning on."""
        scheme, place, path = self._address(key)
        proxied = scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(place)
        if not place or self._failed >= _GIVEN_UP or proxied:
            return 0
        asked = {"Range": f"bytes={offset}-{offset + target.nbytes - 1}", "If-Match": tag}
        connection, good, filled = None, False, 0
        try:
            connection = self._connection(scheme, place)
            connection.request("GET", path, headers=asked)
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
