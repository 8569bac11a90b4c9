"""Ports that are chosen before a process listens on them."""

from __future__ import annotations

import random
import socket
from collections import deque

_FIRST, _LAST = 20000, 32000
"""Ports below the range of outgoing connections, so that no other process gets one by chance."""
_given: deque[int] = deque(maxlen=1000)
"""The last ones that were chosen here. Their processes may not listen yet."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port of an address of this machine, by default loopback."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _LAST)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        _given.append(port)
        return port
