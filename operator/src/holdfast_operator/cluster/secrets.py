"""The operator's own Secrets in its own namespace, created once by the first process."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from holdfast_operator.api.names import LABEL_APP_MANAGED_BY, MANAGED_BY

_REQUEST_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class StoredSecret:
    """A Secret's content and the version that a later ``replace`` refers to."""

    data: Mapping[str, bytes]
    version: str


class SecretStore(Protocol):
    """All operations of this package on Secrets."""

    def read(self, name: str) -> StoredSecret | None: ...

    def create(self, name: str, data: Mapping[str, bytes]) -> bool:
        """Return False if the Secret exists."""

    def replace(self, name: str, data: Mapping[str, bytes], version: str) -> bool:
        """Return False if the Secret has changed since ``version``."""


def ensure(store: SecretStore, name: str, make: Callable[[], Mapping[str, bytes]]) -> StoredSecret:
    """Return the Secret of that name, and create it if absent. Two concurrent processes get the same one."""
    while True:
        found = store.read(name)
        if found is not None:
            return found
        store.create(name, make())


class ClusterSecrets:
    """``SecretStore`` in one namespace of a cluster."""

    def __init__(self, api: client.CoreV1Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace

    def read(self, name: str) -> StoredSecret | None:
        try:
            found = self._api.read_namespaced_secret(name, self._namespace, _request_timeout=_REQUEST_SECONDS)
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        data = {key: base64.b64decode(value) for key, value in (found.data or {}).items()}
        version = found.metadata.resource_version if found.metadata else ""
        return StoredSecret(data=data, version=str(version))

    def create(self, name: str, data: Mapping[str, bytes]) -> bool:
        """Return False if the Secret exists."""
        try:
            self._api.create_namespaced_secret(
                self._namespace, self._body(name, data), _request_timeout=_REQUEST_SECONDS
            )
        except ApiException as error:
            if error.status == 409:
                return False
            raise
        return True

    def replace(self, name: str, data: Mapping[str, bytes], version: str) -> bool:
        """Return False if the Secret has changed since ``version``."""
        body = self._body(name, data)
        body.metadata.resource_version = version
        try:
            self._api.replace_namespaced_secret(name, self._namespace, body, _request_timeout=_REQUEST_SECONDS)
        except ApiException as error:
            if error.status == 409:
                return False
            raise
        return True

    def _body(self, name: str, data: Mapping[str, bytes]) -> Any:
        return client.V1Secret(
            metadata=client.V1ObjectMeta(name=name, labels={LABEL_APP_MANAGED_BY: MANAGED_BY}),
            type="Opaque",
            data={key: base64.b64encode(value).decode() for key, value in data.items()},
        )
