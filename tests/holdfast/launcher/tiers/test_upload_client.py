"""The uploads of the launcher: a child process for published checkpoints, whose failures are counted and block
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.open import open_store
from holdfast.checkpoint.tiers.uploader import UploadSettings
from holdfast.core.attempt import AttemptId
from holdfast.launcher.tiers.upload_client import Uploads

PATIENCE = 240.0


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint import save

    for step in (1, 2):
        save(tmp_path / "shared", step=step, model=torch.nn.Linear(8, 8))
    return tmp_path / "shared"


def play(uploads: Uploads, act: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await act()
        await uploads.finish(lambda: 0.0)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def names(folder: Path) -> list[CheckpointName]:
    return sorted(FolderStore(folder).commits(), key=lambda name: name.step)


def test_last_message_arrives_after_the_launcher_closed(shared: Path, tmp_path: Path) -> None:
    first, last = names(shared)
    arrived: list[CheckpointName] = []
    settings = UploadSettings(url=f"file://{tmp_path}/object", interval_seconds=3600)
    uploads = Uploads(settings, shared, arrived.append)

    async def act() -> None:
        uploads.commit(first)
        await until(lambda: arrived)
        uploads.commit(last)
        await uploads.finish(lambda: PATIENCE)

    play(uploads, act)

    assert arrived == [first, last]
    assert names(tmp_path / "object") == [first, last]
    counted = uploads.counts.to_json()
    assert (counted["commits"], counted["failures"]) == (2, {})
    assert counted["bytes"] > 0


@pytest.mark.integration
def test_endpoint_region_and_credentials_come_from_environment(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast_testbed.fakes.s3 import s3_server

    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with s3_server(tmp_path / "s3", region="eu-central-1") as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        url = f"s3://{server.make_bucket('checkpoints')}/ns/job"
        arrived: list[CheckpointName] = []
        uploads = Uploads(UploadSettings(url=url, bytes_per_second=1e9), shared, arrived.append)

        async def act() -> None:
            uploads.commit(names(shared)[1])
            await uploads.finish(lambda: PATIENCE)

        play(uploads, act)

        assert arrived == [names(shared)[1]]
        assert open_store(url).commits() == tuple(arrived)


def test_repeated_upload_failure_is_logged_once(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "object").write_text("in the way")
    uploads = Uploads(UploadSettings(url=f"local://{tmp_path}/object"), shared, lambda _: None)

    async def act() -> None:
        uploads.commit(names(shared)[0])
        await until(lambda: uploads.counts.failures.total() >= 2)

    play(uploads, act)

    assert len([entry for entry in caplog.records if "could not be uploaded" in entry.message]) == 1


def test_a_child_that_is_killed_is_replaced_with_the_next_commit(shared: Path, tmp_path: Path) -> None:
    arrived: list[CheckpointName] = []
    uploads = Uploads(UploadSettings(url=f"file://{tmp_path}/object"), shared, arrived.append)

    async def act() -> None:
        uploads.commit(CheckpointName(step=99, attempt_id=AttemptId(9, 9)))  # does not exist: nothing happens
        assert uploads._child is not None
        uploads._child.kill()
        await until(lambda: uploads._child is None)
        uploads.commit(names(shared)[1])
        await until(lambda: arrived)

    play(uploads, act)

    assert uploads.counts.failures == {"Process": 1}


def test_store_that_cannot_be_opened_is_logged_a_few_times(shared: Path) -> None:
    uploads = Uploads(UploadSettings(url="no-such-scheme://x/y"), shared, lambda _: None)

    async def act() -> None:
        for step in range(8):
            uploads.commit(CheckpointName(step=step, attempt_id=AttemptId(1, 1)))
            await until(lambda: uploads._child is None)

    play(uploads, act)

    assert uploads.counts.failures == {"Process": 5}


def test_without_settings_nothing_is_started(shared: Path) -> None:
    uploads = Uploads(None, shared, lambda _: None)
    uploads.commit(names(shared)[0])
    assert not uploads.wanted
    assert uploads._child is None
