"""A discarded step leaves no trace in buffers and the AMP scaler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.training.step.rollback import ALWAYS_COPIED_BYTES, Undo

LARGE = ALWAYS_COPIED_BYTES // 4 + 1


class Model(torch.nn.Module):
    """Buffers of each kind: running statistics, small, large, absent."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(LARGE))
        self.register_buffer("absent", None)

    small: torch.Tensor
    large: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.small = self.small + 1  # replaced by assignment
        return torch.as_tensor(self.body(x))


def forward(model: Model) -> None:
    model(torch.randn(8, 3))


def write_small(model: Model) -> None:
    model.small.add_(random.random())


def write_large(model: Model) -> None:
    model.large[7] += float(np.random.rand())


def replace_large(model: Model) -> None:
    model.large = torch.rand(LARGE)


def take_away(model: Model) -> None:
    model.small = None  # type: ignore[assignment]


def come(model: Model) -> None:
    model.absent = torch.rand(2)


def add(model: Model) -> None:
    model.register_buffer("later", torch.rand(2))


def write_unseen(model: Model) -> None:
    model.small.data.add_(1)  # torch does not count this one


def resize(model: Model) -> None:
    model.small = torch.rand(5)


CHANGES: list[Callable[[Model], None]] = [
    forward,
    write_small,
    write_large,
    replace_large,
    come,
    add,
    write_unseen,
    resize,
]


def everything(model: Model) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (id(tensor), tensor.clone()) for name, tensor in model.named_buffers()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    kept=st.lists(st.lists(st.sampled_from(CHANGES), max_size=3), max_size=4),
    lost=st.lists(st.sampled_from(CHANGES), max_size=4),
)
def test_a_discarded_step_leaves_no_trace(
    kept: list[list[Callable[[Model], None]]], lost: list[Callable[[Model], None]]
) -> None:
    """The previous steps and the number of discarded attempts make no difference."""
    model = Model()
    undo = Undo([model])
    for changes in kept:
        undo.remember()
        for change in changes:
            change(model)
    undo.remember()
    before = everything(model)
    for _ in range(2):
        for change in [*lost, take_away]:
            change(model)
        undo.restore()
        assert same(everything(model), before)


def test_running_statistics_are_rolled_back_without_versions() -> None:
    """torch does not count the writes to running statistics."""
    norm = torch.nn.BatchNorm1d(4)
    undo = Undo([norm])
    undo.remember()
    version = norm.running_mean._version if norm.running_mean is not None else -1
    norm(torch.randn(8, 4))
    assert norm.running_mean is not None
    assert norm.running_mean._version == version
    undo.restore()
    assert norm.running_mean.tolist() == [0.0] * 4


def test_a_large_buffer_is_copied_only_when_it_was_written() -> None:
    model = Model()
    undo = Undo([model])
    undo.remember()
    (kept,) = (known["large"] for known in undo._buffers if "large" in known)
    assert kept is not None
    kept.copy.fill_(9)
    undo.remember()
    assert kept.copy[0] == 9
    model.large.add_(1)
    undo.remember()
    assert kept.copy[0] == 1


def test_a_buffer_shared_by_two_modules_comes_back() -> None:
    one, other = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    other.running_mean = one.running_mean
    undo = Undo([one, torch.nn.Sequential(one, other)])
    undo.remember()
    one(torch.randn(4, 2) + 5)
    undo.restore()
    assert other.running_mean is one.running_mean
    assert one.running_mean is not None
    assert one.running_mean.tolist() == [0.0, 0.0]


def test_inference_tensors_come_back() -> None:
    module = torch.nn.Module()
    with torch.inference_mode():
        module.register_buffer("seen", torch.zeros(2))
    undo = Undo([module])
    undo.remember()
    with torch.inference_mode():
        module.seen.add_(1)
    undo.restore()
    assert module.seen.tolist() == [0.0, 0.0]


def test_nothing_remembered_is_nothing_restored() -> None:
    model = Model()
    forward(model)
    before = everything(model)
    Undo([model]).restore()
    assert same(everything(model), before)


@pytest.mark.parametrize("updated", [False, True])
def test_the_scaler_can_be_used_again_on_the_same_step(updated: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()  # sets the scale, as the previous steps did
    undo = Undo([], scaler)
    undo.remember()
    for _ in range(2):
        scaler.unscale_(optimizer)  # raises if this call is still recorded
        if updated:
            scaler.update()
        undo.restore()
        assert scaler.get_scale() == 8.0
