"""The object store is tested before a job starts: the name of each result, and the cause of each error."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.launcher.host.object_store_probe import rehearse
from holdfast.launcher.host.preflight import Check, Result, try_store
from holdfast_testbed.fakes.s3 import S3Server
from holdfast_testbed.fakes.s3_faults import Answer, Request, faults

pytestmark = pytest.mark.integration
Ask = Callable[..., Check]


@pytest.fixture
def ask(s3: S3Server, s3_settings: S3Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """Test the store as a pod with these variables does."""

    def asked(url: str = "", **changes: str) -> Check:
        nothing = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(tmp_path / "none"))
        for name, value in {**nothing, "AWS_EC2_METADATA_DISABLED": "true", **s3.environment, **changes}.items():
            monkeypatch.setenv(name, value)
        return rehearse(url or f"s3://{s3_settings.bucket}/{s3_settings.prefix}", "gpt-w0")

    return asked


def test_a_store_that_does_all_passes_and_keeps_nothing(ask: Ask, s3_settings: S3Settings) -> None:
    check = ask()
    assert (check.result, check.concerns_job) == (Result.PASSED, False), check.message
    assert check.message == f"s3://{s3_settings.bucket}/team/job can list, write, read and delete objects"
    assert S3Bucket(s3_settings).keys("") == []


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_the_jobs(ask: Ask, wrong: str) -> None:
    check = ask(**{wrong: "another"})
    assert (check.result, check.concerns_job) == (Result.FAILED, True)
    assert "credentials are missing, wrong or expired: renew the secret" in check.message


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://nowhere/runs", "the bucket does not exist: create it, or correct the URL"),
        ("moon://crater/runs", "moon://crater/runs: fsspec cannot open it"),
    ],
)
def test_a_url_that_leads_nowhere_is_the_jobs(ask: Ask, url: str, says: str) -> None:
    check = ask(url)
    assert (check.result, check.concerns_job) == (Result.FAILED, True)
    assert says in check.message


def test_a_right_that_lacks_is_the_jobs(ask: Ask, s3: S3Server) -> None:
    def no_writing(request: Request) -> Answer | None:
        return Answer(status=403, code="AccessDenied") if request.method == "PUT" else None

    with faults(s3.url) as proxy:
        proxy.plan = no_writing
        check = ask(AWS_ENDPOINT_URL_S3=proxy.url)
    assert (check.result, check.concerns_job) == (Result.FAILED, True)
    assert "allow them to list, read, write and delete" in check.message


def test_what_the_store_lacks_is_said_with_the_verdict(ask: Ask, s3: S3Server) -> None:
    def without_conditions(request: Request) -> Answer | None:
        return Answer(status=501, code="NotImplemented") if "if-none-match" in request.headers else None

    with faults(s3.url) as proxy:
        proxy.plan = without_conditions
        check = ask(AWS_ENDPOINT_URL_S3=proxy.url)
    assert check.result == Result.PASSED
    assert "can list, write, read and delete objects; it does not support If-None-Match" in check.message


def test_store_creating_a_name_twice_is_unfit(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the features that the store claims to support."""

    def create(bucket: S3Bucket, key: str, data: bytes) -> bool:
        bucket.put(key, data)
        return True

    monkeypatch.setattr(S3Bucket, "create", create)
    check = ask()
    assert (check.result, check.concerns_job) == (Result.FAILED, False)
    assert "could overwrite each other's checkpoints" in check.message


def test_a_store_out_of_reach_may_be_the_nodes_fault(ask: Ask) -> None:
    with socket.socket() as held:  # nothing listens there, and nothing else can
        held.bind(("127.0.0.1", 0))
        check = ask(AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{held.getsockname()[1]}")
    assert (check.result, check.concerns_job) == (Result.FAILED, False)
    assert "after 3 attempts: the store cannot be reached: check the network" in check.message


def test_no_credentials_at_all_may_be_the_nodes_fault(ask: Ask) -> None:
    check = ask(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert (check.result, check.concerns_job) == (Result.FAILED, False)
    assert "credentials are missing" in check.message


def test_a_folder_is_no_store_to_be_tried(ask: Ask, tmp_path: Path) -> None:
    assert ask(str(tmp_path)).result is Result.SKIPPED


def test_the_process_of_its_own_says_the_same(ask: Ask, s3_settings: S3Settings) -> None:
    expected = ask()
    url = f"s3://{s3_settings.bucket}/{s3_settings.prefix}"
    assert (
        try_store([sys.executable, "-m", "holdfast.launcher.host.object_store_probe", url, "gpt-w0"], 300) == expected
    )
