"""If one rank reads corrupt data, the data is read again before a move. The result of one rank is not enough."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder.claims import write_claim
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.checkpoint.stores.folder import FolderSource, FolderStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CorruptCheckpointError, SuspectError

OLD = {"w": b"old" * 100, "b": b"x"}
NEW = {"w": b"new" * 100, "b": b"y"}
NEWEST = CheckpointName(step=20, attempt_id=AttemptId(1, 1))
EVER = 1 << 30


@dataclass
class Machine:
    """The host between a store and a rank. It returns one wrong byte `flips` times."""

    flips: int = 0
    blind: str = ""
    """A file that is not there for it."""
    reads: list[tuple[str, int]] = field(default_factory=list)

    def hand_over(self, file: str, offset: int, target: memoryview) -> None:
        self.reads.append((file, offset))
        if self.flips > 0 and target.nbytes:
            self.flips -= 1
            target[target.nbytes // 2] ^= 16


class Source(FolderSource):
    """A file as read on that host."""

    def __init__(self, path: Path, machine: Machine) -> None:
        super().__init__(path)
        self._file, self._machine = path.name, machine

    def read_into(self, offset: int, target: memoryview) -> None:
        super().read_into(offset, target)
        self._machine.hand_over(self._file, offset, target)

    def __enter__(self) -> Self:
        return self


class Store(FolderStore):
    """A folder as read on that host."""

    def __init__(self, root: Path, machine: Machine) -> None:
        super().__init__(root)
        self._machine = machine

    def manifest(self, name: CheckpointName) -> Manifest:
        if self._machine.flips > 0:
            self._machine.flips -= 1
            raise CorruptCheckpointError("MANIFEST.json: its own digest does not match")
        return super().manifest(name)

    def open(self, name: CheckpointName, file: str) -> FolderSource:
        if file == self._machine.blind:
            raise CorruptCheckpointError(f"{file} is missing")
        return Source(self._root / str(name) / file, self._machine)


class Files(Store):
    """Corrupt the reads of files, but not of manifests."""

    def manifest(self, name: CheckpointName) -> Manifest:
        return FolderStore.manifest(self, name)


@pytest.fixture
def root(tmp_path: Path, commit: Callable[..., Any]) -> Path:
    """Two complete checkpoints."""
    commit(tmp_path / "shared", 10, OLD)
    commit(tmp_path / "shared", 20, NEW)
    return tmp_path / "shared"


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def restored(root: Path, machine: Machine, kind: type[Store] = Files) -> Restored:
    return restore([kind(root, machine)], SingleRank(), job_uid="job-1")


@pytest.mark.parametrize("kind", [Files, Store])
def test_what_comes_right_when_it_is_read_again_is_no_damage(
    root: Path, content: Callable[..., Any], kind: type[Store]
) -> None:
    before = everything(root)

    found = restored(root, Machine(flips=1), kind)

    assert (found.step, found.quarantined, found.lost) == (20, (), ())
    assert content(found.loaded) == NEW
    assert everything(root) == before


def test_nothing_that_is_whole_is_read_twice(tmp_path: Path, commit: Callable[..., Any]) -> None:
    commit(tmp_path, 20, {"w": os.urandom(3 * CHUNK_BYTES)})
    machine = Machine()

    assert restored(tmp_path, machine).step == 20

    chunks = [read for read in machine.reads if read[0].endswith(".safetensors") and read[1] >= CHUNK_BYTES]
    assert len(chunks) == len(set(chunks))


def test_cached_pages_are_dropped_before_the_second_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []

    class Watched(Source):
        def forget(self) -> None:
            forgotten.append(self._file)
            super().forget()

    machine = Machine(flips=1)
    monkeypatch.setattr(Files, "open", lambda _, name, file: Watched(root / str(name) / file, machine))
    assert restored(root, machine).step == 20
    assert len(forgotten) == 1


@pytest.mark.parametrize("bad", range(3))
def test_single_rank_with_bad_reads_is_named_with_its_host(
    root: Path, world: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """No checkpoint is moved."""
    before = everything(root)

    def read(exchange: Exchange) -> str:
        store = Files(root, Machine(flips=EVER if exchange.rank == bad else 0))
        with pytest.raises(SuspectError) as refused:
            restore([store], exchange, job_uid="job-1", host=f"host-{exchange.rank}")
        return str(refused.value)

    told = set(world(3, read))

    assert len(told) == 1
    (message,) = told
    assert f"rank {bad} on host-{bad} " in message
    assert "no checkpoint was moved" in message
    assert everything(root) == before


def test_a_file_that_one_rank_alone_does_not_see_is_not_missing(root: Path, world: Callable[..., list[Any]]) -> None:
    before = everything(root)

    def read(exchange: Exchange) -> None:
        store = Files(root, Machine(blind="rank-0.safetensors" if exchange.rank == 1 else ""))
        with pytest.raises(SuspectError, match=r"rank-0\.safetensors is missing"):
            restore([store], exchange, job_uid="job-1")

    world(2, read)
    assert everything(root) == before


def test_another_tier_continues_the_restore_and_both_copies_stay(
    root: Path, tmp_path: Path, world: Callable[..., list[Any]], content: Callable[..., Any]
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    for name, data in everything(root).items():
        (second / name).parent.mkdir(exist_ok=True)
        (second / name).write_bytes(data)
    before = everything(root)

    def read(exchange: Exchange) -> Restored:
        first = Files(root, Machine(flips=EVER if exchange.rank == 1 else 0))
        return restore([first, FolderStore(second)], exchange, job_uid="job-1")

    found = world(2, read)

    assert [(one.step, one.quarantined, one.lost) for one in found] == [(20, (), ())] * 2
    assert [content(one.loaded) for one in found] == [NEW] * 2
    assert everything(root) == everything(second) == before


@pytest.mark.parametrize("bad", range(2))
def test_a_manifest_that_one_rank_alone_reads_badly_stays(
    root: Path, world: Callable[..., list[Any]], bad: int
) -> None:
    before = everything(root)

    def read(exchange: Exchange) -> Restored:
        machine = Machine()
        store = Store(root, machine)
        if exchange.rank == bad:
            machine.flips = 2  # a second read is not better; the files are intact
        return restore([store, FolderStore(root.parent / "none")], exchange, job_uid="job-1")

    assert [(one.step, one.quarantined) for one in world(2, read)] == [(20, ())] * 2
    assert everything(root) == before


def test_corruption_one_rank_reads_is_confirmed_by_another(
    tmp_path: Path, world: Callable[..., list[Any]], commit_by: Callable[..., Any]
) -> None:
    """A step with confirmed corruption is not restored."""
    size = 2 * CHUNK_BYTES
    for step in (10, 20):
        world(2, lambda exchange, step=step: commit_by(exchange, tmp_path, step, {"w": bytes([step]) * size}))
    damaged = tmp_path / str(NEWEST) / "rank-1.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)

    def read(exchange: Exchange) -> Restored:
        half = (exchange.rank * size // 2, (exchange.rank + 1) * size // 2)
        return restore(tmp_path, exchange, job_uid="job-1", select=lambda _: {"w": half})

    found = world(2, read)

    assert [one.step for one in found] == [10, 10]
    assert [bad.path for bad in found[0].quarantined] == [str(NEWEST)]
    assert len(list((tmp_path / "quarantine").glob("step-20*/MANIFEST.json"))) == 1


def test_an_error_of_a_volume_that_passes_costs_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft mount reports EIO if its server does not answer in time."""
    real, left = os.preadv, [1]

    def hiccup(fd: int, buffers: Sequence[Any], offset: int, *rest: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset, *rest)

    monkeypatch.setattr(os, "preadv", hiccup)
    found = restore(root, SingleRank(), job_uid="job-1")
    assert (found.step, found.quarantined) == (20, ())
    assert len(catalog.list_commits(root)) == 2


class Box:
    """An object with a state."""

    def state_dict(self) -> Any:
        return {"x": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"x": 1}


@pytest.mark.parametrize("file", ["rank-0.json", "MANIFEST.json"])
@pytest.mark.parametrize("jobs", [True, False], ids=["of a job", "of no job"])
def test_reader_of_a_foreign_folder_moves_nothing_unconfirmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, jobs: bool
) -> None:
    """The reader evaluates. That process alone cannot decide whether the file or the host is faulty."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step=step, box=Box())
    if jobs:
        write_claim(
            tmp_path,
            Claim(
                attempt_id=AttemptId(1, 1),
                job_uid="job-1",
                publication="p1",
                from_step=20,
                from_attempt_id=AttemptId(0, 1),
            ),
        )
    newest = "step-20.g0.a1"
    (tmp_path / newest / file).write_bytes(b"?" * (tmp_path / newest / file).stat().st_size)
    before = everything(tmp_path)

    found = checkpoint.load(tmp_path, box=Box())

    assert found is not None
    assert (found.step, [one.path for one in found.lost]) == (10, [newest])
    assert [one.path for one in found.quarantined] == ([] if jobs else [newest])
    assert (everything(tmp_path) == before) is jobs
    assert ("it belongs to a job and is not moved" in caplog.text) is jobs
