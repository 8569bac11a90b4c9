"""The largest difference of a tensor disregards numbers that are equal."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace

import pytest

from holdfast.cli.resume_check import run


def content(*values: float) -> SimpleNamespace:
    """A checkpoint with one tensor."""
    manifest = SimpleNamespace(tensors={"w": SimpleNamespace(dtype="F32")})
    return SimpleNamespace(manifest=manifest, tensor=lambda _: bytearray(array("f", values).tobytes()))


@pytest.mark.parametrize("same", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_in_both_runs_is_left_out(same: float) -> None:
    assert run._largest(content(same, 1.0), content(same, 2.0), "w") == 1.0  # type: ignore[arg-type]


def test_infinite_numbers_of_both_signs_differ() -> None:
    assert run._largest(content(math.inf, 1.0), content(-math.inf, 2.0), "w") is None  # type: ignore[arg-type]


def test_zeros_of_both_signs_differ_by_nothing() -> None:
    assert run._largest(content(0.0), content(-0.0), "w") == 0.0  # type: ignore[arg-type]
