"""Writing a file determines whether its weights are finite."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from holdfast.checkpoint.format.shard_layout import TensorSpec, plan_shard, whole
from holdfast.checkpoint.saving.finite_check import Inspection
from holdfast.core.errors import NonFiniteWeightsError

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
SIZE = 1000


def inspect(dtype: str, weights: set[str], *, blocks: int = 1, **tensors: torch.Tensor) -> None:
    """Write these tensors in this number of blocks."""
    plan = plan_shard([whole(TensorSpec(name=n, dtype=dtype, shape=(SIZE,))) for n in sorted(tensors)], metadata={})
    data = bytes(plan.offsets[0]) + b"".join(
        tensors[piece.spec.name].view(torch.uint8).numpy().tobytes() for piece in plan.pieces
    )
    inspection, edges = (
        Inspection(plan, weights),
        [len(data) // 8 * place // blocks * 8 for place in range(blocks + 1)],
    )
    for begin, end in pairwise(edges):
        inspection.update(memoryview(data)[begin:end])


def extremes(dtype: str) -> torch.Tensor:
    """Finite numbers, including the largest and the smallest."""
    limits = torch.finfo(DTYPES[dtype])
    edge = [limits.max, limits.min, limits.tiny, -limits.tiny, 0.0, -0.0]
    return torch.tensor([*edge, *[0.5] * (SIZE - len(edge))], dtype=torch.float64).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 7])
def test_the_largest_numbers_are_finite(dtype: str, blocks: int) -> None:
    inspect(dtype, {"a", "b"}, blocks=blocks, a=extremes(dtype), b=extremes(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
def test_one_number_is_found_wherever_it_is(dtype: str, value: str) -> None:
    number = torch.tensor(float(value), dtype=torch.float64).to(DTYPES[dtype])
    if dtype == "F8_E4M3":  # the dtype has no infinities
        number = torch.tensor(float("nan")).copysign(torch.tensor(float(value))).to(DTYPES[dtype])
    good = extremes(dtype)
    for place, blocks, name in product((0, SIZE // 2, SIZE - 1), (1, 7), "ab"):
        bad = extremes(dtype)
        bad[place] = number
        with pytest.raises(NonFiniteWeightsError, match=rf"^{name} holds values that are not finite"):
            inspect(dtype, {"a", "b"}, blocks=blocks, **{"a": good, "b": good, name: bad})


def test_only_weights_must_be_finite() -> None:
    bad = torch.full((SIZE,), -torch.inf)
    inspect("F32", {"b"}, blocks=3, a=bad, b=extremes("F32"), c=bad)
