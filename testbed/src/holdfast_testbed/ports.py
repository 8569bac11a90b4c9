"""Ports that are chosen before a process listens on them."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 32000
"""Ports below the range of outgoing connections, so that no other process gets one by chance."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port of an address of this machine, by default loopback."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
