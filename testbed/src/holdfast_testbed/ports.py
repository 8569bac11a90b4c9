"""Ports that are told to a process before it listens on them."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 32000
"""Below those that the kernel gives to outgoing connections: nobody gets one of them by chance meanwhile."""


def free_port(address: str = "127.0.0.1") -> int:
    """A port of an address of this machine, loopback unless another is given, that nobody listens on."""
    while True:
        port = random.SystemRandom().randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
