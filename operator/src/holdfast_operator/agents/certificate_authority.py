"""The built-in CA, and the server certificates that it signs.

The operator creates the CA at its first start and keeps it in the Secret ``holdfast-ca``. Long before it expires, the
operator adds a successor to the bundle that pods trust. The successor signs only after ``overlap``, when every pod
has it. The old CA stays in the bundle until it expires. Server certificates live in memory only.

Invariant: the CA that signed the served certificate has been in the bundle for ``overlap``, or since the first start.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_operator.agents.tls import Credentials, KeyPair, check_pair
from holdfast_operator.cluster.secrets import SecretStore, ensure
from holdfast_operator.errors import RotationError

CA_SECRET = "holdfast-ca"  # noqa: S105 - a name
_CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Periods:
    """Lifetimes of CAs and certificates, and how early they are renewed."""

    authority: timedelta = timedelta(days=3650)
    prepare_next: timedelta = timedelta(days=365)
    overlap: timedelta = timedelta(days=7)
    server: timedelta = timedelta(days=30)
    renew_server: timedelta = timedelta(days=10)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The CA that signs, its successor and its predecessor."""

    current: KeyPair
    next: KeyPair | None = None
    next_since: datetime | None = None
    previous: bytes | None = None

    @property
    def bundle(self) -> str:
        """The CAs that pods trust, PEM."""
        parts = [self.current.certificate, self.next.certificate if self.next else b"", self.previous or b""]
        return b"".join(parts).decode()


def new_authority(now: datetime, periods: Periods) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Each CA has its own name, so that a verifier never tries the wrong key of two.
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
    """Return a server certificate for these DNS names and addresses."""
    wanted = sorted(set(names))
    if not wanted:
        raise RotationError("a server certificate needs at least one name")
    issuer = authority.parsed
    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise RotationError(f"Secret {CA_SECRET}: its key is not an elliptic curve key")
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
    """Return the CA that is due now: the same value if nothing is due."""
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
    """Read what ``to_secret`` wrote. Raises ``RotationError`` for anything else."""
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
                check_pair(pair)
    except (KeyError, ValueError, TypeError) as error:
        raise RotationError(
            f"Secret {CA_SECRET} was not written by Holdfast ({error}): delete it, and the operator creates a new CA"
        ) from None
    return authority


class BuiltInAuthority:
    """A ``CertificateSource``: the CA in the operator's Secret, and a certificate of it for these names."""

    refresh_seconds = 600.0

    def __init__(
        self,
        store: SecretStore,
        names: Iterable[str],
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._names = tuple(names)
        self._clock = clock
        self._periods = Periods()
        self._signer: KeyPair | None = None
        self._server: KeyPair | None = None

    def current(self) -> Credentials:
        """Read the CA, rotate what is due, and renew the server certificate in time."""
        now = self._clock()
        authority = self._rotated(now)
        if self._server is None or self._signer != authority.current or self._is_due(self._server, now):
            self._server = issue(authority.current, self._names, now, self._periods.server)
        self._signer = authority.current
        return Credentials(
            server=self._server,
            bundle=authority.bundle,
            authority_expires=authority.current.parsed.not_valid_after_utc,
        )

    def _is_due(self, server: KeyPair, now: datetime) -> bool:
        return now + self._periods.renew_server >= server.parsed.not_valid_after_utc

    def _rotated(self, now: datetime) -> Authority:
        while True:
            stored = ensure(
                self._store,
                CA_SECRET,
                lambda: to_secret(Authority(current=new_authority(now, self._periods))),
            )
            authority = from_secret(stored.data)
            due = rotate(authority, now, self._periods)
            # If another replica rotated first, read its result.
            if due == authority or self._store.replace(CA_SECRET, to_secret(due), stored.version):
                return due


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
