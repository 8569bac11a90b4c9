"""Uploads while their source changes, is deleted, or cannot be read."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from uploads import name, uploader

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder.upload_marker import held, uploading_checkpoint
from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.format.file_names import UPLOADING, CheckpointName
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.saving.checkpoint_index import Ages
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores import fallback
from holdfast.checkpoint.stores.fallback import FallbackStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.incoming import ObjectIncoming
from holdfast.checkpoint.stores.open import open_store
from holdfast.checkpoint.tiers.uploader import (
    Target,
    Uploader,
    UploadSettings,
)
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import UnavailableError, UsageError
from holdfast.launcher.tiers.upload_worker import Host


class Busy(Pace):
    """A job that saves repeatedly during each part of a copy."""

    def __init__(self, engine: CheckpointManager, commits: int) -> None:
        super().__init__(None)
        self._engine = engine
        self._commits = commits
        self.step = 0

    def take(self, nbytes: int) -> None:
        for _ in range(self._commits):
            self.step += 1
            assert self._engine.save(snapshot(self.step)).committed


def snapshot(step: int) -> Snapshot:
    return Snapshot(
        name=name(step), specs=[], read=lambda piece: b"", state={"objects": {}}, data=None, per_rank={}, numerics={}
    )


def training(root: Path, *, keep_last: int) -> CheckpointManager:
    engine = CheckpointManager(root, keep_last=keep_last, resume=Resume.ALWAYS, on_foreign=lambda _: None)
    engine.enter(Attempt(attempt_id=AttemptId(1, 1), job_uid="job-1", publication="p1", run_id="r"), SingleRank())
    engine.claim(step=0, attempt_id=None)
    return engine


@pytest.mark.parametrize("keep_last", [1, 2])
def test_copies_arrive_however_often_the_job_saves_meanwhile(tmp_path: Path, target: Target, keep_last: int) -> None:
    root = tmp_path / "busy"
    root.mkdir()
    busy = Busy(training(root, keep_last=keep_last), commits=3)
    busy.take(0)
    uploads = Uploader(
        source=FolderStore(root),
        target=target,
        settings=UploadSettings(url=target.url),
        pace=busy,
        hold=partial(held, root),
    )
    for _ in range(4):
        newest = name(busy.step)
        assert uploads.upload(newest).arrived
        assert newest in target.commits()
        assert len(FolderStore(root).commits()) <= keep_last + 1, "one is held back, and not more"
    busy.take(0)
    assert len(FolderStore(root).commits()) == keep_last, "nothing is on its way any more"


def test_leftovers_of_a_killed_uploader_go_with_the_next_copy(tmp_path: Path, target: Target) -> None:
    root = tmp_path / "busy"
    root.mkdir()
    busy = Busy(training(root, keep_last=1), commits=2)
    busy.take(0)
    killed = held(root, name(2))
    killed.__enter__()  # never left
    busy.take(0)
    assert set(FolderStore(root).commits()) == {name(2), name(4)}
    with held(root, name(4)):
        busy.take(0)
        assert set(FolderStore(root).commits()) == {name(4), name(6)}


def test_without_a_next_copy_it_is_held_back_for_a_day_at_most(tmp_path: Path) -> None:
    root = tmp_path / "busy"
    root.mkdir()
    busy = Busy(training(root, keep_last=1), commits=2)
    busy.take(0)
    with held(root, name(2)):
        a_day_ago = root.stat().st_mtime - 86_400 - 60
        os.utime(root / UPLOADING, (a_day_ago, a_day_ago))
        busy.take(0)
        assert FolderStore(root).commits() == (name(4),)


def test_an_uploader_takes_back_only_its_own_word(tmp_path: Path) -> None:
    with held(tmp_path, name(1)):
        other = held(tmp_path, name(2))
        other.__enter__()
    assert uploading_checkpoint(tmp_path) == name(2)


def test_a_folder_behind_a_link_is_heeded_as_well(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with held(tmp_path / "real", name(1)):
        assert uploading_checkpoint(tmp_path / "link") == name(1)


def test_a_volume_that_takes_no_word_holds_up_no_copy(tmp_path: Path) -> None:
    with held(tmp_path / "missing", name(1)):
        assert uploading_checkpoint(tmp_path / "missing") is None
    (tmp_path / UPLOADING).write_bytes(b"\xff nonsense")
    assert uploading_checkpoint(tmp_path) is None


class Deleting(Pace):
    """A source whose checkpoint is deleted while its first file is read."""

    def __init__(self, source: FolderStore, gone: CheckpointName) -> None:
        super().__init__(None)
        self._source = source
        self._gone = gone

    def take(self, nbytes: int) -> None:
        self._source.delete(self._gone)


@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_copy_whose_source_is_deleted_fails_and_leaves_nothing(
    source: FolderStore, tmp_path: Path, kind: str
) -> None:
    scheme = "local" if kind == "bucket" else "file"
    (tmp_path / "copies").mkdir()
    target = open_store(f"{scheme}://{tmp_path}/copies")
    uploads = uploader(source, target)
    uploads.pace = Deleting(source, name(1))

    outcome = uploads.upload(name(1))

    assert (outcome.cause, outcome.settled) == ("Gone", True)
    assert [path.name for path in (tmp_path / "copies").rglob("*") if path.is_file()] == ["1.1.json"], "the claim"


def test_interrupted_copy_goes_once_another_checkpoint_is_copied(
    source: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_store(f"local://{tmp_path}/copies")
    uploads = uploader(source, target)
    with monkeypatch.context() as patched:
        patched.setattr(ObjectIncoming, "publish", _network_down)
        assert uploads.upload(name(1)).cause == "Network"
    assert (tmp_path / "copies" / str(name(1))).is_dir(), "the next try goes on from it"

    assert uploads.upload(name(2)).arrived

    assert not [path for path in (tmp_path / "copies" / str(name(1))).rglob("*") if path.is_file()]


def _network_down(*_: object) -> None:
    raise UnavailableError("the network is down", cause="Network")


def test_a_commit_that_was_deleted_before_is_no_failure(source: FolderStore, target: Target) -> None:
    source.delete(name(1))

    outcome = uploader(source, target).upload(name(1))

    assert outcome.gone
    assert not outcome.cause


class Unreadable:
    """A folder on a network file system whose nth read fails once."""

    def __init__(self, inner: FolderStore, *, at: int) -> None:
        self._inner, self._left = inner, at

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._inner, attribute)

    def commits(self) -> tuple[CheckpointName, ...]:
        self._left -= 1
        if self._left == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return self._inner.commits()


def test_a_folder_that_cannot_be_read_once_is_an_outcome(source: FolderStore, target: Target) -> None:
    uploads = uploader(Unreadable(source, at=1), target)  # type: ignore[arg-type]
    assert uploads.upload(name(2)).cause == FailureCause.SOURCE
    assert uploads.upload(name(2)).arrived


def test_uploader_continues_if_the_folder_is_briefly_unreadable(source: FolderStore, target: Target) -> None:
    """The folder cannot be read at the moment of the announcement."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = theirs.makefile("r", encoding="utf-8")
        host = Host(line, theirs, uploader(Unreadable(source, at=1), target))  # type: ignore[arg-type]
        ours.sendall(f"{name(2)}\n".encode())
        ours.shutdown(socket.SHUT_WR)
        host.listen()
        host.work()
        assert json.loads(ours.recv(1 << 16))["cause"] == ""
    assert target.commits() == (name(2),)


def test_unreadable_folder_is_reported_and_its_old_copies_stay(source: FolderStore, tmp_path: Path) -> None:
    target = open_store(f"file://{tmp_path}/copies")
    uploads = uploader(source, target, keep_last=1)
    assert all(uploads.upload(name(step)).arrived for step in (1, 2))
    uploads.target = Unreadable(target, at=1)  # type: ignore[arg-type,assignment]
    uploads._ages = Ages(uploads.target)
    assert "Stale file handle" in uploads.delete_replaced(name(2))
    assert set(target.commits()) == {name(1), name(2)}


def test_unusable_store_is_an_outcome_with_its_cause(source: FolderStore) -> None:
    class Full:
        url = "s3://full"

        def claims(self) -> tuple[Claim, ...]:
            raise UnavailableError("the bucket is full", cause="Full")

    outcome = uploader(source, Full()).upload(name(1))  # type: ignore[arg-type]

    assert (outcome.cause, outcome.message) == ("Full", "the bucket is full")


def test_another_jobs_claim_on_the_same_place_is_told(source: FolderStore, target: Target) -> None:
    target.keep_claim(replace(source.claims()[0], job_uid="another"))

    outcome = uploader(source, target).upload(name(1))

    assert outcome.cause == "Claim"
    assert target.commits() == ()


@pytest.mark.parametrize("wrong", [{"interval_seconds": -1}, {"keep_last": 0}, {"bytes_per_second": 0.0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        UploadSettings(url="s3://bucket", **wrong)


def test_unreachable_copy_is_left_out_only_if_others_exist(
    source: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(url: str, **_: Any) -> Any:
        raise UnavailableError("the store cannot be reached", cause="Network")

    monkeypatch.setattr(fallback, "open_store", out_of_reach)
    assert FallbackStore("s3://away/x", source).commits() == ()
    assert FallbackStore("s3://away/x", source).claims() == ()
    empty = FallbackStore("s3://away/x", FolderStore(tmp_path / "empty"))
    for ask in (empty.commits, empty.claims):
        with pytest.raises(UnavailableError):
            ask()


def test_a_copy_in_reach_is_a_store_like_others(source: FolderStore, target: Target, tmp_path: Path) -> None:
    uploader(source, target).upload(name(1))

    copies = FallbackStore(target.url, FolderStore(tmp_path / "empty"))

    assert copies.commits() == (name(1),)
    assert copies.claims() == source.claims()
    assert copies.manifest(name(1)) == source.manifest(name(1))


def test_a_job_whose_shared_tier_is_lost_goes_on_from_the_copies(
    source: FolderStore, target: Target, tmp_path: Path, content: Callable[..., Any]
) -> None:
    for step in (1, 2):
        assert uploader(source, target).upload(name(step)).arrived
    engine = CheckpointManager(
        tmp_path / "fresh", keep_last=3, resume=Resume.ALWAYS, on_foreign=lambda _: None, copies=target.url
    )
    engine.enter(Attempt(attempt_id=AttemptId(2, 1), job_uid="job-1", publication="p2", run_id="r"), SingleRank())

    found = engine.restore()

    assert (found.step, found.attempt_id) == (2, AttemptId(1, 1))
    assert found.loaded is not None
    engine.claim(step=found.step, attempt_id=found.attempt_id)
    assert [claim.from_step for claim in FolderStore(tmp_path / "fresh").claims()] == [2]
