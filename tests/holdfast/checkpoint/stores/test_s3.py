"""A commit in a bucket is whole or none, whatever happens; trouble on the way is never taken for damage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest, digest
from holdfast.checkpoint.ranks.exchange import Alone, Exchange
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects import s3 as s3_module
from holdfast.checkpoint.stores.objects import s3_checksum
from holdfast.checkpoint.stores.objects.errors import Kind, pause, trouble_of
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import GIVEN_UP, SHA256SUMS, ObjectStore
from holdfast.checkpoint.stores.open import open_store
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, ClaimError, DamagedError, SuspectError, UnavailableError, UsageError
from holdfast_testbed.fakes.s3 import S3Server, s3_server
from holdfast_testbed.fakes.s3_faults import Answer, Delay, Fault, Flip, Proxy, Request, Reset, faults

SIZE = (8 << 20) + 12345  # two parts


@dataclass(frozen=True)
class Made:
    """A commit in a folder, and where it lies."""

    store: FolderStore
    name: CheckpointName
    bytes: dict[str, bytes] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest(self.name)


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


def upload(made: Made, target: ObjectStore) -> None:
    incoming = target.receive(made.name, digest(made.manifest))
    for file, record in made.manifest.files.items():
        assert incoming.write(file, [made.bytes[file]]) == record
    incoming.publish(made.manifest)


def whole(store: ObjectStore, name: CheckpointName, file: str) -> bytes:
    with store.open(name, file) as opened:
        data = bytearray(opened.nbytes)
        opened.read_into(0, memoryview(data))
    return bytes(data)


def is_whole(store: ObjectStore, made: Made) -> bool:
    assert store.commits() == (made.name,)
    assert store.manifest(made.name) == made.manifest
    return all(whole(store, made.name, file) == data for file, data in made.bytes.items())


def once(fault: Fault, matches: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """The fault for the first request that matches, and for no other."""
    left = [fault]
    return lambda request: left.pop() if left and matches(request) else None


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
def test_a_byte_that_is_flipped_on_its_way_down_is_read_again_and_nothing_is_moved(
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
    found = restore([through()], Alone(), job_uid="job-1")

    assert (found.step, found.quarantined, len(flips)) == (7, (), 1)
    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_a_machine_that_flips_all_that_it_downloads_condemns_nothing(
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


def by_signed_address(request: Request) -> bool:
    return "X-Amz-Signature" in request.target


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
def test_where_such_addresses_do_not_serve_each_request_is_signed(
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
def test_a_fault_that_lasts_is_named_with_what_to_do_and_concludes_nothing(
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
def test_cut_at_every_request_there_is_no_commit_or_a_whole_one_and_a_retry_completes_it(
    answer_lost: bool, made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
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


@pytest.mark.integration
def test_an_interrupted_upload_goes_on_from_its_parts(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    proxy.plan = lambda request: Reset() if "partNumber=2" in request.target else None
    with pytest.raises(UnavailableError):
        upload(made, through(attempts=1))
    proxy.heal()
    before = len(proxy.seen)

    upload(made, through())

    again = [request for request in proxy.seen[before:] if request.is_part]
    assert ["partNumber=2" in request.target for request in again] == [True]
    assert is_whole(s3_store, made)


@pytest.mark.integration
@pytest.mark.parametrize("asked", [1, 3])
def test_no_more_parts_are_on_their_way_at_once_than_are_asked_for(
    s3_settings: S3Settings, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    call, now, most, lock = S3Bucket.call, [0], [0], Lock()
    all_there = Barrier(asked)

    def counted(bucket: S3Bucket, operation: str, key: str, **arguments: Any) -> Any:
        if operation != "upload_part":
            return call(bucket, operation, key, **arguments)
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        all_there.wait(timeout=240)
        with lock:
            now[0] -= 1
        return call(bucket, operation, key, **arguments)

    monkeypatch.setattr(S3Bucket, "call", counted)
    bucket = S3Bucket(replace(s3_settings, in_flight=asked))
    block = memoryview(bytes(bucket.part_bytes))
    bucket.upload("large", [block] * 6)
    assert most == [asked]
    assert ObjectStore(bucket).readers == asked, "a restore asks for as many"


def test_without_awscrt_the_server_compares_sha256(
    made: Made, s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_checksum, "_crc64nvme", lambda: None)
    incoming = s3_store.receive(made.name, digest(made.manifest))
    incoming.write("rank-0.safetensors", [made.bytes["rank-0.safetensors"]])

    upload(made, s3_store)

    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_of_two_writers_of_one_commit_one_wins_and_the_other_is_told(made: Made, s3_store: ObjectStore) -> None:
    upload(made, s3_store)
    upload(made, s3_store)

    another = replace(made.manifest, run_id="another")
    with pytest.raises(CheckpointError, match="another manifest"):
        s3_store.receive(made.name, digest(made.manifest)).publish(another)
    with pytest.raises(CheckpointError, match=f"{made.name}/ is another {made.name}, which somebody else writes"):
        s3_store.receive(made.name, digest(another))

    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_of_two_that_begin_to_write_other_commits_under_one_name_the_second_changes_nothing(
    made: Made, s3_store: ObjectStore
) -> None:
    first = s3_store.receive(made.name, digest(made.manifest))
    first.write("rank-0.json", [made.bytes["rank-0.json"]])

    with pytest.raises(CheckpointError, match="give each job a prefix of its own, or delete that folder"):
        s3_store.receive(made.name, "another")

    first.write("rank-0.safetensors", [made.bytes["rank-0.safetensors"]])
    first.publish(made.manifest)
    assert is_whole(s3_store, made)
    s3_store.delete(made.name)
    s3_store.receive(made.name, "another").discard()


@pytest.mark.integration
def test_of_two_that_write_the_same_one_may_give_up_and_the_other_does_not_publish_what_went_with_it(
    made: Made, s3_store: ObjectStore
) -> None:
    stays, goes = (s3_store.receive(made.name, digest(made.manifest)) for _ in range(2))
    for file, data in made.bytes.items():
        stays.write(file, [data])

    goes.discard()

    with pytest.raises(CheckpointError, match="given up by another writer: try again"):
        stays.publish(made.manifest)
    assert s3_store.commits() == ()
    upload(made, s3_store)
    assert is_whole(s3_store, made)


@pytest.mark.integration
@pytest.mark.parametrize("published", [True, False], ids=["published before", "published by this writer"])
def test_a_writer_that_finds_the_commit_given_up_takes_away_its_own_manifest_and_no_other(
    published: bool, made: Made, s3_settings: S3Settings, s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that sweeps marks the folder before it looks whether there is a manifest."""
    if published:
        upload(made, s3_store)
    create, mark = S3Bucket.create, f"{s3_settings.prefix}/{made.name}/{GIVEN_UP}"

    def marked_meanwhile(bucket: S3Bucket, key: str, data: bytes) -> bool:
        if key.endswith("MANIFEST.json"):
            bucket.put(mark, b"")
        return create(bucket, key, data)

    with monkeypatch.context() as patched:
        patched.setattr(S3Bucket, "create", marked_meanwhile)
        with pytest.raises(CheckpointError, match="given up by another writer: try again"):
            upload(made, s3_store)
    assert s3_store.commits() == ((made.name,) if published else ())

    S3Bucket(s3_settings).delete([mark])
    upload(made, s3_store)
    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_the_sha256_of_each_file_lies_beside_it(
    made: Made, s3: S3Server, s3_settings: S3Settings, s3_store: ObjectStore
) -> None:
    from hashlib import sha256

    upload(made, s3_store)

    folder = s3.folder / s3_settings.bucket / s3_settings.prefix / str(made.name)
    sums = dict(reversed(line.split()) for line in (folder / SHA256SUMS).read_text().splitlines())
    assert sums == {file: sha256(data).hexdigest() for file, data in made.bytes.items()}


def ignored(header: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a server that does not know the header, or by a proxy before it."""
    make = s3_module.client_of

    def without(request: Any, **_: Any) -> None:
        del request.headers[header]

    def client(settings: S3Settings) -> Any:
        made = make(settings)
        made.meta.events.register(f"before-sign.s3.{operation}", without)
        return made

    monkeypatch.setattr(s3_module, "client_of", client)


@pytest.mark.integration
def test_a_server_that_ignores_ranges_is_no_reason_to_call_a_file_damaged(
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
def test_on_a_server_without_conditional_creation_the_second_writer_is_refused_all_the_same(
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
    if answer is None:
        ignored("If-None-Match", "PutObject", monkeypatch)
    else:
        proxy.plan = lambda request: answer if "if-none-match" in request.headers else None
    claim = Claim(pair=AttemptId(1, 1), job_uid="job", publication="p", from_step=0)
    store = through()
    for _ in range(2):
        store.keep_claim(claim)
        upload(made, store)

    with pytest.raises(ClaimError, match="another job"):
        through().keep_claim(replace(claim, job_uid="other"))
    with pytest.raises(CheckpointError, match="somebody else writes"):
        through().receive(made.name, "another")

    assert is_whole(s3_store, made)
    assert s3_store.claims() == (claim,)
    assert [key for key in S3Bucket(s3_settings).keys("") if ".trial-" in key] == []
    assert sum("it does not honour If-None-Match" in line for line in caplog.messages) == 3, "once for each store"
    if answer is not None:
        conditional = [request for request in proxy.seen if "if-none-match" in request.headers]
        assert len(conditional) <= 2 * 3, "each store tries it once, with either checksum, and no request again"


@pytest.mark.integration
def test_on_a_server_with_conditional_creation_nothing_is_said_and_nothing_left_of_the_trial(
    s3_settings: S3Settings, s3_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = S3Bucket(s3_settings)
    assert bucket.create("a", b"1")
    assert bucket.create("a", b"1")
    assert not bucket.create("a", b"2")
    assert (bucket.keys(""), bucket.lacks, caplog.messages) == (["a"], (), [])


@pytest.mark.integration
def test_a_trial_that_cannot_be_deleted_hinders_nobody(
    s3_settings: S3Settings, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    """An uploader may have no right to delete."""
    proxy.plan = lambda r: Answer(status=403, code="AccessDenied") if r.method in ("POST", "DELETE") else None
    claim = Claim(pair=AttemptId(1, 1), job_uid="job", publication="p", from_step=0)
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
def test_a_server_that_refuses_every_checksum_is_named_with_its_own_words(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore]
) -> None:
    proxy.plan = lambda r: Answer(status=501, code="NotImplemented") if mentions(r, "x-amz-checksum-") else None
    with pytest.raises(UnavailableError, match=r"refuses the request \(501 NotImplemented: by plan") as refused:
        upload(made, through())
    assert refused.value.cause == Kind.REFUSED
    assert len(proxy.seen) == 2, "once with either checksum"


@pytest.mark.integration
def test_claims_are_exclusive(s3_store: ObjectStore) -> None:
    claims = [Claim(pair=AttemptId(g, 1), job_uid="job", publication="p", from_step=g) for g in (2, 1)]
    for claim in [*claims, claims[0]]:
        s3_store.keep_claim(claim)

    with pytest.raises(ClaimError, match="another job"):
        s3_store.keep_claim(replace(claims[0], job_uid="other"))

    assert s3_store.claims() == tuple(reversed(claims))


@pytest.mark.integration
def test_a_claim_larger_than_any_is_refused_before_it_is_read(s3_settings: S3Settings) -> None:
    bucket = S3Bucket(s3_settings)
    bucket.put("team/job/claims/1.1.json", bytes((64 << 10) + 1))
    with pytest.raises(DamagedError, match="more than it can have"):
        ObjectStore(bucket, s3_settings.prefix).claims()


def test_what_was_never_finished_is_swept_away_and_nothing_else(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_settings: S3Settings, s3_store: ObjectStore
) -> None:
    upload(made, s3_store)
    unfinished = CheckpointName(step=8, pair=made.name.pair)
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
def test_a_server_that_trips_over_what_is_deleted_meanwhile_is_asked_for_its_list_again(
    made: Made, proxy: Proxy, through: Callable[..., ObjectStore], s3_store: ObjectStore
) -> None:
    """versitygw answers so to a list, as a file system may below others: nothing is missing, and nothing damaged."""
    upload(made, s3_store)
    proxy.plan = once(Answer(status=404, code="NoSuchKey"), lambda request: "list-type=2" in request.target)
    assert through().commits() == (made.name,)
    proxy.plan = lambda request: Answer(status=404, code="NoSuchKey") if "list-type=2" in request.target else None
    with pytest.raises(UnavailableError) as refused:
        through(attempts=2).commits()
    assert refused.value.cause == Kind.SERVER


@pytest.mark.integration
def test_the_region_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server refuses the first request, naming its own, and each address that is signed for large parts."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with s3_server(tmp_path / "s3", region="eu-central-1") as server, faults(server.url) as proxy:
        bucket = server.make_bucket("elsewhere")
        S3Bucket(S3Settings(bucket=bucket, endpoint=proxy.url, credentials=server.credentials)).folders("job/")
    assert len(proxy.seen) == 1


@pytest.mark.integration
def test_a_missing_bucket_is_no_damage(s3_settings: S3Settings) -> None:
    store = ObjectStore(S3Bucket(replace(s3_settings, bucket="not-there")))
    name = CheckpointName(step=1, pair=AttemptId(1, 1))
    for act in (store.commits, lambda: store.manifest(name), lambda: store.open(name, "rank-0.json")):
        with pytest.raises(UnavailableError, match="create it, or mend the URL") as error:
            act()
        assert error.value.cause == Kind.NO_BUCKET


@pytest.mark.integration
def test_renewed_credentials_are_read_again(
    made: Made, s3: S3Server, s3_settings: S3Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mounted secret that was renewed while the process ran."""
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
        with pytest.raises(DamagedError, match="replaced"):
            opened.read_into(0, memoryview(bytearray(2)))


def test_an_s3_url_carries_no_credentials() -> None:
    for url in ("s3://key:secret@bucket/x", "s3://bucket/x?endpoint=y"):
        with pytest.raises(UsageError, match="from the environment") as error:
            open_store(url)
        assert "secret" not in str(error.value)
    with pytest.raises(UsageError, match="names no bucket"):
        open_store("s3:///x")


@pytest.mark.integration
def test_an_empty_segment_in_the_middle_of_a_url_is_dropped_and_said(
    made: Made,
    s3: S3Server,
    s3_settings: S3Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server over a file system lists such a key without it: no commit would ever be found complete."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    target = open_store(f"s3://{s3_settings.bucket}/joined//run/")
    assert isinstance(target, ObjectStore)
    upload(made, target)
    assert is_whole(target, made)
    assert target.url == f"s3://{s3_settings.bucket}/joined/run"
    assert f"s3://{s3_settings.bucket}/joined/run is used. Move what was written" in caplog.text


@pytest.mark.parametrize("prefix", ["a/../b", "..", "a/./b"])
def test_no_url_leads_out_of_its_prefix(prefix: str) -> None:
    with pytest.raises(UsageError, match="some servers follow them: leave them out"):
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
    assert trouble_of(error).kind is kind


def test_pauses_grow_to_a_bound() -> None:
    longest = [pause(attempt, base=0.25, cap=20, draw=1) for attempt in range(8)]
    assert longest == [0.25, 0.5, 1, 2, 4, 8, 16, 20]
    assert all(pause(attempt, base=0.25, cap=20, draw=0) == whole / 2 for attempt, whole in enumerate(longest))
