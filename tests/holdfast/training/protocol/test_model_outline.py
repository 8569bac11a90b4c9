"""What ranks compare of their models before they average anything."""

from __future__ import annotations

import pytest
import torch

from holdfast.training.step.model_outline import difference, digest, outline


class Model(torch.nn.Module):
    def __init__(self, **parameters: torch.nn.Parameter) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            setattr(self, name, parameter)


def of(*shape: int, trained: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained)


def lines(model: torch.nn.Module, *, backwards: bool = False) -> tuple[str, ...]:
    parameters = list(model.parameters())[:: -1 if backwards else 1]
    return outline({"model": model, "optimizer": torch.optim.SGD(parameters, lr=0.1)})


def with_buffer(size: int) -> torch.nn.Module:
    model = Model(a=of(2))
    model.register_buffer("seen", torch.zeros(size))
    return model


def tied() -> torch.nn.Module:
    one = of(2)
    return Model(a=one, b=one)


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        (
            Model(a=of(4, 8)),
            Model(a=of(8, 4)),
            "has model.a (shape (4, 8), torch.float32), where rank 1 has model.a (sha",
        ),
        (
            Model(a=of(2), b=of(2)),
            Model(b=of(2), a=of(2)),
            "rank 0 has model.a (shape (2,), torch.float32), where rank 1",
        ),
        (Model(gain=of(2)), Model(scale=of(2)), "where rank 1 has model.scale (shape (2,), torch.float32). Build"),
        (Model(a=of(2)), Model(a=of(2, trained=False), b=of(2)), "has model.a (shape (2,), torch.float32, frozen)"),
        (Model(a=of(2)), Model(a=of(2, dtype=torch.float64)), "rank 1 has model.a (shape (2,), torch.float64)"),
        (
            Model(a=of(2), b=of(2)),
            tied(),
            "has model.b (shape (2,), torch.float32), where rank 1 has model.a in group 0",
        ),
        (with_buffer(2), with_buffer(3), "rank 1 has model.seen (buffer, shape (3,), torch.float32)"),
    ],
    ids=["shape", "order", "name", "frozen", "dtype", "tied", "buffer"],
)
def test_first_difference_is_named_with_both_ranks_and_values(
    own: torch.nn.Module, other: torch.nn.Module, message: str
) -> None:
    both = [lines(own), lines(other)]
    assert digest(both[0]) != digest(both[1])
    assert message in difference(both, 0)


def test_another_parameter_order_of_an_optimizer_is_a_difference() -> None:
    model = Model(a=of(2), b=of(2))
    told = difference([lines(model), lines(model, backwards=True)], 0)
    assert "rank 0 has model.a in group 0 of the optimizer, where rank 1 has model.b in group 0" in told


def test_missing_entries_are_named_for_any_reference_rank() -> None:
    few, more = lines(torch.nn.Linear(2, 2, bias=False)), lines(torch.nn.Linear(2, 2))
    assert (
        "rank 2 has model.bias (shape (2,), torch.float32), where rank 0 has model.weight in group 0"
        in difference([few, more, more], 2)
    )
    assert "where rank 0 has nothing" in difference([few[:1], few], 1)


def test_values_and_wrappers_are_no_difference() -> None:
    plain, wrapped = torch.nn.Linear(2, 2), torch.nn.DataParallel(torch.nn.Linear(2, 2))
    assert lines(plain) == lines(wrapped)
    assert difference([lines(plain), lines(wrapped)], 0) == ""
