"""Resolves and binds `--rdzv-endpoint`: the address of its name, which is the same on every host."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.core.errors import UsageError

_log = logging.getLogger("holdfast.launcher.rendezvous")
_LOOK_SECONDS: Final = 1.0
# The name of a pod or host may be published after its launcher has started.
_NOT_YET: Final = frozenset({socket.EAI_AGAIN, socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
Sleep = Callable[[float], Awaitable[None]]


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name. Raises `socket.gaierror`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def resolve(
    host: str, port: int, *, timeout: float, lookup: Lookup = look_up, sleep: Sleep = asyncio.sleep
) -> Sequence[str]:
    """Return the addresses of a name, which may have none yet. Raises UsageError after `timeout` seconds."""
    waited = 0.0
    while True:
        try:
            return await lookup(host, port)
        except socket.gaierror as error:
            if error.errno not in _NOT_YET or waited >= timeout:
                raise UsageError(
                    f"holdfast run: --rdzv-endpoint {host}:{port}: the name has no address ({error.strerror}): "
                    "correct it, or add it to DNS or to this host's hosts file"
                ) from error
            if not waited:
                text = "--rdzv-endpoint %s: the name has no address yet (%s); it is looked up again for %.0f s"
                _log.warning(text, host, error.strerror, timeout)
        await sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS


def choose(addresses: Sequence[str]) -> str:
    """Return the one address of a name that every launcher uses, independent of the order on its host."""

    def rank(address: str) -> tuple[bool, int, bytes]:
        parsed = ipaddress.ip_address(address)
        return parsed.is_loopback, parsed.version, parsed.packed

    return min(addresses, key=rank)


def remarks(host: str, addresses: Sequence[str]) -> list[str]:
    """Return warnings about this name that may prevent launchers of several hosts from meeting."""
    address, said = choose(addresses), []
    if len(addresses) > 1:
        listed = ", ".join(addresses)
        said.append(f"--rdzv-endpoint {host} has {len(addresses)} addresses ({listed}): all launchers use {address}")
    if ipaddress.ip_address(address).is_loopback and not _names_loopback(host):
        said.append(
            f"--rdzv-endpoint {host} is {address} on this host, which other hosts cannot reach: pass the host's "
            "network address, or correct the hosts file"
        )
    return said


def _names_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The result of binding the endpoint: a listener, or whether the address belongs to another host."""

    listener: socket.socket | None = None
    elsewhere: bool = False


def bind(address: str, port: int) -> Bound:
    """Bind the endpoint, if its address is this machine's and no process owns the port yet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        return Bound(elsewhere=error.errno != errno.EADDRINUSE)
    return Bound(listener=listener)
