"""Requirements on every store, tested with each kind of store."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from node_stores import FilledLocalStore, FilledMemoryStore

from holdfast.checkpoint import save
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import LARGEST, digest
from holdfast.checkpoint.stores.base import CheckpointStore, Target
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.fsspec import fsspec_store
from holdfast.checkpoint.stores.open import open_store
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

torch = pytest.importorskip("torch")

STORES: dict[str, Callable[[Path], Target]] = {
    "folder": FolderStore,
    "memory": FilledMemoryStore,
    "local": FilledLocalStore,
    "file": lambda path: open_store(f"file://{path}"),
    "fsspec": lambda path: fsspec_store(f"local://{path}"),
    "fsspec-memory": lambda path: open_store(f"memory://{path}"),
}


@pytest.fixture(params=[*STORES, pytest.param("s3", marks=pytest.mark.integration)], ids=str)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "s3":
        return request.getfixturevalue("s3_store")
    return STORES[request.param](tmp_path / "target")


@pytest.fixture
def source(tmp_path: Path) -> tuple[CheckpointStore, CheckpointName]:
    save(tmp_path / "source", step=7, model=torch.nn.Linear(64, 64))
    made = FolderStore(tmp_path / "source")
    return made, made.commits()[0]


def whole(store: Target, name: CheckpointName, file: str) -> bytes:
    with store.open(name, file) as opened:
        data = bytearray(opened.nbytes)
        opened.read_into(0, memoryview(data))
    return bytes(data)


def copy(source: CheckpointStore, name: CheckpointName, target: Target) -> None:
    manifest = source.manifest(name)
    incoming = target.receive(name, digest(manifest))
    for file, record in manifest.files.items():
        assert incoming.write(file, [whole(source, name, file)]) == record
    assert target.commits() == ()
    incoming.publish(manifest)


def test_checkpoint_is_hidden_until_its_manifest_arrives(
    store: Target, source: tuple[CheckpointStore, CheckpointName]
) -> None:
    made, name = source

    copy(made, name, store)

    assert store.commits() == (name,)
    assert store.manifest(name) == made.manifest(name)
    assert all(whole(store, name, file) == whole(made, name, file) for file in made.manifest(name).files)


def test_what_is_given_up_is_no_commit(store: Target, source: tuple[CheckpointStore, CheckpointName]) -> None:
    incoming = store.receive(source[1], "")
    incoming.write("rank-0.json", [b"{}"])

    incoming.discard()

    assert store.commits() == ()


def test_reading_behind_the_end_or_what_is_not_there_is_damage(
    store: Target, source: tuple[CheckpointStore, CheckpointName]
) -> None:
    made, name = source
    copy(made, name, store)

    with store.open(name, "rank-0.json") as opened, pytest.raises(CorruptCheckpointError, match="ends before"):
        opened.read_into(opened.nbytes - 1, memoryview(bytearray(2)))
    with pytest.raises(CorruptCheckpointError, match="missing"), store.open(name, "rank-9.json"):
        pass


def test_manifest_or_claim_beyond_the_maximum_is_not_read(tmp_path: Path) -> None:
    attempt_id = AttemptId(1, 1)
    name = CheckpointName(step=7, attempt_id=attempt_id)
    (tmp_path / str(name)).mkdir()
    (tmp_path / "claims").mkdir()
    for path, most in ((tmp_path / str(name) / "MANIFEST.json", LARGEST), (tmp_path / "claims/1.1.json", 64 << 10)):
        with path.open("wb") as file:
            file.truncate(most + 1)  # holes
    for store in (FolderStore(tmp_path), fsspec_store(f"local://{tmp_path}")):
        tracemalloc.start()
        with pytest.raises(CorruptCheckpointError, match="more than the limit for this file"):
            store.manifest(name)
        with pytest.raises(CheckpointError, match="more than the limit for this file"):
            store.claims()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_a_bad_commit_is_moved_aside_and_a_deleted_one_is_gone(
    store: Target, source: tuple[CheckpointStore, CheckpointName]
) -> None:
    made, name = source
    copy(made, name, store)
    assert store.quarantine(name, "a test says so")
    assert store.commits() == ()
    if store.shared:  # the ranks of a node remove old checkpoints from its own store
        copy(made, name, store)
        store.delete(name)
        assert store.commits() == ()
