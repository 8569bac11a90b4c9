"""The comparison of replicas: which ranks differ, and in which tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.state.dtypes import DTYPES
from holdfast.training.recovery import replica_digest
from holdfast.training.recovery.replica_digest import combined, compare, first_difference, on_device, tensor_digests


@pytest.mark.parametrize(
    ("digests", "shards", "expected"),
    [
        ("aaa", [0, 0, 0], ((), True)),
        ("a", [0], ((), True)),
        ("aba", [0, 0, 0], ((1,), True)),
        ("abb", [0, 0, 0], ((0,), True)),
        ("ab", [0, 0], ((0, 1), False)),
        ("abc", [0, 0, 0], ((0, 1, 2), False)),
        ("aabb", [0, 0, 0, 0], ((0, 1, 2, 3), False)),
        ("axax", [0, 1, 0, 1], ((), True)),
        ("axaxay", [0, 1, 0, 1, 0, 1], ((5,), True)),
        ("axbx", [0, 1, 0, 1], ((0, 2), False)),
    ],
)
def test_the_majority_of_each_shard_is_right(digests: str, shards: list[int], expected: object) -> None:
    assert compare(list(digests), shards) == expected


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=9))
def test_a_rank_differs_only_from_a_larger_group(digests: list[str]) -> None:
    differing, majority = compare(digests, [0] * len(digests))
    rest = {digests[rank] for rank in range(len(digests)) if rank not in differing}
    if majority:
        assert len(rest) == 1
        assert 2 * len(differing) < len(digests)
    else:
        assert not rest


def trained() -> dict[str, torch.nn.Module | torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_the_digest_covers_weights_buffers_and_moments() -> None:
    objects = trained()
    names = tensor_digests(objects)
    assert any(name.startswith("optimizer/") for name in names)
    assert {"model/0.weight", "model/1.running_mean"} <= {name.replace("/0/", "/0.") for name in names}


@given(st.integers(min_value=0, max_value=11), st.integers(min_value=0, max_value=31))
def test_any_single_bit_changes_the_digest_of_its_tensor(place: int, bit: int) -> None:
    objects = trained()
    before = tensor_digests(objects)
    weight = next(objects["model"].parameters()).data.view(-1).view(torch.int32)  # type: ignore[union-attr]
    weight[place] ^= -(2**31) if bit == 31 else 1 << bit
    after = tensor_digests(objects)
    assert [name for name in before if before[name] != after[name]] == [next(iter(before))]
    assert combined(before) != combined(after)
    assert first_difference([before, after, before], [0, 0, 0], [1]) == next(iter(before))


def test_a_tensor_that_only_another_rank_holds_is_named() -> None:
    assert first_difference([{"a": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "2"}], [0, 0, 0], [0]) == "b"


def test_tied_weights_and_names_with_a_slash_are_compared_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    objects = {"parts/first": model, "optimizer": torch.optim.SGD(model.parameters())}  # an optimizer without state
    assert list(tensor_digests(objects)) == [
        "parts~1first/0.weight",
        "parts~1first/0.bias",
        "parts~1first/1.bias",
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_of_a_device_reads_every_dtype(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert on_device(ones) == on_device(ones.clone())
    assert on_device(ones) != on_device(zeros)
    assert on_device(ones[:0]) == 0


@pytest.mark.parametrize("block", [8, 1 << 20])
def test_the_digest_of_a_device_reads_places(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_digest, "_BLOCK_BYTES", block)
    weights = torch.arange(1.0, 8.0)
    same = [
        weights,
        weights.clone(),
        torch.cat([torch.zeros(1), weights])[1:],
        torch.stack([weights, weights])[:, :].T[:, 0],
    ]
    others = [weights.flip(0), weights + 1, -weights, weights.view(torch.int32).bitwise_xor(1), weights[:6]]
    assert len({int(on_device(one)) for one in same}) == 1
    assert len({int(on_device(one)) for one in [weights, *others]}) == 1 + len(others)
    assert on_device(torch.full((4,), 2.0)) != on_device(torch.full((4,), 3.0)), "equal elements do not cancel"


@pytest.mark.parametrize("digest", [on_device, replica_digest._on_cpu])
def test_equal_nans_are_equal_and_signed_zeros_differ(digest: Callable[[torch.Tensor], object]) -> None:
    nan = torch.tensor([float("nan")])
    payload = nan.view(torch.int32).bitwise_or(1).view(torch.float32)
    assert digest(nan) == digest(nan.clone())
    assert digest(nan) != digest(payload)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@given(st.integers(min_value=0, max_value=10), st.integers(min_value=0, max_value=31))
def test_any_single_bit_changes_the_digest_of_a_device(place: int, bit: int) -> None:
    words = torch.arange(11, dtype=torch.int32)
    other = words.clone()
    other[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert on_device(words) != on_device(other)


def test_other_objects_are_not_asked_for_their_state() -> None:
    objects = {**trained(), "averages": torch.nn.ParameterDict()}
    assert tensor_digests({**objects, "reader": _Reader()}) == tensor_digests(objects)


class _Reader:
    def state_dict(self) -> dict[str, torch.Tensor]:
        raise AssertionError("this may take long")

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Nothing depends on it."""
