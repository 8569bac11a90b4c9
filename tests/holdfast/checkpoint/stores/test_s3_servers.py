"""S3 servers that lack or ignore a feature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from s3_commits import Made, by_signed_address, is_whole, upload, whole

from holdfast.checkpoint.stores.objects import s3 as s3_module
from holdfast.checkpoint.stores.objects.errors import Kind
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, ClaimError, UnavailableError
from holdfast_testbed.fakes.s3_faults import Answer, Proxy, Request


def ignored(header: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server or a proxy ignores a header that it does not support."""
    make = s3_module.client_of

    def without(request: Any, **_: Any) -> None:
        del request.headers[header]

    def client(settings: S3Settings) -> Any:
        made = make(settings)
        made.meta.events.register(f"before-sign.s3.{operation}", without)
        return made

    monkeypatch.setattr(s3_module, "client_of", client)


@pytest.mark.integration
def test_server_ignoring_ranges_does_not_make_a_file_corrupt(
    made: Made,
    proxy: Proxy,
    through: Callable[..., ObjectStore],
    s3_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upload(made, s3_store)
    ignored("Range", "GetObject", monkeypatch)
    proxy.plan = lambda request: Answer(status=403, code="AccessDenied") if by_signed_address(request) else None
    store = through(attempts=2)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        whole(store, made.name, "rank-0.safetensors")
    assert whole(store, made.name, "rank-0.json") == made.bytes["rank-0.json"], "all of an object is no range"


NO_CONDITIONS: dict[str, Answer | None] = {
    "ignored": None,
    "not implemented": Answer(status=501, code="NotImplemented"),
    "invalid": Answer(status=400, code="InvalidArgument"),
}


@pytest.mark.integration
@pytest.mark.parametrize("answer", NO_CONDITIONS.values(), ids=NO_CONDITIONS.keys())
def test_second_writer_is_refused_without_conditional_creation(
    *,
    answer: Answer | None,
    made: Made,
    proxy: Proxy,
    through: Callable[..., ObjectStore],
    s3_settings: S3Settings,
    s3_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server does not support conditional creation."""
    if answer is None:
        ignored("If-None-Match", "PutObject", monkeypatch)
    else:
        proxy.plan = lambda request: answer if "if-none-match" in request.headers else None
    claim = Claim(attempt_id=AttemptId(1, 1), job_uid="job", publication="p", from_step=0)
    store = through()
    for _ in range(2):
        store.keep_claim(claim)
        upload(made, store)

    with pytest.raises(ClaimError, match="another job"):
        through().keep_claim(replace(claim, job_uid="other"))
    with pytest.raises(CheckpointError, match="another process is writing"):
        through().receive(made.name, "another")

    assert is_whole(s3_store, made)
    assert s3_store.claims() == (claim,)
    assert [key for key in S3Bucket(s3_settings).keys("") if ".trial-" in key] == []
    assert sum("it does not support If-None-Match" in line for line in caplog.messages) == 3, "once for each store"
    if answer is not None:
        conditional = [request for request in proxy.seen if "if-none-match" in request.headers]
        assert len(conditional) <= 2 * 3, "each store tries it once, with either checksum, and no request again"


@pytest.mark.integration
def test_conditional_creation_is_used_silently_without_traces(
    s3_settings: S3Settings, s3_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial that detects the support leaves no object."""
    bucket = S3Bucket(s3_settings)
    assert bucket.create("a", b"1")
    assert bucket.create("a", b"1")
    assert not bucket.create("a", b"2")
    assert (bucket.keys(""), bucket.lacks, caplog.messages) == (["a"], (), [])


@pytest.mark.integration
def test_a_trial_that_cannot_be_deleted_hinders_nobody(
    s3_settings: S3Settings, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    """An uploader may have no permission to delete."""
    proxy.plan = lambda r: Answer(status=403, code="AccessDenied") if r.method in ("POST", "DELETE") else None
    claim = Claim(attempt_id=AttemptId(1, 1), job_uid="job", publication="p", from_step=0)
    through().keep_claim(claim)
    assert s3_store.claims() == (claim,)


def mentions(request: Request, word: str) -> bool:
    return any(word in f"{name}: {value}".lower() for name, value in request.headers.items())


def is_many_deletions(request: Request) -> bool:
    return request.method == "POST" and request.target.endswith("?delete")


LACKS: dict[str, tuple[Callable[[Request], bool], str]] = {
    "deletes of many without Content-MD5": (
        lambda request: is_many_deletions(request) and "content-md5" not in request.headers,
        "it refuses DeleteObjects",
    ),
    "CRC64NVME": (lambda request: mentions(request, "crc64nvme"), "it refuses CRC64NVME"),
    "types of checksums": (lambda request: "x-amz-checksum-type" in request.headers, "it refuses CRC64NVME"),
    "lists of uploads": (
        lambda request: request.method == "GET" and "uploads" in request.target.partition("?")[2],
        "it refuses ListMultipartUploads",
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "answer", [Answer(status=501, code="NotImplemented"), Answer(status=400, code="InvalidArgument")], ids=str
)
@pytest.mark.parametrize(("lacking", "says"), LACKS.values(), ids=LACKS.keys())
def test_what_a_server_refuses_is_said_once_and_done_without(
    *,
    lacking: Callable[[Request], bool],
    says: str,
    answer: Answer,
    made: Made,
    proxy: Proxy,
    through: Callable[..., ObjectStore],
    s3_store: ObjectStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.plan = lambda request: answer if lacking(request) else None
    store = through()
    later = replace(made.name, step=8)
    for _ in range(2):
        upload(made, store)
        assert is_whole(s3_store, made)
        store.sweep(later)
        store.delete(made.name)
        assert s3_store.commits() == ()

    assert sum(says in line for line in caplog.messages) == 1
    assert sum(lacking(request) for request in proxy.seen) == 1, "it is not asked for again"


@pytest.mark.integration
def test_server_refusing_all_checksums_is_named_with_its_message(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore]
) -> None:
    proxy.plan = lambda r: Answer(status=501, code="NotImplemented") if mentions(r, "x-amz-checksum-") else None
    with pytest.raises(UnavailableError, match=r"refuses the request \(501 NotImplemented: by plan") as refused:
        upload(made, through())
    assert refused.value.cause == Kind.REFUSED
    assert len(proxy.seen) == 2, "once with either checksum"
