"""Live state and back, bit by bit, in every dtype and at every world size; what needs pickle is refused by name."""

from __future__ import annotations

import ast
import enum
import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

from holdfast import CheckpointError, StateError, UsageError, checkpoint
from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.folder import publish
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io import durable_files
from holdfast.checkpoint.restore.rank_reader import Loaded
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import writer
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.state import flatten as state
from holdfast.checkpoint.state.dtypes import DTYPES
from holdfast.checkpoint.state.flatten import check_savable, flatten, flatten_values
from holdfast.checkpoint.state.rng import capture, read
from holdfast.checkpoint.state.unflatten import adopt, unflatten
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId

DTYPES = st.sampled_from(list(DTYPES))
SHAPES = st.lists(st.integers(0, 9), max_size=3)


class Box:
    """Anything with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bits, NaNs included; booleans are 0 or 1."""
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
def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit_at_any_world_size(
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
        name=CheckpointName(step=1, pair=AttemptId(1, 1)),
        specs=flat.specs,
        read=flat.read,
        state={"objects": flat.tree},
        data=None,
        alone={},
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
    tree = json.loads(json.dumps(flat.tree["v"], sort_keys=True))  # as a manifest has it
    assert same(unflatten(tree, lambda name: flat.tensors[name]), value)


def test_large_tensors_are_cut_over_the_ranks_and_put_together_again(
    tmp_path: Path, world: Callable[..., Any]
) -> None:
    tensor = torch.randn(1500, 1001)
    flat = flatten_values({"w": tensor})
    snapshot = Snapshot(
        name=CheckpointName(step=1, pair=AttemptId(1, 1)),
        specs=flat.specs,
        read=flat.read,
        state={"objects": flat.tree},
        data=None,
        alone={},
        numerics={},
    )
    world(3, lambda exchange: save(tmp_path, snapshot, exchange))
    folder = tmp_path / "step-1.g1.a1"
    rows = [load_file(folder / f"rank-{rank}.safetensors")["w"].shape[0] for rank in range(3)]
    assert sorted(rows) == [500, 500, 500]
    (found,) = world(1, lambda exchange: restore(tmp_path, exchange))
    assert torch.equal(adopt(found.loaded.manifest.tensors["w"], found.loaded.tensors["w"]), tensor)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).to(
        torch.float64
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])


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


def test_what_is_conjugated_or_negated_when_it_is_read_is_saved_with_its_own_numbers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("moment", ["_begin", "publish"])
def test_a_save_does_not_take_another_processs_commit_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    act, others = getattr(writer, moment), ["theirs"]

    def meanwhile(*args: Any) -> Any:
        if others:
            checkpoint.save(tmp_path, step=5, box=Box({"who": others.pop()}))
        return act(*args)

    monkeypatch.setattr(writer, moment, meanwhile)
    with pytest.raises(CheckpointError, match=r"another process saved it there.*give group="):
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


def test_a_state_that_is_too_large_for_a_manifest_is_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(CheckpointError, match="save into a folder of its own"):
        checkpoint.save(tmp_path, step=1, box=Box({}))


class Colour(enum.Enum):
    RED = 1


ENDLESS: dict[str, Any] = {}
ENDLESS["self"] = [ENDLESS]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": object()}}, r"box\.a\.b is of type object, which cannot be saved without pickle"),
        ({"f": print}, r"box\.f is of type builtin_function_or_method"),
        ({"s": {1, 2}}, r"box\.s is of type set"),
        ({"c": Colour.RED}, r"box\.c is of type Colour"),
        ({Colour.RED: 1}, r"a key of box is of type Colour"),
        ({"n": np.array([object()])}, r"box\.n is a NumPy array of dtype object"),
        ({"n": np.zeros(3, dtype=">f4")}, r"box\.n is a NumPy array of dtype >f4"),
        ({"n": np.ma.array([1, 2], mask=[0, 1])}, r"box\.n is a NumPy array with a mask, which would be lost"),
        ({"n": np.longdouble(1)}, r"box\.n is of NumPy's type longdouble"),
        ({"n": np.datetime64("2026-01-01", "ns")}, r"box\.n is of NumPy's type datetime64.*have str\(value\)"),
        ({"n": np.timedelta64(1, "ns")}, r"box\.n is of NumPy's type timedelta64.*have str\(value\)"),
        ({"n": np.zeros(1, "M8[ns]")}, r'box\.n is a NumPy array of dtype datetime64.*have array\.view\("int64"\)'),
        ({"n": np.zeros(1, "c16")}, r'box\.n is a NumPy array of dtype complex128.*have array\.view\("float64"\)'),
        ({"t": "\ud800"}, r"box\.t has '\\ud800', which is no Unicode text"),
        ({"\ud800": torch.zeros(1)}, r"box has '\\ud800', which is no Unicode text"),
        ({"i": 1 << 20_000}, r"box\.i is an integer of 20001 bits"),
        (ENDLESS, r"box\.self\.0.* is more than 100 deep: does it hold itself"),
        ({"t": torch.eye(3).to_sparse()}, r"box\.t is not a dense tensor"),
        ({"t": torch.empty(3, device="meta")}, r"box\.t is not a dense tensor"),
        ({"t": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}, r"box\.t is not a dense tensor"),
        ({"t": torch.nn.UninitializedParameter()}, r"box\.t has no shape yet: run a batch through its module"),
        ({"t": torch.zeros(3, dtype=torch.complex128)}, r"box\.t is of dtype torch.complex128.*torch\.view_as_real"),
        (
            {"t": torch.ones(2).to(torch.float8_e8m0fnu)},
            r"box\.t is of dtype torch.float8_e8m0.*view\(torch\.uint8\)",
        ),
        ({"t": TwoTensor(torch.ones(2), torch.ones(2))}, r"box\.t is a TwoTensor, which .* has no memory of its own"),
    ],
)
def test_what_cannot_be_saved_is_named_with_the_mend(state: Any, named: str) -> None:
    with pytest.raises(StateError, match=named) as raised:
        flatten({"box": Box(state)})
    assert "state_dict()" in str(raised.value)


def test_a_state_instead_of_its_object_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"'model' is of type OrderedDict, .*give the object itself"):
        checkpoint.save(tmp_path / "ckpt", step=1, model=model.state_dict())
    assert not (tmp_path / "ckpt").exists()
    checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    with pytest.raises(StateError, match=r"'model' is of type OrderedDict, .*give the object itself"):
        checkpoint.load(tmp_path / "ckpt", model=model.state_dict())


def test_a_name_that_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"the name '\\udcff' is no Unicode text"):
        checkpoint.save(tmp_path / "ckpt", step=1, group=None, **{"\udcff": Box({"x": 1})})
    assert not (tmp_path / "ckpt").exists()


def test_a_tensor_with_the_name_that_headers_keep_for_themselves_comes_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, step=1, __metadata__=Box(torch.ones(3)))
    assert verify(FolderStore(tmp_path), CheckpointName(step=1, pair=AttemptId(0, 1))).whole
    assert list(load_file(path / "rank-0.safetensors")) == ["__metadata__'"]
    box = Box()
    checkpoint.load(tmp_path, __metadata__=box)
    assert torch.equal(box.state, torch.ones(3))


def test_what_is_large_but_has_an_end_is_saved() -> None:
    deep: Any = 1
    for _ in range(90):
        deep = {"z": [], "a": deep}
    state = {"deep": deep, "int": 1 << 8000, "text": "\U0001f600"}
    assert unflatten(flatten({"box": Box(state)}).tree["box"], lambda _: torch.empty(0)) == state


def test_a_mapping_keeps_its_order_and_its_tensors_their_names(tmp_path: Path) -> None:
    tokens = {"the": 0, "a": 1, "cat": {"z": [torch.ones(2)], "b": (torch.zeros(3), {"y": 1, "x": 2})}}
    path = checkpoint.save(tmp_path, step=1, box=Box(OrderedDict(tokens)))
    box = Box()
    checkpoint.load(tmp_path, box=box)

    assert list(box.state) == ["the", "a", "cat"]
    assert list(box.state["cat"]) == ["z", "b"]
    assert list(box.state["cat"]["b"][1]) == ["y", "x"]
    assert torch.equal(box.state["cat"]["z"][0], torch.ones(2))
    assert load_file(path / "rank-0.safetensors").keys() == {"box/cat/z/0", "box/cat/b/0"}


def test_of_modules_and_optimizers_names_are_said_sorted_as_ever() -> None:
    class Told(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"b": 1, "a": 2}

    model = Told(2, 2)
    flat = flatten({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert flat.tree["model"] == {
        "weight": {"$tensor": "model/weight"},
        "bias": {"$tensor": "model/bias"},
        "_extra_state": {"$map": [["b", 1], ["a", 2]]},
    }
    assert flat.tree["optimizer"]["param_groups"][0]["lr"] == 1e-3


def test_numpy_arrays_come_back_as_numpy_arrays(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, box=Box({"a": np.arange(6, dtype=np.int16).reshape(2, 3), "n": np.float32(2)}))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert isinstance(box.state["a"], np.ndarray)
    assert box.state["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert box.state["n"] == 2.0


class Cursor(NamedTuple):
    shard: int
    place: int


def test_two_wrapper_tensors_are_never_taken_for_one(tmp_path: Path) -> None:
    """They have no memory of their own, so the second one would count as tied to the first, and be lost."""
    model = torch.nn.ParameterDict({name: TwoTensor(torch.randn(2), torch.randn(2)) for name in "ab"})
    with pytest.raises(StateError, match=r"model\.a is a TwoTensor"):
        check_savable({"model": model})  # as job.manage() asks
    with pytest.raises(StateError, match=r"model\.a is a TwoTensor"):
        checkpoint.save(tmp_path, step=1, model=model)
    assert list(tmp_path.iterdir()) == []


def test_a_counter_comes_back_as_one(tmp_path: Path) -> None:
    counts = Counter({5: 2, "late": 1})
    checkpoint.save(tmp_path, step=1, box=Box({"counts": counts}))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert (type(box.state["counts"]), box.state["counts"]) == (Counter, counts)


def test_what_is_a_kind_of_tuple_or_dict_comes_back_as_a_plain_one(tmp_path: Path) -> None:
    state = {"cursor": Cursor(1, 2), "shape": torch.Size([3, 4]), "counts": OrderedDict(a=2, b=1)}
    checkpoint.save(tmp_path, step=1, box=Box(state))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert box.state == {"cursor": (1, 2), "shape": (3, 4), "counts": {"a": 2, "b": 1}}
    assert [type(box.state[name]) for name in state] == [tuple, tuple, dict]


def test_a_model_of_another_shape_is_refused_and_names_itself(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.Linear(3, 4))
    with pytest.raises(StateError, match=r"(?s)nothing of it was loaded.*model: size mismatch"):
        checkpoint.load(tmp_path, model=torch.nn.Linear(3, 5))


@pytest.mark.parametrize("step", [1000.0, 1.5, -1, True, 10**18, "7", None])
def test_a_step_that_no_commit_can_have_is_refused_before_anything_is_written(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match=r"step is .*: give a whole number from 0"):
        checkpoint.save(tmp_path / "ckpt", step=step, model=torch.nn.Linear(3, 4))
    assert not (tmp_path / "ckpt").exists()


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=np.int64(5), model=torch.nn.Linear(3, 4))  # type: ignore[arg-type]
    found = checkpoint.load(tmp_path, step=np.int64(5), model=torch.nn.Linear(3, 4))  # type: ignore[arg-type]
    assert found is not None
    assert found.step == 5


@pytest.mark.parametrize("step", [5.0, -1, True, "5"])
def test_a_step_that_no_commit_can_have_is_not_looked_for(tmp_path: Path, step: Any) -> None:
    checkpoint.save(tmp_path, step=5, box=Box({}))
    for look in (
        lambda: checkpoint.load(tmp_path, step=step, box=Box({})),
        lambda: StorageReader(tmp_path, step=step),
    ):
        with pytest.raises(UsageError, match=r"step is .*: give a whole number from 0"):
            look()


def test_other_names_than_were_saved_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.Linear(3, 4))
    with pytest.raises(StateError, match=r"holds \['model'\], and load\(\) was given \['net'\]: give the names"):
        checkpoint.load(tmp_path, net=torch.nn.Linear(3, 4))


def test_all_random_generators_go_on_as_they_were() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()

    np.random.normal()  # leaves a cached second value behind
    saved = capture()
    expected = draw()
    draw()
    read(saved).apply()
    assert draw() == expected


# What a script sets with torch.set_default_device


MAKERS = {"empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor", "asarray", "rand", "randn", "randint"}


def test_a_save_and_a_load_take_no_memory_of_the_default_device(tmp_path: Path) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, its) = trained(1), trained(2)
    torch.set_default_device("meta")  # has no numbers: what is made there by mistake cannot be read
    try:
        checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
        checkpoint.load(tmp_path, model=other, optimizer=its)
    finally:
        torch.set_default_device(None)
    assert torch.equal(other.weight, model.weight)
    assert all(
        torch.equal(its.state[one]["exp_avg"], optimizer.state[two]["exp_avg"])
        for one, two in zip(other.parameters(), model.parameters(), strict=True)
    )


def test_what_the_library_makes_for_itself_names_its_device() -> None:
    source = Path(checkpoint.__file__).parents[1]
    found = [
        f"{path.relative_to(source)}:{call.lineno}"
        for path in source.rglob("*.py")
        if "torch." in path.read_text()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in MAKERS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and "device" not in {word.arg for word in call.keywords}
    ]
    assert found == []
