"""Values that are no tensors are restored if they can be saved, and refused by name otherwise."""

from __future__ import annotations

import ast
import enum
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from live_states import Box
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

from holdfast import StateError, UsageError, checkpoint
from holdfast.checkpoint.dcp.reader import StorageReader
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.state.flatten import check_savable, flatten
from holdfast.checkpoint.state.rng import capture, read
from holdfast.checkpoint.state.unflatten import unflatten
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.attempt import AttemptId


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
        ({"n": np.longdouble(1)}, r"box\.n has NumPy's type longdouble"),
        ({"n": np.datetime64("2026-01-01", "ns")}, r"box\.n has NumPy's type datetime64.*store str\(value\)"),
        ({"n": np.timedelta64(1, "ns")}, r"box\.n has NumPy's type timedelta64.*store str\(value\)"),
        ({"n": np.zeros(1, "M8[ns]")}, r'box\.n is a NumPy array of dtype datetime64.*store array\.view\("int64"\)'),
        ({"n": np.zeros(1, "c16")}, r'box\.n is a NumPy array of dtype complex128.*store array\.view\("float64"\)'),
        ({"t": "\ud800"}, r"box\.t has '\\ud800', which is not Unicode text"),
        ({"\ud800": torch.zeros(1)}, r"box has '\\ud800', which is not Unicode text"),
        ({"i": 1 << 20_000}, r"box\.i is an integer of 20001 bits"),
        (ENDLESS, r"box\.self\.0.* is more than 100 levels deep: does it contain itself"),
        ({"t": torch.eye(3).to_sparse()}, r"box\.t is not a dense tensor"),
        ({"t": torch.empty(3, device="meta")}, r"box\.t is not a dense tensor"),
        ({"t": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}, r"box\.t is not a dense tensor"),
        ({"t": torch.nn.UninitializedParameter()}, r"box\.t has no shape yet: run a batch through its module"),
        ({"t": torch.zeros(3, dtype=torch.complex128)}, r"box\.t has dtype torch.complex128.*torch\.view_as_real"),
        (
            {"t": torch.ones(2).to(torch.float8_e8m0fnu)},
            r"box\.t has dtype torch.float8_e8m0.*view\(torch\.uint8\)",
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
    with pytest.raises(StateError, match=r"'model' is of type OrderedDict, .*pass the object itself"):
        checkpoint.save(tmp_path / "ckpt", step=1, model=model.state_dict())
    assert not (tmp_path / "ckpt").exists()
    checkpoint.save(tmp_path / "ckpt", step=1, model=model)
    with pytest.raises(StateError, match=r"'model' is of type OrderedDict, .*pass the object itself"):
        checkpoint.load(tmp_path / "ckpt", model=model.state_dict())


def test_name_that_is_no_text_is_refused_before_any_write(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"the name '\\udcff' is not Unicode text"):
        checkpoint.save(tmp_path / "ckpt", step=1, group=None, **{"\udcff": Box({"x": 1})})
    assert not (tmp_path / "ckpt").exists()


def test_tensor_named_like_the_reserved_header_key_round_trips(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, step=1, __metadata__=Box(torch.ones(3)))
    assert verify(FolderStore(tmp_path), CheckpointName(step=1, attempt_id=AttemptId(0, 1))).verified
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
    """Wrapper tensors have no memory of their own. Without a check, the second one would count as tied and be
    lost."""
    model = torch.nn.ParameterDict({name: TwoTensor(torch.randn(2), torch.randn(2)) for name in "ab"})
    with pytest.raises(StateError, match=r"model\.a is a TwoTensor"):
        check_savable({"model": model})  # the call of job.manage()
    with pytest.raises(StateError, match=r"model\.a is a TwoTensor"):
        checkpoint.save(tmp_path, step=1, model=model)
    assert list(tmp_path.iterdir()) == []


def test_a_counter_comes_back_as_one(tmp_path: Path) -> None:
    counts = Counter({5: 2, "late": 1})
    checkpoint.save(tmp_path, step=1, box=Box({"counts": counts}))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert (type(box.state["counts"]), box.state["counts"]) == (Counter, counts)


def test_tuple_and_dict_subclasses_are_restored_as_plain_ones(tmp_path: Path) -> None:
    state = {"cursor": Cursor(1, 2), "shape": torch.Size([3, 4]), "counts": OrderedDict(a=2, b=1)}
    checkpoint.save(tmp_path, step=1, box=Box(state))
    box = Box()
    checkpoint.load(tmp_path, box=box)
    assert box.state == {"cursor": (1, 2), "shape": (3, 4), "counts": {"a": 2, "b": 1}}
    assert [type(box.state[name]) for name in state] == [tuple, tuple, dict]


def test_a_model_of_another_shape_is_refused_and_names_itself(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.Linear(3, 4))
    with pytest.raises(StateError, match=r"(?s)nothing was loaded from it.*model: size mismatch"):
        checkpoint.load(tmp_path, model=torch.nn.Linear(3, 5))


@pytest.mark.parametrize("step", [1000.0, 1.5, -1, True, 10**18, "7", None])
def test_invalid_step_is_refused_before_any_write(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match=r"invalid step .*: expected an integer from 0"):
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
        with pytest.raises(UsageError, match=r"invalid step .*: expected an integer from 0"):
            look()


def test_other_names_than_were_saved_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, model=torch.nn.Linear(3, 4))
    with pytest.raises(StateError, match=r"holds \['model'\], but load\(\) received \['net'\]: pass the names"):
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


# Settings of torch.set_default_device


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
    torch.set_default_device("meta")  # has no values, so that a tensor created there by mistake cannot be read
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
