"""Checkpoints of an inherited claim are treated like those of an attempt with its own claim.

An attempt that continues from memory in its generation writes no claim, so its attempt ID is not in `claims/`. An
unreadable manifest must not assign its checkpoints to another job.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import xxhash
from command_line import Commands
from nothing_managed import snapshot

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder.claims import list_claims, write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.prune import carry_out, plan
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NoCompleteCheckpointError,
    UnavailableError,
    UnknownFormatError,
)

JOB = "job-1"


def entered(
    root: Path, attempt_id: AttemptId, *, copies: str = "", keep_last: int = 3, full_every: int = 1
) -> CheckpointManager:
    engine = CheckpointManager(
        root,
        keep_last=keep_last,
        resume=Resume.ALWAYS,
        on_foreign=lambda claims: None,
        copies=copies,
        full_every=full_every,
    )
    engine.enter(attempt(attempt_id), SingleRank())
    return engine


def attempt(attempt_id: AttemptId) -> Attempt:
    return Attempt(attempt_id=attempt_id, job_uid=JOB, publication=f"p{attempt_id.generation}", run_id="run")


def commits(root: Path) -> set[str]:
    return {str(name) for name in catalog.list_commits(root)}


@pytest.fixture(params=[AttemptId(1, 1), AttemptId(1, 3)], ids=["own claim", "inherited claim"])
def attempt_id(request: pytest.FixtureRequest) -> AttemptId:
    """The attempt that wrote the checkpoints. The claim is that of 1.1."""
    assert isinstance(request.param, AttemptId)
    return request.param


@pytest.fixture
def root(tmp_path: Path, attempt_id: AttemptId) -> Path:
    """Steps 30, 40 and 50 of an attempt, under the claim of 1.1."""
    folder = tmp_path / "ckpt"
    engine = entered(folder, AttemptId(1, 1))
    engine.restore()
    engine.claim(step=0, attempt_id=None)
    engine.enter(attempt(attempt_id), SingleRank())
    for step in (10, 20, 30, 40, 50):
        assert engine.save(snapshot(step, attempt_id)).committed
    assert [claim.attempt_id for claim in list_claims(folder)] == [AttemptId(1, 1)]
    return folder


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[50] ^= 1
    path.write_bytes(raw)


def newest(root: Path, attempt_id: AttemptId) -> Path:
    return root / f"step-50.g1.a{attempt_id.attempt}" / "MANIFEST.json"


def failing(error: Exception) -> Callable[..., Manifest]:
    def read(*_: Any) -> Manifest:
        raise error

    return read


@pytest.mark.parametrize(
    ("trouble", "raised"),
    [
        (CorruptCheckpointError("MANIFEST.json cannot be read: Input/output error"), NoCompleteCheckpointError),
        (CheckpointError("cannot read MANIFEST.json: Permission denied"), CheckpointError),
    ],
)
def test_training_does_not_start_over_without_readable_manifests(
    root: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception, raised: type[Exception]
) -> None:
    before = commits(root)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "read_manifest", failing(trouble))
        with pytest.raises(raised, match=r"Input/output error|Permission denied"):
            entered(root, AttemptId(2, 1)).restore()
    assert commits(root) == before
    assert entered(root, AttemptId(2, 1)).restore().step == 50


def test_unreadable_copies_are_no_reason_to_start_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The volume is lost, and the copies have no read permission."""
    copies = root.rename(root.with_name("copies"))
    read = FolderStore.manifest

    def refused(store: FolderStore, name: CheckpointName) -> Manifest:
        if store.url == str(copies):
            raise UnavailableError("403: credentials expired", cause="Credentials")
        return read(store, name)

    monkeypatch.setattr(FolderStore, "manifest", refused)
    with pytest.raises(CheckpointError, match="credentials expired"):
        entered(root, AttemptId(2, 1), copies=f"file://{copies}").restore()


def test_a_newer_format_stops_the_job(root: Path, attempt_id: AttemptId) -> None:
    manifest = json.loads(newest(root, attempt_id).read_bytes())
    del manifest["manifestDigest"]
    manifest["version"] = 99
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    seal = xxhash.xxh3_128_hexdigest(body)
    newest(root, attempt_id).write_bytes(body[:-1] + f',"manifestDigest":"{seal}"}}\n'.encode())
    with pytest.raises(UnknownFormatError, match=r"step-50\.g1.*version 99"):
        entered(root, AttemptId(2, 1)).restore()


def test_corrupt_manifest_is_moved_aside_and_its_step_reported(root: Path, attempt_id: AttemptId) -> None:
    flip(newest(root, attempt_id))
    found = entered(root, AttemptId(2, 1)).restore()
    name = f"step-50.g1.a{attempt_id.attempt}"
    assert (found.step, [one.path for one in found.lost]) == (40, [name])
    assert [one.path for one in found.quarantined] == [name]
    assert list((root / "quarantine").glob(f"{name}.*/MANIFEST.json"))


def misread(patch: pytest.MonkeyPatch, step: int, times: int) -> list[int]:
    """Corrupt the manifests of one step on the first reads. Return the number of corrupt reads left."""
    left, read = [times], FolderStore.manifest

    def damaged(store: FolderStore, name: CheckpointName) -> Manifest:
        if name.step == step and left[0]:
            left[0] -= 1
            raise CorruptCheckpointError("MANIFEST.json cannot be read: Input/output error")
        return read(store, name)

    patch.setattr(FolderStore, "manifest", damaged)
    return left


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_retention_keeps_a_checkpoint_whose_manifest_it_misreads(
    root: Path, attempt_id: AttemptId, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """With deltas, a manifest is read back after each save. A corrupt read must not delete a checkpoint."""
    engine = entered(root, attempt_id, keep_last=2, full_every=4)
    for step in (60, 70):
        assert engine.save(snapshot(step, attempt_id)).committed
    left = misread(monkeypatch, 80, times)
    for step in (80, 90):
        assert engine.save(snapshot(step, attempt_id)).committed
        assert f"step-{step}.g1.a{attempt_id.attempt}" in commits(root)
    assert left == [0]
    assert engine.save(snapshot(100, attempt_id)).committed
    assert {name.step for name in catalog.list_commits(root)} >= {90, 100}


def test_temporarily_unreadable_checkpoint_expires_normally(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third = AttemptId(2, 1)
    engine = entered(root, third, keep_last=2)
    engine.claim(step=engine.restore().step, attempt_id=engine.restore().attempt_id)
    with monkeypatch.context() as patch:
        misread(patch, 40, 1000)
        for step in (60, 70):
            assert engine.save(snapshot(step, third)).committed
        assert {name.step for name in catalog.list_commits(root)} == {40, 60, 70}
    assert engine.save(snapshot(80, third)).committed
    assert {name.step for name in catalog.list_commits(root)} == {70, 80}


def test_unreadable_foreign_checkpoint_is_kept_and_reported_once(
    root: Path, attempt_id: AttemptId, caplog: pytest.LogCaptureFixture
) -> None:
    flip(newest(root, attempt_id))
    stranger = AttemptId(9, 1)
    newest(root, attempt_id).parent.rename(root / "step-50.g9.a1")
    engine = entered(root, stranger, keep_last=1)
    for step in (60, 70):
        assert engine.save(snapshot(step, stranger)).committed
    assert {name.step for name in catalog.list_commits(root)} == {50, 70}
    assert caplog.text.count("retention does not delete step-50.g9.a1") == 1


# Manual commands


def test_prune_keeps_the_last_ones_and_lets_the_others_go(root: Path, holdfast: Commands) -> None:
    told = holdfast.json("prune", root, "--keep-last", 1)["commits"]
    assert [(line["goes"], line["reason"]) for line in told] == [
        (False, "among the last 1"),
        (True, "older than the last 1, and no rule keeps it"),
        (True, "older than the last 1, and no rule keeps it"),
    ]
    assert {name.step for name in catalog.list_commits(root)} == {50}


def test_prune_names_a_damaged_commit_and_does_not_count_it(
    root: Path, attempt_id: AttemptId, holdfast: Commands
) -> None:
    flip(newest(root, attempt_id))
    told = holdfast.json("prune", root, "--keep-last", 1, code=1)
    assert told["damaged"] == [f"step-50.g1.a{attempt_id.attempt}"]
    assert not any(line["goes"] for line in told["commits"])
    assert holdfast.json("prune", root, "--keep-last", 2, code=1)["damaged"] == told["damaged"]


@pytest.mark.parametrize("job", [JOB, "job-2"])
def test_prune_deletes_nothing_after_an_attempt_has_claimed(root: Path, job: str) -> None:
    before = commits(root)
    pruning = plan(FolderStore(root), Rules(), 1, now=datetime.now(UTC))
    assert any(decision.deleted for decision in pruning.decisions)
    write_claim(
        root,
        Claim(
            attempt_id=AttemptId(1, 4), job_uid=job, publication="p1", from_step=30, from_attempt_id=AttemptId(1, 1)
        ),
    )
    with pytest.raises(CheckpointError, match="has written a claim meanwhile"):
        carry_out(FolderStore(root), pruning)
    assert commits(root) == before


def test_prune_keeps_checkpoints_above_the_last_known_attempt(root: Path, holdfast: Commands) -> None:
    """The newer checkpoints are of a later generation or of another job, which the existing claim does not cover."""
    engine = entered(root, AttemptId(2, 1), keep_last=9)
    assert engine.save(snapshot(60, AttemptId(2, 1))).committed
    engine.enter(Attempt(attempt_id=AttemptId(1, 4), job_uid="job-2", publication="p1", run_id="run"), SingleRank())
    assert engine.save(snapshot(70, AttemptId(1, 4))).committed
    told = {line["commit"]: line["reason"] for line in holdfast.json("prune", root, "--keep-last", 1)["commits"]}
    assert told["step-60.g2.a1"].startswith("from an attempt above 1.")
    assert told["step-70.g1.a4"].startswith("from an attempt above 1.")


def test_prune_of_a_claiming_attempt_takes_earlier_checkpoints(root: Path, holdfast: Commands) -> None:
    """The attempt has claimed and has not published a checkpoint yet."""
    write_claim(
        root,
        Claim(
            attempt_id=AttemptId(2, 1), job_uid=JOB, publication="p2", from_step=50, from_attempt_id=AttemptId(1, 3)
        ),
    )
    assert holdfast("prune", root, "--keep-last", 1) == 0
    assert {name.step for name in catalog.list_commits(root)} == {50}
