"""The operator's own CA and the certificate of the agents' API.

The CA is made at the first start and kept in the Secret ``holdfast-ca``. Long before it expires a next one is made
and joins the bundle that pods trust; only after ``overlap``, when every pod has it, does it sign. The old one stays
in the bundle until it expires. Server certificates live in memory only.

Invariant: at any time, the certificate that is served is signed by a CA that has been in the bundle for ``overlap``
(or since the first start).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_operator.cluster.secrets import SecretStore, ensure
from holdfast_operator.errors import RotationError

logger = logging.getLogger(__name__)

CA_SECRET = "holdfast-ca"  # noqa: S105 - a name
_CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Periods:
    """How long things live."""

    authority: timedelta = timedelta(days=3650)
    prepare_next: timedelta = timedelta(days=365)
    overlap: timedelta = timedelta(days=7)
    server: timedelta = timedelta(days=30)
    renew_server: timedelta = timedelta(days=10)


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The CA that signs, the one that will, and the one that did."""

    current: KeyPair
    next: KeyPair | None = None
    next_since: datetime | None = None
    previous: bytes | None = None

    @property
    def bundle(self) -> str:
        """What pods trust, PEM."""
        parts = [self.current.certificate, self.next.certificate if self.next else b"", self.previous or b""]
        return b"".join(parts).decode()


def new_authority(now: datetime, periods: Periods) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # The name tells CAs apart, so that a verifier never tries the wrong key of two.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"holdfast-ca-{serial:x}"[:60])])
    certificate = (
        _builder(name, name, key.public_key(), (now, now + periods.authority))
        .serial_number(serial)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def issue(authority: KeyPair, names: Iterable[str], now: datetime, lifetime: timedelta) -> KeyPair:
    """A server certificate for these DNS names and addresses."""
    wanted = sorted(set(names))
    if not wanted:
        raise RotationError("a server certificate needs at least one name")
    issuer = authority.parsed
    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise RotationError(f"Secret {CA_SECRET}: its key is of another kind than ours")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast-operator")])
    end = min(now + lifetime, issuer.not_valid_after_utc)
    signer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), (now, end))
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in wanted]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer_id, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _pair(certificate, key)


def rotate(authority: Authority, now: datetime, periods: Periods) -> Authority:
    """What the CA should be now. Returns the same value when nothing is due."""
    if authority.previous and x509.load_pem_x509_certificate(authority.previous).not_valid_after_utc <= now:
        authority = replace(authority, previous=None)
    if authority.next is None:
        if now + periods.prepare_next < authority.current.parsed.not_valid_after_utc:
            return authority
        return replace(authority, next=new_authority(now, periods), next_since=now)
    if authority.next_since is None or now < authority.next_since + periods.overlap:
        return authority
    return Authority(current=authority.next, previous=authority.current.certificate)


def to_secret(authority: Authority) -> dict[str, bytes]:
    data = {"ca.crt": authority.current.certificate, "ca.key": authority.current.key}
    if authority.next is not None and authority.next_since is not None:
        data |= {"next.crt": authority.next.certificate, "next.key": authority.next.key}
        data["next-since"] = authority.next_since.isoformat().encode()
    if authority.previous:
        data["previous.crt"] = authority.previous
    return data


def from_secret(data: Mapping[str, bytes]) -> Authority:
    """Reads what ``to_secret`` wrote; refuses anything else by name."""
    try:
        following = None
        if "next.crt" in data:
            following = KeyPair(certificate=data["next.crt"], key=data["next.key"])
        authority = Authority(
            current=KeyPair(certificate=data["ca.crt"], key=data["ca.key"]),
            next=following,
            next_since=datetime.fromisoformat(data["next-since"].decode()) if following else None,
            previous=data.get("previous.crt"),
        )
        for pair in (authority.current, authority.next):
            if pair is not None:
                _check_pair(pair)
    except (KeyError, ValueError, TypeError) as error:
        raise RotationError(
            f"Secret {CA_SECRET} is not one that Holdfast wrote: delete it, and a new CA is made ({error})"
        ) from None
    return authority


def _check_pair(pair: KeyPair) -> None:
    key = serialization.load_pem_private_key(pair.key, None)
    if key.public_key() != pair.parsed.public_key():
        raise ValueError("key and certificate differ")


class TlsKeeper:
    """Keeps one ``ssl.SSLContext`` served with a valid certificate, and the bundle that pods need.

    ``refresh`` is cheap; call it at start and now and then. ``on_bundle`` is called when the bundle changed.
    """

    def __init__(
        self,
        store: SecretStore,
        names: Iterable[str],
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        periods: Periods | None = None,
        on_bundle: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._names = tuple(names)
        self._clock = clock
        self._periods = periods or Periods()
        self._on_bundle = on_bundle
        self._authority: Authority | None = None
        self._server: KeyPair | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    @property
    def bundle(self) -> str:
        """PEM of all CAs that a pod must trust now."""
        if self._authority is None:
            raise RotationError("refresh has not been called")
        return self._authority.bundle

    @property
    def served(self) -> KeyPair:
        """The server certificate in use."""
        if self._server is None:
            raise RotationError("refresh has not been called")
        return self._server

    @property
    def authority_expires(self) -> datetime:
        """When the CA that signs now expires."""
        if self._authority is None:
            raise RotationError("refresh has not been called")
        return self._authority.current.parsed.not_valid_after_utc

    def refresh(self) -> None:
        """Read the CA, rotate what is due, and serve a certificate that is good for a while."""
        before, now = self._authority, self._clock()
        authority = self._current(now)
        renewed = before is None or before.current != authority.current
        if renewed or self._server is None or self._due(self._server, now):
            self._server = issue(authority.current, self._names, now, self._periods.server)
            _load(self.context, self._server)
        self._authority = authority
        if before is not None and before.bundle != authority.bundle:
            logger.info("the CA bundle changed")
            self._on_bundle()

    def start(self, seconds: float = 600.0) -> None:
        """Refresh in a thread from now on."""
        self._thread = threading.Thread(target=self._keep, args=(seconds,), name="tls", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _keep(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.refresh()
            except Exception:
                # The certificate in use stays good for days: say it and try again.
                logger.exception("certificates were not refreshed")

    def _due(self, server: KeyPair, now: datetime) -> bool:
        return now + self._periods.renew_server >= server.parsed.not_valid_after_utc

    def _current(self, now: datetime) -> Authority:
        while True:
            stored = ensure(
                self._store,
                CA_SECRET,
                lambda: to_secret(Authority(current=new_authority(now, self._periods))),
            )
            authority = from_secret(stored.data)
            due = rotate(authority, now, self._periods)
            # Lost the race: somebody else rotated. Read what they made.
            if due == authority or self._store.replace(CA_SECRET, to_secret(due), stored.version):
                return due


def _load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """``ssl`` reads files only: give it one in memory, so that the key touches no disk."""
    handle = os.memfd_create("holdfast-tls")
    try:
        os.write(handle, pair.certificate + pair.key)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    valid: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .not_valid_before(valid[0] - _CLOCK_SKEW)
        .not_valid_after(valid[1])
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
