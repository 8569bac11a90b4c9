"""The operator's CA: made once, rotated so that no pod ever meets a certificate that it does not trust."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from handshake import shakes_hands

from holdfast_operator.agents.certificate_authority import CA_SECRET, BuiltInAuthority, Periods
from holdfast_operator.agents.tls import TlsKeeper
from holdfast_operator.cluster.secrets import StoredSecret, ensure
from holdfast_operator.errors import RotationError

START = datetime.now(UTC)
NAMES = ["holdfast-operator.holdfast.svc", "10.96.0.7", "127.0.0.1", "fd00::7"]


@dataclass
class MemorySecrets:
    """A ``SecretStore`` with versions. ``interloper`` runs between a read and the write that follows."""

    content: dict[str, StoredSecret] = field(default_factory=dict)
    writes: int = 0

    def interloper(self) -> None:
        """Nobody, unless a test says so."""

    def read(self, name: str) -> StoredSecret | None:
        return self.content.get(name)

    def create(self, name: str, data: Mapping[str, bytes]) -> bool:
        self.interloper()
        if name in self.content:
            return False
        return self._write(name, data)

    def replace(self, name: str, data: Mapping[str, bytes], version: str) -> bool:
        self.interloper()
        if self.content[name].version != version:
            return False
        return self._write(name, data)

    def _write(self, name: str, data: Mapping[str, bytes]) -> bool:
        self.writes += 1
        self.content[name] = StoredSecret(data=dict(data), version=str(self.writes))
        return True


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now


def keeper(store: MemorySecrets, clock: Clock, names: list[str] | None = None) -> TlsKeeper:
    made = TlsKeeper(BuiltInAuthority(store, names or NAMES, clock=clock))
    made.refresh()
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_trusts_the_bundle_reaches_each_name(name: str) -> None:
    server = keeper(MemorySecrets(), Clock())
    assert shakes_hands(server, server.credentials.bundle, name) == "ok"


def test_another_name_or_another_ca_is_refused() -> None:
    server = keeper(MemorySecrets(), Clock())
    assert "mismatch" in shakes_hands(server, server.credentials.bundle, "evil.example")
    stranger = keeper(MemorySecrets(), Clock())
    assert "verify failed" in shakes_hands(server, stranger.credentials.bundle)


def test_a_restarted_operator_keeps_its_ca() -> None:
    store, clock = MemorySecrets(), Clock()
    before = keeper(store, clock).credentials.bundle
    assert shakes_hands(keeper(store, clock), before) == "ok"
    assert store.writes == 1


def test_two_operators_that_start_at_once_agree_on_one_ca() -> None:
    store, clock = MemorySecrets(), Clock()
    first: list[TlsKeeper] = []

    def other_is_faster() -> None:
        store.interloper = lambda: None  # type: ignore[method-assign]
        first.append(keeper(store, clock))

    store.interloper = other_is_faster  # type: ignore[method-assign]
    second = keeper(store, clock)
    assert second.credentials.bundle == first[0].credentials.bundle


def test_the_server_certificate_is_renewed_before_it_ends() -> None:
    clock = Clock()
    server = keeper(MemorySecrets(), clock)
    first = server.credentials.server
    clock.now += timedelta(days=19)
    server.refresh()
    assert server.credentials.server == first
    clock.now += timedelta(days=2)
    server.refresh()
    assert server.credentials.server != first
    assert server.credentials.server.parsed.not_valid_after_utc > clock.now + timedelta(days=29)


def test_served_certificate_is_trusted_by_an_older_bundle() -> None:
    """Pods get a changed bundle late: what is served must verify against any bundle of the last days."""
    periods, clock, store = Periods(), Clock(), MemorySecrets()
    server = keeper(store, clock)
    seen: list[tuple[datetime, str]] = []
    issuers = set()
    for _day in range(2 * periods.authority.days):
        clock.now += timedelta(days=1)
        server.refresh()
        seen = [(at, bundle) for at, bundle in seen if at >= clock.now - timedelta(days=6)]
        seen.append((clock.now, server.credentials.bundle))
        certificate = server.credentials.server.parsed
        issuers.add(certificate.issuer)
        assert certificate.not_valid_before_utc <= clock.now < certificate.not_valid_after_utc
        for _at, bundle in {bundle: (at, bundle) for at, bundle in seen}.values():
            assert _signed_by_one_of(bundle, server), "a pod with an older bundle would refuse the server"
    assert len(issuers) >= 2


def _signed_by_one_of(bundle: str, server: TlsKeeper) -> bool:
    from cryptography import x509

    served = server.credentials.server.parsed
    return any(ca.subject == served.issuer for ca in x509.load_pem_x509_certificates(bundle.encode()))


def test_rotation_survives_a_restart_and_a_race() -> None:
    """A rotation is announced first."""
    store, clock, announced = MemorySecrets(), Clock(), []
    server = TlsKeeper(BuiltInAuthority(store, NAMES, clock=clock), on_bundle=lambda: announced.append(1))
    server.refresh()
    other = keeper(store, clock)
    clock.now += timedelta(days=3300)
    store.interloper = lambda: (setattr(store, "interloper", lambda: None), other.refresh())  # type: ignore[method-assign,assign,return-value]
    server.refresh()
    assert server.credentials.bundle == other.credentials.bundle
    assert server.credentials.bundle.count("BEGIN CERTIFICATE") == 2
    assert announced == [1]
    assert keeper(store, clock).credentials.bundle == server.credentials.bundle


def test_the_old_ca_leaves_the_bundle_when_it_has_expired() -> None:
    store, clock = MemorySecrets(), Clock()
    server = keeper(store, clock)
    old = server.credentials.bundle
    for days in (3300, 8, 400):
        clock.now += timedelta(days=days)
        server.refresh()
    assert old not in server.credentials.bundle
    assert server.credentials.bundle.count("BEGIN CERTIFICATE") == 1


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"ca.crt": b"rubbish", "ca.key": b"rubbish"},
        {"ca.crt": b""},
    ],
)
def test_a_secret_that_is_not_ours_is_refused_by_name(data: dict[str, bytes]) -> None:
    store = MemorySecrets()
    store.create(CA_SECRET, data)
    with pytest.raises(RotationError, match="holdfast-ca"):
        keeper(store, Clock())


def test_a_key_of_another_certificate_is_refused() -> None:
    store, other = MemorySecrets(), MemorySecrets()
    keeper(store, Clock())
    keeper(other, Clock())
    mixed = {**store.content[CA_SECRET].data, "ca.key": other.content[CA_SECRET].data["ca.key"]}
    store.content[CA_SECRET] = StoredSecret(data=mixed, version="9")
    with pytest.raises(RotationError, match="differ"):
        keeper(store, Clock())


def test_ensure_makes_a_secret_once() -> None:
    store = MemorySecrets()
    first = ensure(store, "x", lambda: {"k": b"1"})
    assert ensure(store, "x", lambda: {"k": b"2"}) == first
