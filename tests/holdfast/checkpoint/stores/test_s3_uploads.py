"""Uploads to a bucket: resumed, bounded, and published by one writer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from threading import Barrier, Lock
from typing import Any

import pytest
from s3_commits import Made, is_whole, upload

from holdfast.checkpoint.format.manifest import digest
from holdfast.checkpoint.stores.objects import s3_checksum
from holdfast.checkpoint.stores.objects.incoming import GIVEN_UP, SHA256SUMS
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.s3_client import S3Settings
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.errors import CheckpointError, UnavailableError
from holdfast_testbed.fakes.s3 import S3Server
from holdfast_testbed.fakes.s3_faults import Proxy, Reset


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
def test_parts_in_flight_do_not_exceed_the_requested_number(
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
def test_of_two_writers_of_one_checkpoint_one_succeeds(made: Made, s3_store: ObjectStore) -> None:
    """The other writer gets an error."""
    upload(made, s3_store)
    upload(made, s3_store)

    another = replace(made.manifest, run_id="another")
    with pytest.raises(CheckpointError, match="another manifest"):
        s3_store.receive(made.name, digest(made.manifest)).publish(another)
    with pytest.raises(
        CheckpointError, match=f"{made.name}/ is another {made.name}, which another process is writing"
    ):
        s3_store.receive(made.name, digest(another))

    assert is_whole(s3_store, made)


@pytest.mark.integration
def test_second_writer_under_the_same_name_changes_nothing(made: Made, s3_store: ObjectStore) -> None:
    """The two writers start to write different checkpoints."""
    first = s3_store.receive(made.name, digest(made.manifest))
    first.write("rank-0.json", [made.bytes["rank-0.json"]])

    with pytest.raises(CheckpointError, match="Use a separate prefix for each job, or delete that folder"):
        s3_store.receive(made.name, "another")

    first.write("rank-0.safetensors", [made.bytes["rank-0.safetensors"]])
    first.publish(made.manifest)
    assert is_whole(s3_store, made)
    s3_store.delete(made.name)
    s3_store.receive(made.name, "another").discard()


@pytest.mark.integration
def test_writer_does_not_publish_what_an_abandoned_twin_removed(made: Made, s3_store: ObjectStore) -> None:
    """Two writers write the same checkpoint, and one of them gives up."""
    stays, abandoned = (s3_store.receive(made.name, digest(made.manifest)) for _ in range(2))
    for file, data in made.bytes.items():
        stays.write(file, [data])

    abandoned.discard()

    with pytest.raises(CheckpointError, match="abandoned by another writer: try again"):
        stays.publish(made.manifest)
    assert s3_store.commits() == ()
    upload(made, s3_store)
    assert is_whole(s3_store, made)


@pytest.mark.integration
@pytest.mark.parametrize("published", [True, False], ids=["published before", "published by this writer"])
def test_writer_of_an_abandoned_checkpoint_removes_its_manifest(
    published: bool, made: Made, s3_settings: S3Settings, s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep of another process marks the folder before it checks for a manifest."""
    if published:
        upload(made, s3_store)
    create, mark = S3Bucket.create, f"{s3_settings.prefix}/{made.name}/{GIVEN_UP}"

    def marked_meanwhile(bucket: S3Bucket, key: str, data: bytes) -> bool:
        if key.endswith("MANIFEST.json"):
            bucket.put(mark, b"")
        return create(bucket, key, data)

    with monkeypatch.context() as patched:
        patched.setattr(S3Bucket, "create", marked_meanwhile)
        with pytest.raises(CheckpointError, match="abandoned by another writer: try again"):
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


AT_THE_END = """
import atexit
import sys
from holdfast.checkpoint.stores.open import open_store

bucket = open_store(sys.argv[1])._bucket

def last():
    bucket.upload("job/large", (memoryview(bytes(bucket.part_bytes)) for _ in range(3)))
    print(bucket.stat("job/large").nbytes == 3 * bucket.part_bytes)

atexit.register(last)
"""


def test_a_large_file_is_uploaded_while_the_interpreter_exits(s3: S3Server, s3_settings: S3Settings) -> None:
    """The last checkpoint of a script is written at that time."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END, f"s3://{s3_settings.bucket}/job"],
        env=os.environ | s3.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")
