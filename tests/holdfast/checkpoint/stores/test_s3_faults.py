"""Faults of an S3 server or the network: temporary ones are retried, and lasting ones are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from s3_commits import Made, by_signed_address, is_whole, once, upload

from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.objects.errors import Kind
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.errors import SuspectError, UnavailableError
from holdfast_testbed.fakes.s3_faults import Answer, Delay, Fault, Flip, Proxy, Request, Reset

PASSING: dict[str, Fault] = {
    "500": Answer(status=500, code="InternalError"),
    "503": Answer(status=503, code="SlowDown"),
    "reset in mid-part": Reset(after_bytes=5 << 20),
    "reset before the answer": Reset(answer_lost=True),
    "a byte of a part flipped": Flip(at=4 << 20),
    "seconds of silence": Delay(seconds=9),
}


@pytest.mark.integration
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_a_fault_that_passes_is_outlived(
    fault: Fault, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    proxy.plan = once(fault, lambda request: "partNumber=1" in request.target)

    upload(made, through(read_seconds=3.0 if isinstance(fault, Delay) else 60.0))

    assert is_whole(s3_store, made)
    assert sum(request.is_part for request in proxy.seen) >= 3


@pytest.mark.integration
@pytest.mark.parametrize("fault", [PASSING["500"], PASSING["503"], Reset(), Reset(answer_lost=True)], ids=str)
def test_so_is_one_while_reading(
    fault: Fault, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    upload(made, s3_store)
    proxy.plan = lambda request: fault if request.number % 3 == 0 else None

    assert is_whole(through(), made)


@pytest.mark.integration
@pytest.mark.parametrize("file", ["MANIFEST.json", "rank-0.json", "rank-0.safetensors"])
def test_byte_flipped_in_transit_is_read_again_and_nothing_moved(
    file: str, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    upload(made, s3_store)
    flips: list[int] = []

    def once_in_a_body(request: Request) -> Fault | None:
        if request.method != "GET" or file not in request.target or flips:
            return None
        flips.append(request.number)
        return Flip(at=1, answer=True)

    proxy.plan = once_in_a_body
    found = restore([through()], SingleRank(), job_uid="job-1")

    assert (found.step, found.quarantined, len(flips)) == (7, (), 1)
    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_host_flipping_all_downloads_condemns_no_checkpoint(
    made: Made,
    proxy: Proxy,
    through: Callable[..., ObjectStore],
    s3_store: ObjectStore,
    world: Callable[..., list[Any]],
) -> None:
    upload(made, s3_store)
    proxy.plan = lambda r: Flip(at=0, answer=True) if r.method == "GET" and "rank-0.safe" in r.target else None

    def read(exchange: Exchange) -> None:
        store = through() if exchange.rank == 1 else s3_store
        with pytest.raises(SuspectError, match="rank 1 on bad-host cannot read it"):
            restore([store], exchange, job_uid="job-1", host="bad-host" if exchange.rank == 1 else "good-host")

    world(2, read)
    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_large_parts_come_by_an_address_that_is_signed_once(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    upload(made, s3_store)
    assert is_whole(through(), made)
    assert len({request.target for request in proxy.seen if by_signed_address(request)}) == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    "fault", [Answer(status=403, code="AccessDenied"), Reset(), Reset(answer_lost=True)], ids=str
)
def test_without_presigned_addresses_each_request_is_signed(
    fault: Fault, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    upload(made, s3_store)
    proxy.plan = lambda request: fault if by_signed_address(request) else None
    assert is_whole(through(attempts=1), made)


LASTING: dict[Kind, Answer] = {
    Kind.CREDENTIALS: Answer(status=400, code="ExpiredToken"),
    Kind.DENIED: Answer(status=403, code="AccessDenied"),
    Kind.FULL: Answer(status=403, code="QuotaExceeded"),
    Kind.THROTTLED: Answer(status=503, code="SlowDown"),
}


@pytest.mark.integration
@pytest.mark.parametrize("kind", LASTING)
def test_lasting_fault_is_named_with_advice_and_decides_nothing(
    kind: Kind, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    answer = LASTING[kind]
    proxy.plan = lambda request: answer if request.is_part else None
    store = through(attempts=3)
    with pytest.raises(UnavailableError, match=answer.code) as error:
        upload(made, store)
    assert error.value.cause == kind
    assert s3_store.commits() == ()

    proxy.heal()
    upload(made, store)
    assert is_whole(s3_store, made)

    proxy.plan = lambda _: answer
    for act in (
        store.commits,
        store.claims,
        lambda: store.manifest(made.name),
        lambda: store.open(made.name, "rank-0.json"),
    ):
        with pytest.raises(UnavailableError):
            act()
    assert not store.quarantine(made.name, "a test says so")
    store.delete(made.name)
    assert is_whole(s3_store, made)


@pytest.mark.integration
@pytest.mark.parametrize("answer_lost", [False, True], ids=["unheard", "answer lost"])
def test_interrupted_upload_is_absent_or_complete_and_retryable(
    answer_lost: bool, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    """The upload is cut at every request in turn."""
    store = through(attempts=1)
    for cut in range(1, 100):
        first = len(proxy.seen)
        proxy.plan = lambda request, at=first + cut: Reset(answer_lost=answer_lost) if request.number >= at else None
        try:
            upload(made, store)
        except UnavailableError:
            finished = False
        else:
            finished = True
        proxy.heal()
        assert s3_store.commits() in ((), (made.name,))
        upload(made, store)
        assert is_whole(s3_store, made)
        s3_store.delete(made.name)
        if finished:
            break
    assert finished
    assert cut > len(made.bytes) + 3
