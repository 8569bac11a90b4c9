"""Claims, listings, credentials and addresses of a bucket."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from s3_commits import Made, is_whole, once, upload

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.stores.objects.errors import Kind, classify, pause
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.stores.open import open_store
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, CorruptCheckpointError, UnavailableError, UsageError
from holdfast_testbed.fakes.s3 import S3Server, s3_server
from holdfast_testbed.fakes.s3_faults import Answer, Proxy, Reset, faults


@pytest.mark.integration
def test_claims_are_exclusive(s3_store: ObjectStore) -> None:
    claims = [Claim(attempt_id=AttemptId(g, 1), job_uid="job", publication="p", from_step=g) for g in (2, 1)]
    for claim in [*claims, claims[0]]:
        s3_store.keep_claim(claim)

    with pytest.raises(ClaimError, match="another job"):
        s3_store.keep_claim(replace(claims[0], job_uid="other"))

    assert s3_store.claims() == tuple(reversed(claims))


@pytest.mark.integration
def test_a_claim_larger_than_any_is_refused_before_it_is_read(s3_settings: S3Settings) -> None:
    bucket = S3Bucket(s3_settings)
    bucket.put("team/job/claims/1.1.json", bytes((64 << 10) + 1))
    with pytest.raises(CorruptCheckpointError, match="more than the limit for this file"):
        ObjectStore(bucket, s3_settings.prefix).claims()


def test_what_was_never_finished_is_swept_away_and_nothing_else(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_settings: S3Settings, s3_store: ObjectStore
) -> None:
    upload(made, s3_store)
    unfinished = CheckpointName(step=8, attempt_id=made.name.attempt_id)
    proxy.plan = lambda request: Reset() if "partNumber=2" in request.target else None
    with pytest.raises(UnavailableError):
        through(attempts=1).receive(unfinished, "").write("rank-0.safetensors", [made.bytes["rank-0.safetensors"]])
    s3_store.receive(unfinished, "").write("rank-0.json", [b"{}"])
    bucket = S3Bucket(s3_settings)
    assert len(bucket.unfinished("")) == 1

    s3_store.sweep(unfinished)
    assert len(bucket.unfinished("")) == 1
    s3_store.sweep(replace(unfinished, step=9))

    assert bucket.unfinished("") == []
    assert {key.split("/")[2] for key in bucket.keys("")} == {str(made.name)}
    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_listings_go_on_over_pages(s3: S3Server, s3_settings: S3Settings) -> None:
    folder = s3.folder / s3_settings.bucket / "many"
    folder.mkdir()
    for number in range(1100):
        (folder / f"{number:04}").touch()
    bucket = S3Bucket(s3_settings)

    assert bucket.keys("many/") == [f"many/{number:04}" for number in range(1100)]
    bucket.delete(bucket.keys("many/"))
    assert bucket.keys("many/") == []


@pytest.mark.integration
def test_list_is_requested_again_when_a_deletion_breaks_it(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    """versitygw answers a list in this way, and its file system may do so too. Nothing is missing or corrupt."""
    upload(made, s3_store)
    proxy.plan = once(Answer(status=404, code="NoSuchKey"), lambda request: "list-type=2" in request.target)
    assert through().commits() == (made.name,)
    proxy.plan = lambda request: Answer(status=404, code="NoSuchKey") if "list-type=2" in request.target else None
    with pytest.raises(UnavailableError) as refused:
        through(attempts=2).commits()
    assert refused.value.cause == Kind.SERVER


@pytest.mark.integration
def test_the_region_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the server refuses the first request and each presigned address for large parts."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with s3_server(tmp_path / "s3", region="eu-central-1") as server, faults(server.url) as proxy:
        bucket = server.make_bucket("elsewhere")
        S3Bucket(S3Settings(bucket=bucket, endpoint=proxy.url, credentials=server.credentials)).folders("job/")
    assert len(proxy.seen) == 1


@pytest.mark.integration
def test_a_missing_bucket_is_no_damage(s3_settings: S3Settings) -> None:
    store = ObjectStore(S3Bucket(replace(s3_settings, bucket="not-there")))
    name = CheckpointName(step=1, attempt_id=AttemptId(1, 1))
    for act in (store.commits, lambda: store.manifest(name), lambda: store.open(name, "rank-0.json")):
        with pytest.raises(UnavailableError, match="create it, or correct the URL") as error:
            act()
        assert error.value.cause == Kind.NO_BUCKET


@pytest.mark.integration
def test_renewed_credentials_are_read_again(
    made: Made, s3: S3Server, s3_settings: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mounted secret is renewed while the process runs."""
    file = tmp_path / "credentials"
    keys = list(s3.credentials.items())
    file.write_text("\n".join(["[default]", *(f"{name} = {value[::-1]}" for name, value in keys)]))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    store = ObjectStore(S3Bucket(replace(s3_settings, credentials={})))
    with pytest.raises(UnavailableError) as error:
        store.commits()
    assert error.value.cause == Kind.CREDENTIALS

    file.write_text("\n".join(["[default]", *(f"{name} = {value}" for name, value in keys)]))

    upload(made, store)
    assert is_whole(store, made)


@pytest.mark.integration
def test_an_object_that_is_replaced_while_it_is_read_is_damage(
    made: Made, s3_store: ObjectStore, s3_settings: S3Settings
) -> None:
    upload(made, s3_store)
    with s3_store.open(made.name, "rank-0.json") as opened:
        S3Bucket(s3_settings).put(f"team/job/{made.name}/rank-0.json", b"{} ")
        with pytest.raises(CorruptCheckpointError, match="replaced"):
            opened.read_into(0, memoryview(bytearray(2)))


def test_an_s3_url_carries_no_credentials() -> None:
    for url in ("s3://key:secret@bucket/x", "s3://bucket/x?endpoint=y"):
        with pytest.raises(UsageError, match="from the environment") as error:
            open_store(url)
        assert "secret" not in str(error.value)
    with pytest.raises(UsageError, match="names no bucket"):
        open_store("s3:///x")


@pytest.mark.integration
def test_empty_segment_within_a_url_is_dropped_and_reported(
    made: Made,
    s3: S3Server,
    s3_settings: S3Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server over a file system lists the key without the empty segment, so no checkpoint would look complete."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    target = open_store(f"s3://{s3_settings.bucket}/joined//run/")
    assert isinstance(target, ObjectStore)
    upload(made, target)
    assert is_whole(target, made)
    assert target.url == f"s3://{s3_settings.bucket}/joined/run"
    assert f"s3://{s3_settings.bucket}/joined/run is used. Move objects that were written" in caplog.text


@pytest.mark.parametrize("prefix", ["a/../b", "..", "a/./b"])
def test_no_url_leads_out_of_its_prefix(prefix: str) -> None:
    with pytest.raises(UsageError, match="some servers resolve them: remove them"):
        open_store(f"s3://bucket/{prefix}")


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(S3Settings(bucket="b", credentials={"aws_secret_access_key": "hidden"}))


def test_without_boto3_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"holdfast-trainer\[s3\]"):
        open_store("s3://bucket/prefix")


class Said(Exception):  # noqa: N818
    def __init__(self, status: int, code: str) -> None:
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Said(404, "NoSuchKey"), Kind.MISSING),
        (Said(404, "404"), Kind.MISSING),
        (Said(404, "NoSuchBucket"), Kind.NO_BUCKET),
        (Said(404, "NoSuchSomethingElse"), Kind.REFUSED),
        (Said(403, "RequestTimeTooSkewed"), Kind.CLOCK),
        (Said(507, ""), Kind.FULL),
        (Said(403, "SomethingNew"), Kind.DENIED),
        (Said(501, "NotImplemented"), Kind.REFUSED),
        (Said(501, "SomethingNew"), Kind.REFUSED),
        (Said(599, "SomethingNew"), Kind.SERVER),
        (Said(418, "SomethingNew"), Kind.REFUSED),
        (ConnectionResetError(), Kind.NETWORK),
    ],
)
def test_only_an_answer_that_it_is_not_there_is_damage(error: Exception, kind: Kind) -> None:
    assert classify(error).kind is kind


def test_pauses_grow_to_a_bound() -> None:
    longest = [pause(attempt, base=0.25, cap=20, draw=1) for attempt in range(8)]
    assert longest == [0.25, 0.5, 1, 2, 4, 8, 16, 20]
    assert all(pause(attempt, base=0.25, cap=20, draw=0) == whole / 2 for attempt, whole in enumerate(longest))
