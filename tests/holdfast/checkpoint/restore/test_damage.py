"""Corruption is found, named and moved to quarantine, and nothing is deleted. The previous checkpoint is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, UnknownFormatError

OLD = {"w": b"old" * 100, "b": b"x"}
NEW = {"w": b"new" * 100, "b": b"y"}
NEWEST = "step-20.g1.a1"


@pytest.fixture
def root(tmp_path: Path, commit: Callable[..., Any]) -> Path:
    assert commit(tmp_path, 10, OLD).committed
    assert commit(tmp_path, 20, NEW).committed
    return tmp_path


def found(root: Path) -> Restored:
    return restore(root, SingleRank(), job_uid="job-1")


def flip(path: Path, place: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_newest_commit_is_used(root: Path, content: Callable[..., Any]) -> None:
    result = found(root)
    assert (result.step, result.attempt_id, result.quarantined) == (20, AttemptId(1, 1), ())
    assert result.loaded is not None
    assert content(result.loaded) == NEW
    assert result.loaded.per_rank == {"rank": 0}


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-0.json", "MANIFEST.json"])
@pytest.mark.parametrize("where", ["first byte", "header", "middle", "last byte"])
def test_one_flipped_bit_is_found_and_named(root: Path, content: Callable[..., Any], file: str, where: str) -> None:
    path = root / NEWEST / file
    size = path.stat().st_size
    flip(path, {"first byte": 0, "header": min(9, size - 1), "middle": size // 2, "last byte": size - 1}[where])
    damaged = tree(root / NEWEST)
    result = found(root)
    assert result.step == 10
    assert result.loaded is not None
    assert content(result.loaded) == OLD
    assert [bad.path for bad in result.quarantined] == [NEWEST]
    assert file in result.quarantined[0].reason
    (moved,) = (p for p in (root / "quarantine").iterdir() if p.is_dir())
    assert tree(moved) == damaged
    assert not (root / NEWEST).exists()


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-0.json", "MANIFEST.json"])
def test_a_missing_file_is_damage(root: Path, file: str) -> None:
    (root / NEWEST / file).unlink()
    result = found(root)
    assert result.step == 10
    assert f"{file} is missing" in result.quarantined[0].reason


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-0.json", "MANIFEST.json"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_is_damage(root: Path, file: str, change: int) -> None:
    path = root / NEWEST / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] if change < 0 else data + b"\0")
    assert found(root).step == 10


def test_a_file_of_another_step_is_damage(root: Path) -> None:
    for file in ("rank-0.safetensors", "MANIFEST.json"):
        saved = (root / NEWEST / file).read_bytes()
        (root / NEWEST / file).write_bytes((root / "step-10.g1.a1" / file).read_bytes())
        result = found(root)
        assert result.step == 10, file
        (moved,) = (p for p in (root / "quarantine").iterdir() if p.is_dir())
        (moved / file).write_bytes(saved)
        moved.rename(root / NEWEST)


def emptied(folder: Path, file: Path) -> None:
    file.write_bytes(b"")


def cut(folder: Path, file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def padded(folder: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(4096))


def zeroed(folder: Path, file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def doubled(folder: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)


def swapped(folder: Path, file: Path) -> None:
    """Replace the manifest by another sealed one. Without a seal, its format is foreign, and ends the job by name."""
    if file.name == "MANIFEST.json":
        file.write_bytes(file.read_bytes().replace(b'"step":20', b'"step":10'))
        return
    other = folder / ("rank-0.json" if file.name != "rank-0.json" else "rank-0.safetensors")
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def stale(folder: Path, file: Path) -> None:
    file.write_bytes((folder.parent / "step-10.g1.a1" / file.name).read_bytes())


def missing(folder: Path, file: Path) -> None:
    file.unlink()


def linked(folder: Path, file: Path) -> None:
    """Link to the same bytes, which can change without the checkpoint."""
    file.rename(folder.parent / f"elsewhere-{file.name}")
    file.symlink_to(folder.parent / f"elsewhere-{file.name}")


def a_loop(folder: Path, file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def a_folder(folder: Path, file: Path) -> None:
    file.unlink()
    file.mkdir()


def flipped(folder: Path, file: Path) -> None:
    flip(file, file.stat().st_size // 2)


KINDS = [emptied, cut, padded, zeroed, doubled, swapped, stale, missing, linked, a_loop, a_folder, flipped]
FILES = ["rank-0.safetensors", "rank-0.json", "MANIFEST.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", KINDS, ids=lambda kind: kind.__name__)
def test_any_damage_is_caught_and_the_older_step_restored(
    tmp_path: Path, commit: Callable[..., Any], content: Callable[..., Any], damage: Callable[..., None], file: str
) -> None:
    commit(tmp_path, 10, OLD | {"age": b"old"}, rank=7)
    commit(tmp_path, 20, NEW)
    damage(tmp_path / NEWEST, tmp_path / NEWEST / file)

    result = found(tmp_path)

    assert result.step == 10
    assert result.loaded is not None
    assert content(result.loaded) == OLD | {"age": b"old"}
    assert [bad.path for bad in result.quarantined] == [NEWEST]
    assert [lost.path for lost in result.lost] == [NEWEST]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", KINDS, ids=lambda kind: kind.__name__)
def test_corruption_of_one_copy_costs_nothing_with_another_copy(
    tmp_path: Path, commit: Callable[..., Any], content: Callable[..., Any], damage: Callable[..., None], file: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    commit(first, 10, OLD | {"age": b"old"}, rank=7)
    commit(first, 20, NEW)
    shutil.copytree(first, second)
    damage(first / NEWEST, first / NEWEST / file)

    result = restore([FolderStore(first), FolderStore(second)], SingleRank(), job_uid="job-1")

    assert result.step == 20
    assert result.loaded is not None
    assert content(result.loaded) == NEW
    assert str(second) in result.stores
    assert result.lost == ()
    assert [(bad.path, bad.reason.partition(": ")[0]) for bad in result.quarantined] == [(NEWEST, str(first))]
    assert (second / NEWEST).is_dir()


def test_damage_past_the_first_8_mib_names_its_chunk(tmp_path: Path, commit: Callable[..., Any]) -> None:
    commit(tmp_path, 10, {"w": os.urandom(CHUNK_BYTES + 5000)})
    flip(tmp_path / "step-10.g1.a1" / "rank-0.safetensors", CHUNK_BYTES + 1000)
    assert "digest of chunk 1 differs" in found(tmp_path).lost[0].reason


def test_when_all_are_damaged_nothing_is_moved_and_all_are_named(root: Path) -> None:
    for step in (10, 20):
        flip(root / f"step-{step}.g1.a1" / "rank-0.safetensors", 4200)
    before = tree(root)
    result = found(root)
    assert result.loaded is None
    assert result.quarantined == ()
    assert [bad.path for bad in result.stuck] == [NEWEST, "step-10.g1.a1"]
    assert tree(root) == before


def test_what_every_rank_finds_bad_is_bad_for_all(
    root: Path, world: Callable[..., Any], content: Callable[..., Any]
) -> None:
    flip(root / NEWEST / "rank-0.safetensors", 4200)
    results = world(3, lambda exchange: restore(root, exchange, job_uid="job-1"))
    assert {result.step for result in results} == {10}
    assert [content(result.loaded) for result in results] == [OLD] * 3
    assert {result.quarantined for result in results} == {results[0].quarantined}


def test_a_newer_format_stops_the_job_by_name_and_is_not_touched(root: Path) -> None:
    manifest = root / NEWEST / "MANIFEST.json"
    manifest.write_bytes(b'{"format": "tape"}')
    before = tree(root)
    with pytest.raises(UnknownFormatError, match=r"step-20\.g1\.a1: .*another program.*Nothing was changed"):
        found(root)
    assert tree(root) == before


def test_a_newer_format_stops_every_rank(root: Path, world: Callable[..., Any]) -> None:
    (root / NEWEST / "MANIFEST.json").write_bytes(b'{"format": "tape"}')

    def outcome(exchange: Exchange) -> str:
        with pytest.raises(UnknownFormatError) as raised:
            restore(root, exchange, job_uid="job-1")
        return str(raised.value)

    assert len(set(world(2, outcome))) == 1


def test_a_folder_that_may_not_be_read_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, most: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(catalog, "read_regular", refused)  # root may read everything, so the system cannot refuse
    with pytest.raises(CheckpointError, match="Make it readable and start again"):
        found(root)
    monkeypatch.undo()
    assert found(root).step == 20


def test_other_things_in_the_folder_are_left_alone(root: Path) -> None:
    (root / "notes.txt").write_text("mine")
    (root / ("step-30.g1.a1.tmp-" + "0" * 32)).mkdir()
    (root / "step-30").mkdir()
    (root / "checkpoint-40").mkdir()
    assert found(root).step == 20
    assert (root / "notes.txt").read_text() == "mine"
    assert (root / "step-30").is_dir()


def test_a_pickle_is_never_opened(root: Path) -> None:
    """A file that runs code when it is unpickled lies alongside, or in place of, a file that is read."""
    bomb = b"cposix\nsystem\n(S'touch " + str(root / "owned").encode() + b"'\ntR."
    for name in ("rank-0.pt", "data.pkl", ".metadata"):
        (root / NEWEST / name).write_bytes(bomb)
    assert found(root).step == 20
    for name in ("rank-0.json", "rank-0.safetensors", "MANIFEST.json"):
        (root / NEWEST / name).write_bytes(bomb)
    assert found(root).step == 10
    assert not (root / "owned").exists()


def test_a_commit_that_is_asked_for_by_step_is_used(root: Path) -> None:
    assert restore(root, SingleRank(), job_uid="job-1", step=10).step == 10


def test_the_same_step_of_a_higher_attempt_wins(root: Path, commit: Callable[..., Any], content: Callable[..., Any]):
    commit(root, 20, OLD, AttemptId(1, 2))
    result = found(root)
    assert result.attempt_id == AttemptId(1, 2)
    assert result.loaded is not None
    assert content(result.loaded) == OLD


def test_a_commit_without_its_manifest_gives_way_to_a_new_one(root: Path, commit: Callable[..., Any]) -> None:
    (root / NEWEST / "MANIFEST.json").unlink()
    assert commit(root, 20, NEW).committed
    assert found(root).step == 20
    assert any((root / "quarantine").iterdir())


def test_a_step_of_the_same_attempt_is_committed_once(root: Path, commit: Callable[..., Any]) -> None:
    before = tree(root / str(CheckpointName(step=20, attempt_id=AttemptId(1, 1))))
    assert commit(root, 20, {"w": b"something else"}).committed
    assert tree(root / NEWEST) == before
