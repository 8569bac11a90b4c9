"""The comparison of replicas: which ranks differ, and in which tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.state.flatten import flatten
from holdfast.training.recovery.replica_digest import combined, compare, first_difference, tensor_digests


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
    names = tensor_digests(objects, flatten(objects))
    assert any(name.startswith("optimizer/") for name in names)
    assert {"model/0.weight", "model/1.running_mean"} <= {name.replace("/0/", "/0.") for name in names}


@given(st.integers(min_value=0, max_value=11), st.integers(min_value=0, max_value=31))
def test_any_single_bit_changes_the_digest_of_its_tensor(place: int, bit: int) -> None:
    objects = trained()
    before = tensor_digests(objects, flatten(objects))
    weight = next(objects["model"].parameters()).data.view(-1).view(torch.int32)  # type: ignore[union-attr]
    weight[place] ^= -(2**31) if bit == 31 else 1 << bit
    after = tensor_digests(objects, flatten(objects))
    assert [name for name in before if before[name] != after[name]] == [next(iter(before))]
    assert combined(before) != combined(after)
    assert first_difference([before, after, before], [0, 0, 0], [1]) == next(iter(before))


def test_tensors_of_other_objects_are_not_compared() -> None:
    objects = {**trained(), "averages": torch.nn.ParameterDict()}
    flat = flatten({**objects, "reader": _Reader()})
    assert not any(name.startswith("reader") for name in tensor_digests({**objects, "reader": _Reader()}, flat))


class _Reader:
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"offsets": torch.arange(3)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Nothing depends on it."""
