"""`torch.distributed.checkpoint` with the storage of Holdfast: its planners, our format and verification."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.testing._internal.two_tensor import TwoTensor

from holdfast import checkpoint
from holdfast.checkpoint.dcp import writer
from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.dcp.writer import StorageWriter
from holdfast.checkpoint.folder.catalog import read_manifest
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, StateError

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "dcp_world.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, together: Callable[..., list[str]]) -> Path:
    """Two ranks save an FSDP2 model, its optimizer, column-sharded tensors and values. Step 2 is asynchronous.

    Three ranks and one rank have loaded the state and found every bit equal.
    """
    folder = tmp_path_factory.mktemp("dcp")
    commands = [[sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(folder)] for rank in range(3)]
    told = together(commands, [os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}] * 3)
    assert "the same at two, three and one" in told[0]
    (folder / "told.txt").write_text("".join(told))
    return folder


def test_any_number_of_ranks_loads_a_checkpoint_without_pickle(saved: Path) -> None:
    loaded = restore(saved, SingleRank()).loaded
    assert loaded is not None
    assert loaded.name.step == 2
    assert loaded.manifest.tensors["model.0.weight"].shape == (10, 6)
    assert [chunk.file for chunk in loaded.manifest.tensors["model.0.weight"].chunks] == [
        "rank-0.safetensors",
        "rank-1.safetensors",
    ]
    columns = loaded.manifest.tensors["columns"]
    assert (columns.shape, [chunk.start for chunk in columns.chunks]) == ((5, 8), [(0, 0), (0, 4)])
    files = {path.name for path in (saved / str(loaded.name)).iterdir()}
    assert files == {"MANIFEST.json", "rank-0.safetensors", "rank-1.safetensors"}


def test_save_with_cached_plans_writes_current_values(saved: Path) -> None:
    columns = torch.arange(40.0).reshape(5, 8)
    names = ("rows", "own0", "own1", "shared")
    for step in range(1, 6):
        into: dict[str, Any] = {name: torch.zeros(5, 8) for name in names} | {"step": 0}
        dcp.load(into, storage_reader=StorageReader(saved / "cached", step=step), no_dist=True)
        expected = [columns * step, columns + step, columns + step, columns - step]
        assert all(torch.equal(into[name], one) for name, one in zip(names, expected, strict=True))
        assert into["step"] == step
    assert {path.name for path in (saved / "cached").glob("step-*")} == {f"step-{step}.g0.a1" for step in range(1, 6)}


def test_ranks_that_find_different_checkpoints_load_none(saved: Path) -> None:
    said = (saved / "told.txt").read_text()
    assert "rank 0 found step-2.g0.a1, and rank 1 found step-1.g0.a1. Nothing was loaded." in said
    assert said.count("a rank of a world of 3 looked for the newest checkpoint") == 3
    assert (said.count("untouched"), said.count("loaded\n")) == (6, 0)


def test_save_without_collectives_is_refused_before_any_write(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Leave use_collectives out"):
        dcp.save(
            state(1.0), storage_writer=StorageWriter(tmp_path / "new", step=1), no_dist=True, use_collectives=False
        )
    assert list(tmp_path.iterdir()) == []


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((300, 70), value), "s": torch.tensor(value), "count": int(value)}


def test_checkpoint_of_an_earlier_release_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier release stored each box as a tensor of its own."""
    with monkeypatch.context() as earlier:
        earlier.setattr(writer, "tiles", lambda size, boxes: False)
        dcp.save(state(4.0), storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    assert "w@0,0" in read_manifest(tmp_path, CheckpointName(step=1, attempt_id=AttemptId(0, 1))).tensors
    into = state()
    dcp.load(into, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert torch.equal(into["w"], state(4.0)["w"])


def test_what_ranks_without_a_row_wrote_is_whole(saved: Path) -> None:
    assert verify(FolderStore(saved), CheckpointName(step=2, attempt_id=AttemptId(0, 1))).reason == ""


def test_tensors_without_elements_are_whole(tmp_path: Path) -> None:
    hollow = {"a": torch.empty(0), "b": torch.empty(3, 0), "w": torch.ones(2)}
    dcp.save(hollow, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    assert verify(FolderStore(tmp_path), CheckpointName(step=1, attempt_id=AttemptId(0, 1))).reason == ""


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    dcp.save(state(1.0), storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    dcp.save(state(2.0), storage_writer=StorageWriter(tmp_path, step=2), no_dist=True)
    path = tmp_path / "step-2.g0.a1" / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    into = state()
    with pytest.raises(
        (CheckpointError, CheckpointException), match=r"rank-0\.safetensors: digest of chunk 0 differs"
    ):
        dcp.load(into, storage_reader=StorageReader(tmp_path), no_dist=True)
    dcp.load(into, storage_reader=StorageReader(tmp_path, step=1), no_dist=True)
    assert torch.equal(into["w"], state(1.0)["w"])
    assert (into["s"].item(), into["count"]) == (1.0, 1)


def test_copy_with_a_valid_manifest_replaces_a_corrupt_one(tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    dcp.save(state(3.0), storage_writer=StorageWriter(first, step=1), no_dist=True)
    shutil.copytree(first, copy)
    (first / "step-1.g0.a1" / "MANIFEST.json").write_text("{")
    into = state()
    dcp.load(into, storage_reader=StorageReader([FolderStore(first), FolderStore(copy)]), no_dist=True)
    assert torch.equal(into["w"], state(3.0)["w"])


def large(seed: int | None) -> dict[str, Any]:
    """Three chunks of tensors that do not end at a page boundary."""
    dice = None if seed is None else torch.Generator().manual_seed(seed)
    sizes = {"a": 2_100_003, "b": 3_333_333, "c": 17, "d": 700_001}
    return {
        name: torch.zeros(size) if dice is None else torch.randn(size, generator=dice) for name, size in sizes.items()
    }


def flip(path: Path, places: list[int]) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 4
    path.write_bytes(data)


def test_each_chunk_comes_from_a_copy_in_which_it_is_good(tmp_path: Path) -> None:
    first, copy, file = tmp_path / "first", tmp_path / "copy", "step-1.g0.a1/rank-0.safetensors"
    dcp.save(large(1), storage_writer=StorageWriter(first, step=1), no_dist=True)
    shutil.copytree(first, copy)
    flip(first / file, [CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 9])
    flip(copy / file, [CHUNK_BYTES + 70_000])
    into, stores = large(None), [FolderStore(first), FolderStore(copy)]
    dcp.load(into, storage_reader=StorageReader(stores), no_dist=True)
    assert all(torch.equal(into[name], tensor) for name, tensor in large(1).items())
    flip(copy / file, [CHUNK_BYTES - 1])
    with pytest.raises(
        (CheckpointError, CheckpointException), match=r"rank-0\.safetensors: digest of chunk 0 differs"
    ):
        dcp.load(into, storage_reader=StorageReader(stores), no_dist=True)


@pytest.mark.parametrize(("name", "said"), [("__metadata__", "cannot have the name"), ("\ud800", "not Unicode text")])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises((StateError, CheckpointException), match=said):
        dcp.save({name: torch.ones(2)}, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    assert checkpoint.load(tmp_path) is None


def test_the_library_says_how_to_read_what_came_through_dcp(tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(2)}}, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    with pytest.raises(
        StateError, match=r"dcp\.load\(state, storage_reader=holdfast\.checkpoint\.dcp\.StorageReader"
    ):
        checkpoint.load(tmp_path, model=torch.nn.Linear(2, 1))


@pytest.mark.parametrize("tensor", [TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(2, dtype=torch.complex128)])
def test_unsupported_tensor_is_refused_by_key_before_any_write(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises((StateError, CheckpointException), match=r"layer\.w (is|has)"):
        dcp.save({"layer": {"w": tensor}}, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    assert list(tmp_path.iterdir()) == []


def test_values_too_large_for_a_manifest_are_refused_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LARGEST", 5000)
    values = {"small": {"n": 1}, "loader7": {"state": bytes(4000)}, "w": torch.ones(2)}
    with pytest.raises((StateError, CheckpointException), match=r"the largest are loader7\.state \(0\.00\d+ MB\)"):
        dcp.save(values, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_is_no_commit(tmp_path: Path) -> None:
    twice = StorageWriter(tmp_path, step=1)
    with pytest.raises((StateError, CheckpointException), match="thing"):
        dcp.save({"thing": object()}, storage_writer=twice, no_dist=True)
    assert checkpoint.load(tmp_path) is None
    dcp.save(state(1.0), storage_writer=twice, no_dist=True)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1.g0.a1"]


def test_scalars_of_every_kind_come_back_by_async_save(tmp_path: Path) -> None:
    values = {"n": torch.tensor(3), "b": torch.tensor(2.0, dtype=torch.bfloat16), "flag": torch.tensor(True)}
    twice = pickle.loads(pickle.dumps(StorageWriter(tmp_path, step=1)))  # noqa: S301  (as torch hands it to a process)
    dcp.async_save(values, storage_writer=twice, no_dist=True).result()
    into = {name: torch.zeros_like(one) for name, one in values.items()}
    dcp.load(into, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert all(into[name].dtype == one.dtype and torch.equal(into[name], one) for name, one in values.items())


@pytest.mark.parametrize("shape", [(3,), (5,), (2, 2), ()])
def test_a_tensor_of_another_size_is_refused_and_not_half_filled(tmp_path: Path, shape: tuple[int, ...]) -> None:
    dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    into = torch.full(shape, 9.0)
    with pytest.raises((CheckpointError, CheckpointException), match="Size mismatch"):
        dcp.load({"w": into}, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert torch.equal(into, torch.full(shape, 9.0))


def test_a_tensor_of_another_dtype_is_converted(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path, step=1), no_dist=True)
    into = torch.zeros(4, dtype=torch.float64)
    dcp.load({"w": into}, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert torch.equal(into, torch.arange(4.0, dtype=torch.float64))


class Looked(MetadataIndex):
    """Count how often a part with this name is looked at."""

    times = 0

    def __getattribute__(self, name: str) -> Any:
        Looked.times += name == "fqn"
        return super().__getattribute__(name)


class Watching(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        items = [replace(item, index=Looked(item.index.fqn, item.index.offset)) for item in plan.items]
        return replace(plan, items=items)


def test_twice_the_tensors_are_twice_the_work(tmp_path: Path) -> None:
    def looks(count: int) -> int:
        Looked.times = 0
        tensors = {f"w{number}": torch.ones(1) for number in range(count)}
        dcp.save(tensors, storage_writer=StorageWriter(tmp_path, step=1), planner=Watching(), no_dist=True)
        return Looked.times

    assert looks(200) <= 2.1 * looks(100)


def test_the_checkpoint_id_says_the_step(tmp_path: Path) -> None:
    dcp.save(state(4.0), checkpoint_id=tmp_path / "step-4", storage_writer=StorageWriter(tmp_path), no_dist=True)
    into = state()
    dcp.load(into, checkpoint_id=tmp_path / "step-4", storage_reader=StorageReader(tmp_path), no_dist=True)
    assert into["s"].item() == 4.0
    with pytest.raises((CheckpointError, CheckpointException), match="no readable checkpoint of step 5"):
        dcp.load(into, storage_reader=StorageReader(tmp_path, step=5), no_dist=True)
