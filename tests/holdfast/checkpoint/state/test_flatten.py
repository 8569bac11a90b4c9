"""State is flattened and restored bit by bit, at any world size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_states import Box, trained
from safetensors.torch import load_file

from holdfast import CheckpointError, StateError, checkpoint
from holdfast.checkpoint.folder import publish
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io import durable_files
from holdfast.checkpoint.restore.rank_reader import Loaded
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.state import flatten as state
from holdfast.checkpoint.state.dtypes import DTYPES
from holdfast.checkpoint.state.flatten import check_savable, flatten_values
from holdfast.checkpoint.state.unflatten import adopt, unflatten
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId

DTYPES = st.sampled_from(list(DTYPES))


SHAPES = st.lists(st.integers(0, 9), max_size=3)


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Return a tensor of random bits, including NaNs. Booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def contents(loaded: Loaded) -> dict[str, torch.Tensor]:
    tree = loaded.manifest.state["objects"]["box"]
    return dict(unflatten(tree, lambda name: adopt(loaded.manifest.tensors[name], loaded.tensors[name])))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    table=st.dictionaries(st.text(max_size=5), st.tuples(DTYPES, SHAPES, st.integers(0, 99)), max_size=6),
    writers=st.integers(1, 3),
    readers=st.integers(1, 3),
)
def test_all_dtypes_and_shapes_round_trip_at_any_world_size(
    tmp_path_factory: pytest.TempPathFactory,
    world: Callable[..., Any],
    table: dict[str, tuple[torch.dtype, list[int], int]],
    writers: int,
    readers: int,
) -> None:
    root = tmp_path_factory.mktemp("tier")
    tensors = {name: random_tensor(*how) for name, how in table.items()}
    flat = flatten_values({"box": tensors})
    snapshot = Snapshot(
        name=CheckpointName(step=1, attempt_id=AttemptId(1, 1)),
        specs=flat.specs,
        read=flat.read,
        state={"objects": flat.tree},
        data=None,
        per_rank={},
        numerics={},
    )
    assert all(result.committed for result in world(writers, lambda exchange: save(root, snapshot, exchange)))
    for found in world(readers, lambda exchange: restore(root, exchange)):
        back = contents(found.loaded)
        assert set(back) == set(tensors)
        for name, tensor in tensors.items():
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(back[name]) == bits(tensor)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$tensor"), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    flat = flatten_values({"v": value}, ordered=True)
    tree = json.loads(json.dumps(flat.tree["v"], sort_keys=True))  # the form in a manifest
    assert same(unflatten(tree, lambda name: flat.tensors[name]), value)


def test_large_tensors_are_split_over_ranks_and_joined_again(tmp_path: Path, world: Callable[..., Any]) -> None:
    tensor = torch.randn(1500, 1001)
    flat = flatten_values({"w": tensor})
    snapshot = Snapshot(
        name=CheckpointName(step=1, attempt_id=AttemptId(1, 1)),
        specs=flat.specs,
        read=flat.read,
        state={"objects": flat.tree},
        data=None,
        per_rank={},
        numerics={},
    )
    world(3, lambda exchange: save(tmp_path, snapshot, exchange))
    folder = tmp_path / "step-1.g1.a1"
    rows = [load_file(folder / f"rank-{rank}.safetensors")["w"].shape[0] for rank in range(3)]
    assert sorted(rows) == [500, 500, 500]
    (found,) = world(1, lambda exchange: restore(tmp_path, exchange))
    assert torch.equal(adopt(found.loaded.manifest.tensors["w"], found.loaded.tensors["w"]), tensor)


def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(6, 4, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_to_the_bit_after_save_and_load(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    advance(model, optimizer, scheduler, 3)
    path = checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer, scheduler=scheduler)
    expected = advance(model, optimizer, scheduler, 5)
    model, optimizer, scheduler = trained()
    found = checkpoint.load(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert found is not None
    assert (found.step, found.path) == (3, path)
    assert advance(model, optimizer, scheduler, 5) == expected


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    model, *_ = trained()
    folder = checkpoint.save(tmp_path, step=1, model=model)
    tensors = load_file(folder / "rank-0.safetensors")
    assert {name.removeprefix("model/") for name in tensors} == set(model.state_dict())
    assert all(torch.equal(tensors[f"model/{name}"], value) for name, value in model.state_dict().items())


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    folder = checkpoint.save(tmp_path, step=1, model=model)
    assert len(load_file(folder / "rank-0.safetensors")) == 1
    checkpoint.load(tmp_path, model=other)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.embed.weight)


def test_lazy_conjugate_and_negative_are_saved_with_their_values(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    views = {"base": base, "conj": base.conj(), "imag": base.imag, "neg": base.conj().imag}
    checkpoint.save(tmp_path, step=1, box=Box(views))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert all(torch.equal(box.state[name], tensor) for name, tensor in views.items())


def test_a_step_may_be_saved_again_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for value in (1, 2):
        checkpoint.save(tmp_path, step=5, box=Box({"value": value}))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert box.state == {"value": 2}


@pytest.mark.parametrize("moment", ["begin", "publish"])
def test_save_does_not_take_a_foreign_checkpoint_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    act, others = getattr(FolderStore, moment), ["theirs"]

    def meanwhile(*args: Any) -> Any:
        if others:
            checkpoint.save(tmp_path, step=5, box=Box({"who": others.pop()}))
        return act(*args)

    monkeypatch.setattr(FolderStore, moment, meanwhile)
    with pytest.raises(CheckpointError, match=r"another process saved it there.*Pass group="):
        checkpoint.save(tmp_path, step=5, box=Box({"who": "mine"}))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert box.state == {"who": "theirs"}
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-5.g0.a1"]
    assert checkpoint.save(tmp_path, step=5, box=Box({"who": "mine"})).name == "step-5.g0.a2"


def test_the_folders_that_a_save_makes_have_their_names_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], durable_files.sync_folder

    def note(path: Path) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(durable_files, "sync_folder", note)
    for step in (1, 2):
        checkpoint.save(tmp_path / "a" / "b" / "ckpt", step=step, box=Box({}))
    assert sorted(synced) == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_state_too_large_for_a_manifest_is_refused_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {"loader": Box({"epoch": 1, "seen": list(range(3000))}), "model": torch.nn.Linear(2, 2)}
    monkeypatch.setattr(state, "LARGEST", 20_000)
    with pytest.raises(StateError, match=r"the largest are loader\.seen \(0\.0\d+ MB\)"):
        check_savable(objects)
    monkeypatch.setattr(publish, "LARGEST", 10_000)
    with pytest.raises(CheckpointError, match=r"step 1 was not saved.*the largest are loader\.seen"):
        checkpoint.save(tmp_path, step=1, **objects)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_gives_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "none", box=Box()) is None


def test_the_library_does_not_write_into_a_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    with pytest.raises(CheckpointError, match="save to another folder"):
        checkpoint.save(tmp_path, step=1, box=Box({}))
