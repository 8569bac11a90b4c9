"""The address by which other hosts reach this one."""

from __future__ import annotations

import socket


def address_towards(host: str, port: int) -> str:
    """Return this host's own address on the route to another. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
