"""A server certificate that others renew: a Secret of the type ``kubernetes.io/tls``, mounted as a folder.

The folder has ``tls.crt``, ``tls.key`` and ``ca.crt``, as cert-manager writes them. The kubelet replaces all three at
once when the Secret changes.

Invariant: after the first start, the CA that signed the served certificate has been in the bundle for ``OVERLAP``,
unless every such certificate has expired.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from holdfast_operator.agents.tls import Credentials, KeyPair, check_pair, load, server_context
from holdfast_operator.errors import RotationError

OVERLAP = timedelta(minutes=5)
"""Pods read a changed bundle within about two minutes: the kubelet updates mounted ConfigMaps that often."""
_BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Version:
    """One content of the Secret, and when the operator first read it."""

    server: KeyPair
    authority: str
    since: datetime


class MountedCertificate:
    """A ``CertificateSource``. ``host`` is the name by which sidecars verify the operator."""

    refresh_seconds = 30.0

    def __init__(self, folder: Path, host: str, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._folder = folder
        self._host = host
        self._clock = clock
        self._versions: tuple[Version, ...] = ()

    def current(self) -> Credentials:
        """Read the folder. Raises ``RotationError`` for content that sidecars would refuse."""
        now = self._clock()
        found = _read(self._folder, now if self._versions else _BEGINNING)
        newest = self._versions[-1] if self._versions else None
        if newest is None or (newest.server, newest.authority) != (found.server, found.authority):
            _check(found, self._host)
            self._versions = (*self._versions, found)
        self._versions = kept(self._versions, now)
        bundle = "".join(dict.fromkeys(version.authority for version in self._versions))
        expires = min(ca.not_valid_after_utc for ca in x509.load_pem_x509_certificates(found.authority.encode()))
        return Credentials(server=served(self._versions, now).server, bundle=bundle, authority_expires=expires)


def served(versions: Sequence[Version], now: datetime) -> Version:
    """Return the newest version with a valid certificate whose CA has been in the bundle for ``OVERLAP``."""
    for version in reversed(versions):
        known_since = min(other.since for other in versions if other.authority == version.authority)
        if known_since <= now - OVERLAP and now < version.server.parsed.not_valid_after_utc:
            return version
    return versions[-1]


def kept(versions: tuple[Version, ...], now: datetime) -> tuple[Version, ...]:
    """Return the versions whose CA pods must trust: each until its successor was served for ``OVERLAP``."""
    pairs = itertools.pairwise(versions)
    return (*(old for old, new in pairs if now < new.since + 2 * OVERLAP), versions[-1])


def _read(folder: Path, now: datetime) -> Version:
    """Read the folder. The kubelet switches the link ``..data`` from one complete content to the next."""
    link = folder / "..data"
    content = link.resolve() if link.exists() else folder
    try:
        pair = KeyPair(certificate=(content / "tls.crt").read_bytes(), key=(content / "tls.key").read_bytes())
        authority = (content / "ca.crt").read_text("ascii").strip()
        if not authority:
            raise ValueError("ca.crt is empty")
    except (OSError, ValueError) as error:
        raise RotationError(
            f"the TLS Secret in {folder} cannot be read ({error}): it needs tls.crt, tls.key and ca.crt"
        ) from None
    return Version(server=pair, authority=f"{authority}\n", since=now)


def _check(version: Version, host: str) -> None:
    """Check, in memory, that a client that trusts ``ca.crt`` accepts a server with the certificate."""
    try:
        check_pair(version.server)
        server = server_context()
        load(server, version.server)
        _handshake(server, ssl.create_default_context(cadata=version.authority), host)
    except (ValueError, TypeError, OSError) as error:
        raise RotationError(
            f"sidecars would refuse the certificate of the TLS Secret ({error}): it must name {host}, be valid, have"
            " its key in tls.key, and be signed by the CA in ca.crt"
        ) from None


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Perform a TLS handshake. Raises ``ssl.SSLError`` if the client refuses the server."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    waiting = True
    while waiting:
        waiting = False
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting = True
