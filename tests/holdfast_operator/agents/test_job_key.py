"""A job's key: the same after every restart, another for every job."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

import pytest

from holdfast_operator.agents.job_key import KEY_SECRET, ensure_operator_key, job_key
from holdfast_operator.cluster.secrets import StoredSecret
from holdfast_operator.errors import RotationError


class MemorySecrets:
    """A ``SecretStore`` that only grows."""

    def __init__(self) -> None:
        self.content: dict[str, dict[str, bytes]] = {}

    def read(self, name: str) -> StoredSecret | None:
        return StoredSecret(data=self.content[name], version="1") if name in self.content else None

    def create(self, name: str, data: Mapping[str, bytes]) -> bool:
        self.content[name] = dict(data)
        return True

    def replace(self, name: str, data: Mapping[str, bytes], version: str) -> bool:
        raise AssertionError(f"{name} was replaced")


def test_the_key_is_the_documented_hmac() -> None:
    assert job_key(b"k" * 32, "job-1") == hmac.new(b"k" * 32, b"job-1", hashlib.sha256).hexdigest()


def test_a_restart_keeps_every_jobs_key_and_jobs_differ() -> None:
    store = MemorySecrets()
    first, second = ensure_operator_key(store), ensure_operator_key(store)
    assert job_key(first, "job-1") == job_key(second, "job-1")
    assert job_key(first, "job-1") != job_key(first, "job-2")


def test_two_installations_have_different_keys() -> None:
    assert ensure_operator_key(MemorySecrets()) != ensure_operator_key(MemorySecrets())


def test_an_unusable_key_is_refused_by_name_and_never_replaced() -> None:
    store = MemorySecrets()
    store.create(KEY_SECRET, {"key": b"short"})
    with pytest.raises(RotationError, match=KEY_SECRET):
        ensure_operator_key(store)
