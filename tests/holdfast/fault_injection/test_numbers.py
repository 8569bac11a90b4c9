"""Numbers of a rank become NaN in the steps of the fault, and in no other."""

from __future__ import annotations

import pytest
import torch

from holdfast.fault_injection.numbers import Numbers
from holdfast.fault_injection.plan import Kind


def finite(numbers: Numbers, weight: torch.Tensor) -> tuple[bool, bool]:
    """Compute a micro-batch. Return whether the loss and the gradient are finite."""
    weight.grad = None
    loss = numbers.loss(weight.square().sum())
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return bool(loss.isfinite()), bool(weight.grad.isfinite().all())


@pytest.mark.parametrize(("kind", "during"), [(Kind.NAN_LOSS, (False, False)), (Kind.NAN_GRADIENT, (True, False))])
def test_fault_lasts_for_its_steps_with_all_their_micro_batches(kind: Kind, during: tuple[bool, bool]) -> None:
    numbers, weight = Numbers(), torch.ones(2, requires_grad=True)
    numbers.manage(lambda: [torch.ones(1), weight], MemoryError)
    seen = []
    for step in (4, 5, 5, 6, 4, 5):  # the job rolls back after step 6
        numbers.begin(step)
        if len(seen) == 1:
            numbers.inject(kind, 3)
        seen.append(finite(numbers, weight))
    assert seen == [(True, True), during, during, during, during, (True, True)]


def test_weight_becomes_nan_once() -> None:
    numbers, weight = Numbers(), torch.ones(2, requires_grad=True)
    numbers.manage(lambda: [weight], MemoryError)
    numbers.inject(Kind.NAN_WEIGHT, 1)
    assert bool(weight.isnan().all())
    assert numbers.loss(torch.ones(())) == 1.0


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_one_bit_of_one_weight_flips(shape: tuple[int, ...]) -> None:
    numbers, weight = Numbers(), torch.rand(shape, requires_grad=True)
    before = weight.detach().clone()
    numbers.manage(lambda: [torch.ones(1), weight], MemoryError)
    numbers.inject(Kind.FLIP_WEIGHT, 1)
    flipped = before.view(torch.int32) ^ weight.detach().view(torch.int32)
    assert [one.bit_count() for one in flipped.abs().flatten().tolist() if one] == [1]


def test_memory_is_full_for_some_tries_of_a_step() -> None:
    numbers = Numbers()
    numbers.manage(tuple, torch.OutOfMemoryError)
    numbers.inject(Kind.OOM, 2)
    for _ in range(2):
        numbers.begin(4)
        with pytest.raises(torch.OutOfMemoryError, match="holdfast chaos: the memory of the GPU is full"):
            numbers.loss(torch.ones(1))
    assert numbers.loss(torch.ones(1)) == 1
