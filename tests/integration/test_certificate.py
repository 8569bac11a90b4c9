"""A release with `tls.existingSecret`: the operator serves a Secret that cert-manager writes, and its renewal."""

from __future__ import annotations

import base64
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes import client
from players import Operator
from stage import Stage
from waiting import wait_until

from holdfast_testbed.fakes import chart

SYSTEM, SECRET, HOST = "holdfast-tls", "certificate", "127.0.0.1"
USER = chart.account(SYSTEM)
NOW = datetime.now(UTC)


class Issuer:
    """A CA issuer. Its keys are RSA in PKCS #1, the default of cert-manager."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "internal-ca")])
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        made = _builder(self._name, self._name, self._key.public_key()).add_extension(constraint, critical=True)
        self._certificate = made.sign(self._key, hashes.SHA256())

    @property
    def authority(self) -> str:
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def secret(self) -> dict[str, Any]:
        """A Secret with a new key and certificate for the operator's address."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
        made = _builder(x509.Name([]), self._name, key.public_key()).add_extension(names, critical=True)
        pkcs1 = serialization.PrivateFormat.TraditionalOpenSSL
        parts = {
            "tls.crt": made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
            "tls.key": key.private_bytes(serialization.Encoding.PEM, pkcs1, serialization.NoEncryption()),
            "ca.crt": self.authority.encode(),
        }
        data = {name: base64.b64encode(part).decode() for name, part in parts.items()}
        return {"metadata": {"name": SECRET}, "type": "kubernetes.io/tls", "data": data}


def _builder(subject: x509.Name, issuer: x509.Name, key: rsa.RSAPublicKey) -> x509.CertificateBuilder:
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(NOW - timedelta(hours=1)).not_valid_after(NOW + timedelta(days=90))


def mount(core: client.CoreV1Api, folder: Path) -> None:
    """Write the Secret into its volume, as the kubelet does: all files change with one link."""
    secret = core.read_namespaced_secret(SECRET, SYSTEM)
    content = folder / f"..{secret.metadata.resource_version}"
    content.mkdir(parents=True)
    for name, part in secret.data.items():
        (content / name).write_bytes(base64.b64decode(part))
    link = folder / "..data_tmp"
    link.symlink_to(content.name)
    link.replace(folder / "..data")


def served(operator: Operator, authority: str) -> bytes:
    """The certificate that a sidecar with this CA receives and accepts."""
    trust = ssl.create_default_context(cadata=authority)
    with (
        socket.create_connection((HOST, operator.agents_port), timeout=60) as connection,
        trust.wrap_socket(connection, server_hostname=HOST) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mounted"


@pytest.fixture
def operator(cluster: Any, admin: Any, namespace: str, issuer: Issuer, folder: Path) -> Iterator[Operator]:
    """It has the rights of a release with `tls.existingSecret`, and ends without complaint."""
    chosen = chart.rights(f"watchNamespaces={{{namespace}}}", f"tls.existingSecret={SECRET}", namespace=SYSTEM)
    for document in chosen:
        document["metadata"]["labels"]["app.kubernetes.io/name"] = SYSTEM
    granted = chart.grant(cluster, chosen, SYSTEM)
    core = client.CoreV1Api(admin)
    core.create_namespaced_secret(SYSTEM, issuer.secret())
    mount(core, folder)
    settings = {"HOLDFAST_NAMESPACE": SYSTEM, "HOLDFAST_WATCH_NAMESPACES": namespace}
    made = Operator(granted, folder.parent, HOLDFAST_TLS_FOLDER=str(folder), **settings)
    made.start()
    yield made
    assert made.stop() == 0, made.log()[-3000:]
    chart.withdraw(cluster, chosen, SYSTEM)


def test_a_secret_of_cert_manager_is_served_and_renewed(
    stage: Stage, operator: Operator, issuer: Issuer, folder: Path, audited: Any
) -> None:
    first = served(operator, issuer.authority)
    stage.nodes(1)
    stage.run(replicas=1)
    bundle = stage.core.read_namespaced_config_map("gpt-holdfast-ca", stage.namespace)
    assert bundle.data["ca.crt"] == issuer.authority
    stage.core.patch_namespaced_secret(SECRET, SYSTEM, issuer.secret())
    mount(stage.core, folder)
    wait_until(lambda: served(operator, issuer.authority) != first, "the renewed certificate is served")
    ours = [entry for entry in audited() if entry["user"]["username"] == USER]
    assert ours
    assert [entry["requestURI"] for entry in ours if entry["responseStatus"].get("code") == 403] == []
    uses_own = [entry["requestURI"] for entry in ours if "/secrets/holdfast-ca" in entry["requestURI"]]
    assert uses_own == [], "the chart gives no right to a CA of its own"
