"""Keys and certificates of one cluster."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = timedelta(days=30)


class Authority:
    """A certificate authority in a folder: `ca.crt`, `ca.key`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate_file = folder / "ca.crt"
        self._key_file = folder / "ca.key"

    def create(self) -> None:
        """Create the authority's own key and certificate."""
        key = _new_key(self._key_file)
        name = _name("holdfast-testbed", ())
        builder = _builder(name, name, key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        _write(self.certificate_file, builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))

    def issue(
        self, stem: str, *, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Write `<stem>.crt` and `<stem>.key`: for a client, and with `hosts` for a server as well."""
        certificate_file, key_file = self.folder / f"{stem}.crt", self.folder / f"{stem}.key"
        key = _new_key(key_file)
        authority = x509.load_pem_x509_certificate(self.certificate_file.read_bytes())
        builder = _builder(_name(user, groups), authority.subject, key)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(_general_names(hosts)), critical=False)
        _write(certificate_file, builder.sign(_load_key(self._key_file), hashes.SHA256()))
        return certificate_file, key_file

    def create_signing_key(self, stem: str) -> tuple[Path, Path]:
        """Write `<stem>.key` and `<stem>.pub`, for service account tokens."""
        private, public = self.folder / f"{stem}.key", self.folder / f"{stem}.pub"
        key = _new_key(private)
        public.write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return private, public


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _general_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + _LIFE)
    )


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(pem)
    return key


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{path} holds a {type(key).__name__}")
    return key


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
