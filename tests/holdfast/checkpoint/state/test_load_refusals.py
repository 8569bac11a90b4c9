"""Objects that refuse their state, and state that the first step adds to an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from live_states import Values, net, same, state_of

from holdfast import CheckpointError, StateError, checkpoint
from holdfast.checkpoint.state.flatten import check_savable, flatten
from holdfast.checkpoint.state.load import load_into
from holdfast.checkpoint.state.optimizer_state import foreseen
from holdfast.training.step.train_state import _Side


def unread(name: str) -> torch.Tensor:
    raise AssertionError(f"{name} was asked for")


class NotMineError(Exception):
    """An error class of the script."""


@pytest.mark.parametrize("kind", [ValueError, AssertionError, OverflowError, OSError, NotMineError])
def test_object_refusing_its_state_leaves_all_unchanged(tmp_path: Path, kind: type[Exception]) -> None:
    checkpoint.save(tmp_path, step=1, a=Values(1), model=net(seed=1), b=Values(1))
    objects = {"a": Values(2), "model": net(seed=2), "b": Values(2, refuses=kind("not mine"))}
    before = state_of(objects)
    with pytest.raises(StateError, match=r"saved state of 'b' does not fit.*not mine"):
        checkpoint.load(tmp_path, **objects)
    assert same(state_of(objects), before)


def test_number_beyond_float_is_refused_and_leaves_all_unchanged(tmp_path: Path) -> None:
    objects = {"a": Values(2), "b": Values(2)}
    with pytest.raises(StateError, match="saved state of 'b' does not fit"):
        load_into(objects, {"a": 1, "b": {"$float": 10**400}}, unread, on_meta=unread)
    assert [thing.state for thing in objects.values()] == [2, 2]


@pytest.mark.parametrize("error", [MemoryError(), CheckpointError("gone meanwhile")])
def test_other_errors_keep_their_type_and_leave_all_unchanged(error: Exception) -> None:
    def gone(name: str) -> torch.Tensor:
        raise error

    objects = {"a": Values(2), "b": Values(2)}
    with pytest.raises(type(error)):
        load_into(objects, {"a": 1, "b": {"$tensor": "b"}}, gone, on_meta=unread)
    assert [thing.state for thing in objects.values()] == [2, 2]


def test_factor_beyond_float_is_refused_before_any_change() -> None:
    with pytest.raises(StateError, match="counters or data position are not valid"):
        _Side.read({"ramp": {"begin": 10**400, "target": 1.0, "since": 1}}, None)


def test_a_load_that_is_interrupted_is_no_refusal() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_into({"a": Values(2, refuses=KeyboardInterrupt())}, {"a": 1}, unread, on_meta=unread)


def test_a_module_that_takes_old_names_still_may(tmp_path: Path) -> None:
    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = torch.nn.Linear(2, 2)

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for name in [name for name in state if name.startswith("old.")]:
                state[name.replace("old.", "new.")] = state.pop(name)
            super()._load_from_state_dict(state, prefix, *rest)

    old = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2)})
    checkpoint.save(tmp_path, step=1, model=old)
    model = Renamed()
    checkpoint.load(tmp_path, model=model)
    assert torch.equal(model.new.weight, old["old"].weight)


# Values that cannot be saved are found before the first step


class Odd(torch.optim.SGD):
    """An optimizer whose first step adds a value to the state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["schedule"] = lambda step: step


def test_state_of_a_first_optimizer_step_is_refused_beforehand() -> None:
    model = net()
    optimizer = Odd(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before, generator = state_of({"model": model, "optimizer": optimizer}), torch.get_rng_state()
    with pytest.raises(StateError, match=r"optimizer\.state\.0\.schedule is of type function"):
        check_savable({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    assert same(state_of({"model": model, "optimizer": optimizer}), before)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.SGD, torch.optim.Muon])
def test_torchs_own_optimizers_are_let_through_untouched(made: Any) -> None:
    model = torch.nn.Linear(3, 4, bias=False)
    optimizer = made(model.parameters(), lr=0.1)
    check_savable({"model": model, "optimizer": optimizer})
    assert not optimizer.state
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Muon, {}),
    ],
)
def test_what_a_first_step_will_make_is_foreseen(made: Any, options: dict[str, Any]) -> None:
    model = torch.nn.Linear(3, 4, bias=False).to(torch.bfloat16)
    optimizer = made(model.parameters(), lr=0.1, **options)
    foretold = sorted(foreseen(optimizer), key=str)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tensors = flatten({"optimizer": optimizer}).tensors.values()
    assert foretold == sorted(((one.dtype, tuple(one.shape)) for one in tensors if one.dim()), key=str)
    assert list(foreseen(optimizer)) == [], "it speaks for itself"


def test_error_of_the_first_save_is_typed_and_harms_no_other(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    good = checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    optimizer.state[model[0].weight]["odd"] = object()
    with pytest.raises(StateError, match=r"optimizer\.state\.0\.odd is of type object"):
        checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", good.name]
    optimizer.state.clear()
    assert checkpoint.load(tmp_path, model=model, optimizer=optimizer) is not None
