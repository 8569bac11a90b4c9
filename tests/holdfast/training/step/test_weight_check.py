"""Whether weights changed since the last step, for parameters of every kind."""

from __future__ import annotations

import pytest
import torch

from holdfast.training.step.weight_check import Weights

KINDS = {
    "matrix": torch.zeros(6, 5),
    "number": torch.zeros(()),
    "transposed": torch.zeros(5, 6).t(),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "half": torch.zeros(7, dtype=torch.bfloat16),
    "nothing but NaN": torch.full((3,), torch.nan),
}


def weights(*parameters: torch.nn.Parameter) -> Weights:
    return Weights({"optimizer": torch.optim.SGD(parameters, lr=0.1)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_all_weights_is_seen_and_its_return(kind: str) -> None:
    others = [torch.nn.Parameter(one) for one in (torch.zeros(0), torch.zeros(2, 2))]
    parameter = torch.nn.Parameter(KINDS[kind].clone())
    of = weights(*others, parameter)
    assert not of.changed()
    of.remember()
    before = parameter.detach().clone()
    assert not of.changed()
    parameter.data.fill_(1)
    assert of.changed()
    parameter.data = before.clone()
    assert not of.changed()
    parameter.data.fill_(2)
    of.forget()
    assert not of.changed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_rounding_of_a_weight_swap_and_back_is_no_change(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -3.0, torch.nan, 0.25], dtype=dtype))
    of = weights(parameter)
    of.remember()
    averages = torch.full((4,), 1.5, dtype=dtype)
    parameter.data.lerp_(averages, 1 - 1 / 0.9).lerp_(averages, 1 - 0.9)
    assert not of.changed()
    parameter.data.lerp_(averages, 0.1)
    assert of.changed()


def test_weights_of_another_dtype_or_number_are_changed_ones() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    of = weights(parameter)
    of.remember()
    parameter.data = parameter.data.double()
    assert of.changed()
    parameter.data = torch.empty(0)
    assert of.changed()


def test_of_many_weights_some_are_sampled_without_frozen_ones() -> None:
    """Weights that the optimizer does not have are left out too."""
    many = [torch.nn.Parameter(torch.zeros(2)) for _ in range(100)]
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    for of in (weights(*many, frozen), Weights({"model": torch.nn.Linear(2, 2)})):
        of.remember()
        frozen.data += 1
        assert not of.changed()
    of = weights(*many)
    of.remember()
    for one in many:
        one.data += 1
    assert of.changed()


@pytest.mark.parametrize("kind", ["matrix", "number", "complex", "half"])
def test_the_weight_that_is_not_finite_is_named(kind: str) -> None:
    model = torch.nn.Module()
    model.good, model.bad = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(KINDS[kind].clone())
    of = Weights({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert of.not_finite() == ""
    model.bad.data.fill_(torch.inf)
    assert of.not_finite() == "model.bad"
