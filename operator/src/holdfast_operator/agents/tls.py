"""The TLS context of the agents' API, and the CA bundle that pods trust.

A ``CertificateSource`` provides both: the built-in CA (``certificate_authority.py``) or a Secret that is mounted into
the operator's pod (``mounted_certificate.py``).
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from holdfast_operator.errors import RotationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A certificate, with its intermediate CAs if it has any, and its key. PEM."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The server certificate to serve, and the CAs that pods must trust (PEM)."""

    server: KeyPair
    bundle: str
    authority_expires: datetime


class CertificateSource(Protocol):
    """Provides the credentials that are due now. Raises ``RotationError`` if it has none that can be used."""

    @property
    def refresh_seconds(self) -> float: ...

    def current(self) -> Credentials: ...


class TlsKeeper:
    """Keeps one ``ssl.SSLContext`` served with a valid certificate, and the bundle that pods need.

    ``refresh`` is cheap: call it at the start and repeatedly. ``on_bundle`` is called when the bundle changed.
    """

    def __init__(self, source: CertificateSource, *, on_bundle: Callable[[], None] = lambda: None) -> None:
        self._source = source
        self._on_bundle = on_bundle
        self._credentials: Credentials | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.context = server_context()

    @property
    def credentials(self) -> Credentials:
        """The credentials in use."""
        if self._credentials is None:
            raise RotationError("refresh has not been called")
        return self._credentials

    def refresh(self) -> None:
        """Serve the certificate that is due now."""
        before, due = self._credentials, self._source.current()
        if before is None or before.server != due.server:
            load(self.context, due.server)
            logger.info("serving a certificate that is valid until %s", due.server.parsed.not_valid_after_utc)
        self._credentials = due
        if before is not None and before.bundle != due.bundle:
            logger.info("the CA bundle changed")
            self._on_bundle()

    def start(self) -> None:
        """Refresh in a thread from now on."""
        self._thread = threading.Thread(target=self._keep, name="tls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _keep(self) -> None:
        while not self._stop.wait(self._source.refresh_seconds):
            try:
                self.refresh()
            except RotationError as error:
                logger.error("the certificate was not refreshed, the last one stays in use: %s", error)
            except Exception:
                logger.exception("the certificate was not refreshed, the last one stays in use")


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load a key pair into a context. ``ssl`` reads only files: this one is in memory, so the key is on no disk."""
    handle = os.memfd_create("holdfast-tls")
    try:
        os.write(handle, pair.certificate + b"\n" + pair.key)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def check_pair(pair: KeyPair) -> None:
    """Raise ``ValueError`` if the key does not belong to the certificate."""
    key = serialization.load_pem_private_key(pair.key, None)
    if key.public_key() != pair.parsed.public_key():
        raise ValueError("key and certificate differ")
