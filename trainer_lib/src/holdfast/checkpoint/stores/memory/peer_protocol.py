"""Messages and data between the memory servers of launchers over one TCP connection, and the proof of the key."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from holdfast.checkpoint.stores.memory.slot import FileRange
from holdfast.core.errors import CheckpointError

MAX_MESSAGE: Final = 256 << 20
# The largest message before the other side has proved that it has the key.
MAX_HANDSHAKE: Final = 1024
HANDSHAKE_SECONDS: Final = 5.0
# The wait of one send or receive, after which `check` is called.
SLICE_SECONDS: Final = 0.25
_LENGTH: Final = 4
_TIMEOUT_SECONDS: Final = 30.0
# A node without power sends nothing: its connections are closed after this many seconds without data.
_SILENT_SECONDS: Final = 60
_THROTTLED_BYTES: Final = 1 << 20
_PART_BYTES: Final = 1 << 20


class Wire:
    """Messages and data over one connection.

    `check` may raise during waits. `until` is the deadline of the greeting.
    """

    def __init__(
        self,
        sock: socket.socket,
        check: Callable[[], None] = lambda: None,
        *,
        limit: int = MAX_MESSAGE,
        every: float = SLICE_SECONDS,
    ) -> None:
        self._socket = sock
        self._check = check
        self._every = every
        self.limit = limit
        self.until = float("inf")
        self.received_data = False  # whether any data was received
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.settimeout(every)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. Raise `OSError` on failure."""
        raw = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(memoryview(len(raw).to_bytes(_LENGTH, "big") + raw))

    def receive(self, timeout: float = _TIMEOUT_SECONDS) -> dict[str, Any]:
        """Receive one message, within `timeout` seconds without data.

        Raise `OSError` or `CheckpointError` on failure.
        """
        head = bytearray(_LENGTH)
        self.receive_into(memoryview(head), timeout)
        length = int.from_bytes(head, "big")
        if length > self.limit:
            raise CheckpointError(f"a message of {length} bytes")
        raw = bytearray()
        while len(raw) < length:  # allocate only what was received, because the length is not trusted
            part = bytearray(min(_PART_BYTES, length - len(raw)))
            self.receive_into(memoryview(part))
            raw += part
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"a message that is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise CheckpointError("a message must be a JSON object")
        return message

    def send_bytes(self, data: memoryview) -> None:
        rest = data
        while rest.nbytes:
            rest = rest[self._patiently(lambda rest=rest: self._socket.send(rest)) :]  # type: ignore[misc]

    def send_file(self, place: FileRange, per_second: int | None = None) -> None:
        """Send bytes of a file from the page cache without copying them."""
        started, sent = time.monotonic(), 0
        while sent < place.nbytes:
            most = min(place.nbytes - sent, _THROTTLED_BYTES if per_second else place.nbytes)
            at = place.offset + sent
            count = self._patiently(lambda at=at, most=most: self._send_some(place.fd, at, most))  # type: ignore[misc]
            sent += count
            if per_second:
                self._wait_until(started + sent / per_second)

    def receive_into(self, target: memoryview, timeout: float = _TIMEOUT_SECONDS) -> None:
        """Fill all of `target`."""
        rest = target
        while rest.nbytes:
            count = self._patiently(lambda rest=rest: self._socket.recv_into(rest), timeout)  # type: ignore[misc]
            if not count:
                raise ConnectionError("the other side closed the connection")
            self.received_data = True
            rest = rest[count:]

    def _send_some(self, fd: int, offset: int, most: int) -> int:
        try:
            sent = os.sendfile(self._socket.fileno(), fd, offset, most)
        except BlockingIOError:
            writable = select.poll()
            writable.register(self._socket, select.POLLOUT)
            if not writable.poll(self._every * 1000):
                raise TimeoutError from None
            return self._send_some(fd, offset, most)
        if not sent:
            raise ConnectionError("the connection was closed during the transfer")
        return sent

    def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left, self._every))

    def _patiently(self, act: Callable[[], int], timeout: float = _TIMEOUT_SECONDS) -> int:
        deadline = min(self.until, time.monotonic() + timeout)
        while time.monotonic() <= self.until:
            try:
                return act()
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    raise
        raise TimeoutError("it took too long")

    def close(self) -> None:
        """Close the connection, which also ends the waits on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
