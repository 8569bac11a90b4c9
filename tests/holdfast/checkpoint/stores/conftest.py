"""Fixtures of the tests in stores/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from s3_commits import SIZE, Made

from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast_testbed.fakes.s3 import S3Server
from holdfast_testbed.fakes.s3_faults import Proxy, faults


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, commit: Callable[..., Any]) -> Made:
    root = tmp_path_factory.mktemp("source")
    pattern = bytes(range(251)) * (SIZE // 251 + 1)
    commit(root, 7, {"w": pattern[:SIZE]})
    store = FolderStore(root)
    name = store.commits()[0]
    return Made(store, name, {file: (root / str(name) / file).read_bytes() for file in store.manifest(name).files})


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with faults(s3.url) as running:
        yield running


@pytest.fixture
def through(s3_settings: S3Settings, proxy: Proxy) -> Callable[..., ObjectStore]:
    """A store whose requests pass the proxy."""

    def make(**changes: Any) -> ObjectStore:
        settings = replace(s3_settings, endpoint=proxy.url, **changes)
        return ObjectStore(S3Bucket(settings), settings.prefix)

    return make
