"""Which checkpoint is uploaded next, and which copies an upload replaces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from uploads import name, uploader

from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.policy.retention import Rules
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.open import open_store
from holdfast.checkpoint.tiers.uploader import (
    FENCED_SECONDS,
    End,
    Queue,
    Target,
    Upload,
    UploadSettings,
    Wait,
    decide,
)
from holdfast.core.attempt import AttemptId, Claim

SETTINGS = UploadSettings(url="s3://bucket", interval_seconds=60)


OLD, NEW = CheckpointName(step=5, attempt_id=AttemptId(1, 1)), CheckpointName(step=10, attempt_id=AttemptId(1, 1))


@pytest.mark.parametrize(
    ("queue", "what"),
    [
        (Queue(), Wait(seconds=None)),
        (Queue(newest=NEW), Upload(name=NEW)),
        (Queue(newest=NEW, done=NEW), Wait(seconds=None)),
        (Queue(newest=NEW, done=OLD, began=70.0), Wait(seconds=30.0)),
        (Queue(newest=NEW, done=OLD, began=40.0), Upload(name=NEW)),
        (Queue(newest=NEW, done=OLD, began=70.0, closing=True), Upload(name=NEW)),
        (Queue(newest=NEW, retry_at=108.0, failures=3), Wait(seconds=8.0)),
        (Queue(newest=NEW, retry_at=108.0, failures=3, closing=True), Wait(seconds=8.0)),
        (Queue(newest=NEW, done=NEW, closing=True), End()),
        (Queue(closing=True), End()),
    ],
)
def test_the_next_thing_to_do(queue: Queue, what: object) -> None:
    assert decide(queue, SETTINGS, 100.0) == what


def test_after_a_failure_it_waits_longer_and_longer_to_a_bound() -> None:
    queue, waits = Queue(newest=NEW), []
    for _ in range(9):
        queue = queue.failed(100.0)
        waits.append(queue.retry_at - 100.0)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert queue.arrived(NEW).failures == 0


def test_settings_travel_whole_with_their_rules() -> None:
    rules = Rules.parse("hours=6,daily=7,best=loss:min:2")
    asked = UploadSettings(url="s3://bucket", keep_last=5, rules=rules, bytes_per_second=10.0, in_flight=4)
    assert UploadSettings.from_json(json.loads(json.dumps(asked.to_json()))) == asked


def test_store_is_opened_with_the_requested_in_flight_limit() -> None:
    assert open_store(f"memory://{uuid4().hex}", in_flight=3).readers == 3
    assert open_store(f"memory://{uuid4().hex}").readers == 8


def test_a_commit_arrives_with_the_claims(source: FolderStore, target: Target) -> None:
    outcome = uploader(source, target).upload(name(2))

    assert outcome.arrived
    assert outcome.nbytes > 1000
    assert target.commits() == (name(2),)
    assert target.manifest(name(2)) == source.manifest(name(2))
    assert target.claims() == source.claims()


def test_each_chunk_of_a_large_file_is_compared_with_its_own_digest(
    tmp_path: Path, target: Target, commit: Callable[..., Any]
) -> None:
    chunks = [bytes([number]) * CHUNK_BYTES for number in range(4)]
    commit(tmp_path / "large", 1, {"w": b"".join(chunks)})
    assert uploader(FolderStore(tmp_path / "large"), target).upload(name(1)).arrived


def test_old_copies_go_only_after_enough_new_ones_arrived(source: FolderStore, target: Target) -> None:
    uploads = uploader(source, target, keep_last=2)
    held = []
    for step in (1, 2, 3):
        assert uploads.upload(name(step)).arrived
        assert uploads.delete_replaced(name(step)) == ""
        held.append(sorted(found.step for found in target.commits()))
    assert held == [[1], [1, 2], [2, 3]]


def test_a_copy_that_a_claim_fences_stays_for_a_day(
    source: FolderStore, target: Target, tmp_path: Path, commit: Callable[..., Any]
) -> None:
    """After a rollback of the volume, the claim may be based on an older checkpoint because this one is missing."""
    root, again = tmp_path / "shared", AttemptId(2, 1)
    uploads, now = uploader(source, target, keep_last=1), 0.0
    uploads.now = lambda: now
    for step in (1, 3):
        assert uploads.upload(name(step)).arrived
    write_claim(
        root, Claim(attempt_id=again, job_uid="job-1", publication="p2", from_step=1, from_attempt_id=AttemptId(1, 1))
    )
    held = []
    for step, now in ((4, 1e6), (5, 1e6 + FENCED_SECONDS - 1), (6, 1e6 + FENCED_SECONDS)):  # noqa: B007
        commit(root, step, {"w": bytes(8)}, again)
        newest = CheckpointName(step=step, attempt_id=again)
        assert uploads.upload(newest).arrived
        assert uploads.delete_replaced(newest) == ""
        held.append(sorted(found.step for found in target.commits()))
    assert held == [[3, 4], [3, 5], [6]]


def test_best_copies_by_a_metric_stay_if_measured_later(
    tmp_path: Path, target: Target, commit: Callable[..., Any]
) -> None:
    measured: list[tuple[int, dict[str, float]]] = []
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), start=1):
        commit(tmp_path / "measured", step, {"w": bytes([step])}, metrics=measured)
        measured.append((step, {"val_loss": loss}))
    source = FolderStore(tmp_path / "measured")
    uploads = uploader(source, target, keep_last=1, rules=Rules.parse("best=val_loss:min:2"))
    held = []
    for step in (1, 2, 3, 4):
        assert uploads.upload(name(step)).arrived
        assert uploads.delete_replaced(name(step)) == ""
        held.append(sorted(found.step for found in target.commits()))
    assert held == [[1], [1, 2], [1, 2, 3], [2, 3, 4]], "what step 4 measured is told by no commit yet"


def test_second_process_deletes_only_what_it_has_replaced(source: FolderStore, target: Target) -> None:
    for step in (1, 2):
        uploader(source, target).upload(name(step))
    fresh = uploader(source, target, keep_last=2)
    fresh.upload(name(3))

    fresh.delete_replaced(name(3))

    assert len(target.commits()) == 3


def test_damage_on_the_shared_tier_is_told_and_does_not_arrive(
    source: FolderStore, target: Target, tmp_path: Path
) -> None:
    shard = tmp_path / "shared" / str(name(3)) / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")

    outcome = uploader(source, target).upload(name(3))

    assert (outcome.cause, outcome.gone) == ("Damaged", False)
    assert "differs from what was written" in outcome.message
    assert target.commits() == ()
