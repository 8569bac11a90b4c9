"""A mounted TLS Secret, as the kubelet and cert-manager replace it: every pod trusts what is served, at any time."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from agents_api import MemorySecrets
from handshake import shakes_hands

from holdfast_operator import main
from holdfast_operator.agents.certificate_authority import Periods, issue, new_authority
from holdfast_operator.agents.mounted_certificate import OVERLAP, MountedCertificate
from holdfast_operator.agents.tls import KeyPair, TlsKeeper
from holdfast_operator.api.job import Job
from holdfast_operator.errors import RotationError
from holdfast_operator.manifests.children import config_map
from holdfast_operator.settings import from_environment

HOST = "holdfast.holdfast-system.svc"
START = datetime.now(UTC)
DAY = timedelta(days=1)


class Secret:
    """A Secret in a kubelet's volume: files are links through ``..data``, which is replaced at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(f"..data/{name}")

    def write(self, pair: KeyPair, authority: bytes) -> None:
        self._number += 1
        content = self.folder / f"..content_{self._number}"
        content.mkdir()
        (content / "tls.crt").write_bytes(pair.certificate)
        (content / "tls.key").write_bytes(pair.key)
        (content / "ca.crt").write_bytes(authority)
        link = self.folder / "..data_tmp"
        link.symlink_to(content.name)
        link.replace(self.folder / "..data")
        shutil.rmtree(self.folder / f"..content_{self._number - 1}", ignore_errors=True)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def authority() -> KeyPair:
    return new_authority(START, Periods())


def certificate(ca: KeyPair, host: str = HOST, lifetime: timedelta = 90 * DAY) -> KeyPair:
    return issue(ca, [host], START, lifetime)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret(tmp_path)


def keeper(secret: Secret, clock: Clock, announced: list[str] | None = None) -> TlsKeeper:
    found: list[str] = announced if announced is not None else []
    made = TlsKeeper(
        MountedCertificate(secret.folder, HOST, clock=clock),
        on_bundle=lambda: found.append(made.credentials.bundle),
    )
    made.refresh()
    return made


def test_pods_that_trust_its_ca_reach_the_operator(secret: Secret, clock: Clock) -> None:
    ca = authority()
    secret.write(certificate(ca), ca.certificate)
    tls = keeper(secret, clock)
    assert tls.credentials.bundle == ca.certificate.decode()
    assert tls.credentials.authority_expires == ca.parsed.not_valid_after_utc
    assert shakes_hands(tls, tls.credentials.bundle, HOST) == "ok"
    assert "mismatch" in shakes_hands(tls, tls.credentials.bundle, "evil.example")
    assert "verify failed" in shakes_hands(tls, authority().certificate.decode(), HOST)


def test_its_ca_is_in_the_config_map_of_each_job(secret: Secret) -> None:
    ca = authority()
    secret.write(certificate(ca), ca.certificate)
    settings = from_environment(
        {
            "HOLDFAST_NAMESPACE": "holdfast-system",
            "HOLDFAST_SERVICE": "holdfast",
            "HOLDFAST_SIDECAR_IMAGE": "s",
            "HOLDFAST_TLS_FOLDER": str(secret.folder),
        }
    )
    tls = TlsKeeper(main._certificates(settings, MemorySecrets()))
    tls.refresh()
    job = Job(name="gpt", namespace="ml", uid="u", generation=1, resource_version="1", created=START)
    made = config_map(job, main._platform(settings, tls))
    assert shakes_hands(tls, made["data"]["ca.crt"], HOST) == "ok"


def test_a_renewed_certificate_of_the_same_ca_is_served_at_once(secret: Secret, clock: Clock) -> None:
    ca, announced = authority(), list[str]()
    secret.write(certificate(ca), ca.certificate)
    tls = keeper(secret, clock, announced)
    before, renewed = tls.credentials.bundle, certificate(ca)
    secret.write(renewed, ca.certificate)
    clock.now += timedelta(seconds=30)
    tls.refresh()
    assert tls.credentials.server == renewed
    assert shakes_hands(tls, before, HOST) == "ok"
    assert announced == [], "no pod has to read anything"


def test_new_ca_joins_the_bundle_first(secret: Secret, clock: Clock) -> None:
    """The bundle contains a new CA before a certificate of it is served."""
    old, new, announced = authority(), authority(), list[str]()
    secret.write(certificate(old), old.certificate)
    tls = keeper(secret, clock, announced)
    secret.write(certificate(new), new.certificate)
    tls.refresh()
    both = tls.credentials.bundle
    assert announced == [both]
    assert both == (old.certificate + new.certificate).decode()
    assert shakes_hands(tls, old.certificate.decode(), HOST) == "ok", "pods with the bundle of before"
    clock.now += OVERLAP
    tls.refresh()
    assert shakes_hands(tls, new.certificate.decode(), HOST) == "ok"
    assert shakes_hands(tls, both, HOST) == "ok"
    assert tls.credentials.bundle == both, "a replica that read the Secret later still serves the old one"
    clock.now += OVERLAP
    tls.refresh()
    assert tls.credentials.bundle == new.certificate.decode()
    assert announced == [both, new.certificate.decode()]


def test_an_expired_certificate_is_not_kept_for_the_overlap(secret: Secret, clock: Clock) -> None:
    old, new = authority(), authority()
    secret.write(certificate(old, lifetime=DAY), old.certificate)
    tls = keeper(secret, clock)
    clock.now += DAY
    following = certificate(new)
    secret.write(following, new.certificate)
    tls.refresh()
    assert tls.credentials.server == following


def test_replacement_is_trusted_by_the_last_bundle(secret: Secret, clock: Clock) -> None:
    """Ten changes of the CA, minutes apart or overlapping: pods get a changed bundle late, and never refuse."""
    ca = authority()
    secret.write(certificate(ca), ca.certificate)
    tls = keeper(secret, clock)
    seen = [(clock.now, tls.credentials.bundle)]
    for minute in range(60):
        clock.now += timedelta(minutes=1)
        if minute in (3, 5, 6, 20, 32, 33, 34, 45):
            ca = authority()
            secret.write(certificate(ca), ca.certificate)
        tls.refresh()
        seen = [(at, bundle) for at, bundle in seen if at > clock.now - OVERLAP] + [
            (clock.now, tls.credentials.bundle)
        ]
        assert {shakes_hands(tls, bundle, HOST) for _at, bundle in seen} == {"ok"}
    assert tls.credentials.server.parsed.issuer == ca.parsed.subject


def refused(ca: KeyPair, what: str) -> tuple[KeyPair, bytes]:
    good = certificate(ca)
    return {
        "another name": (certificate(ca, "other.example"), ca.certificate),
        "another CA": (good, authority().certificate),
        "no CA": (good, b""),
        "no certificate": (KeyPair(certificate=b"", key=good.key), ca.certificate),
        "another key": (KeyPair(certificate=good.certificate, key=certificate(ca).key), ca.certificate),
        "expired": (issue(ca, [HOST], START - 3 * DAY, DAY), ca.certificate),
        "rubbish": (good, b"rubbish"),
    }[what]


@pytest.mark.parametrize(
    "what", ["another name", "another CA", "no CA", "no certificate", "another key", "expired", "rubbish"]
)
def test_what_sidecars_would_refuse_is_never_served(secret: Secret, clock: Clock, what: str) -> None:
    ca = authority()
    pair, trusted = refused(ca, what)
    secret.write(pair, trusted)
    with pytest.raises(RotationError, match=r"the TLS Secret.*ca\.crt"):
        keeper(secret, clock)
    secret.write(certificate(ca), ca.certificate)
    tls = keeper(secret, clock)
    served = tls.credentials
    secret.write(pair, trusted)
    with pytest.raises(RotationError):
        tls.refresh()
    assert tls.credentials == served
    assert shakes_hands(tls, served.bundle, HOST) == "ok"


def test_a_folder_without_a_secret_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RotationError, match=str(tmp_path)):
        MountedCertificate(tmp_path, HOST).current()


def test_renewed_certificate_is_served(secret: Secret, clock: Clock) -> None:
    """The thread also survives an invalid certificate."""
    import threading

    ca = authority()
    secret.write(certificate(ca), ca.certificate)
    read, source = threading.Semaphore(0), MountedCertificate(secret.folder, HOST, clock=clock)
    source.refresh_seconds = 0.01
    tls = TlsKeeper(source)
    tls.refresh()
    taken = tls.refresh
    tls.refresh = lambda: (read.release(), taken())[1]  # type: ignore[method-assign]
    tls.start()

    def write(pair: KeyPair) -> None:
        """Returns when it was read; what was read before it was written does not count."""
        secret.write(pair, ca.certificate)
        while read.acquire(blocking=False):
            pass
        for _ in range(3):
            assert read.acquire(timeout=60)

    try:
        write(certificate(ca, "other.example"))
        renewed = certificate(ca)
        write(renewed)
        assert tls.credentials.server == renewed
    finally:
        tls.stop()
