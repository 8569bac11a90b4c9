"""Values that differ between ranks are reported by name: a checkpoint keeps replicated values from one rank only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.process_group_exchange import joined
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.ranks.replica_check import differing
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.writer import save
from holdfast.checkpoint.state.flatten import flatten, sampled
from holdfast.checkpoint.state.unflatten import unflatten
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import StateError

World = Callable[..., list[Any]]
State = Callable[[int], dict[str, Any]]


class Kept:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def committed(world: World, root: Path, state: State, size: int = 3) -> list[SaveResult]:
    """Save `state(rank)` of each rank as "loader", in addition to the shared state."""

    def one(exchange: Exchange) -> SaveResult:
        objects = {"loader": Kept(state(exchange.rank)), "ema": Kept({"decay": 0.9, "w": torch.ones(3)})}
        flat = flatten(objects)
        snapshot = Snapshot(
            name=CheckpointName(step=1, attempt_id=AttemptId(1, 1)),
            specs=flat.specs,
            read=flat.read,
            state={"objects": flat.tree},
            data=None,
            per_rank={"rank": exchange.rank},
            numerics={},
            samples=sampled(objects, flat),
        )
        return save(root, snapshot, exchange)

    results: list[SaveResult] = world(size, one)
    assert all(result.committed for result in results), results
    return results


DIFFERENT: dict[str, State] = {
    "a number": lambda rank: {"position": 100 + (rank == 2)},
    "the order of a list": lambda rank: {"files": ["a", "b"] if rank < 2 else ["b", "a"]},
    "a small tensor": lambda rank: {"seen": torch.full((3,), float(rank == 2))},
    "an array": lambda rank: {"seen": torch.full((3,), float(rank == 2)).numpy()},
    "the end of a large tensor": lambda rank: {
        "buffer": torch.cat([torch.zeros(1 << 19), torch.full((9,), rank == 2)])
    },
    "a scalar of another dtype": lambda rank: {
        "on": torch.tensor(rank == 2),
        "half": torch.tensor(1, dtype=torch.half),
    },
}


@pytest.mark.parametrize("state", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_object_that_differs_on_one_rank_is_reported_on_all(world: World, tmp_path: Path, state: State) -> None:
    assert [result.differing for result in committed(world, tmp_path, state)] == [{"loader": (2,)}] * 3


ALIKE: dict[str, State] = {
    "a mapping that was filled in another order": lambda rank: {"a": 1, "b": 2} if rank else {"b": 2, "a": 1},
    "tensors": lambda rank: {
        "big": torch.zeros(1 << 19),
        "none": torch.zeros(0),
        "conj": torch.ones(2).cfloat().conj(),
    },
    "nan": lambda rank: {"loss": float("nan"), "bits": torch.tensor([float("nan")])},
}


@pytest.mark.parametrize("state", ALIKE.values(), ids=ALIKE.keys())
def test_what_all_ranks_have_alike_is_passed_over(world: World, tmp_path: Path, state: State) -> None:
    assert [result.differing for result in committed(world, tmp_path, state)] == [{}] * 3


def test_a_world_of_one_is_alike(world: World, tmp_path: Path) -> None:
    assert committed(world, tmp_path, DIFFERENT["a number"], size=1)[0].differing == {}


def test_an_object_that_only_some_ranks_have_is_not_alike() -> None:
    assert differing([{"a": "1"}, {"a": "1", "b": "2"}, {"b": "2"}]) == {"a": (2,), "b": (1, 2)}


@pytest.mark.parametrize("state", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_joint_save_refuses_what_would_be_lost_from_one_rank(world: World, state: State) -> None:
    def one(exchange: Exchange) -> str:
        objects = {"loader": Kept(state(exchange.rank))}
        flat = flatten(objects)
        with pytest.raises(StateError, match="loader has another state on rank 2 than on rank 0") as refused:
            joined(flat, exchange, sampled(objects, flat))
        return str(refused.value)

    assert all("f'loader{rank}': …" in message for message in world(3, one))


def test_mapping_is_saved_in_the_order_of_the_first_rank(world: World) -> None:
    def one(exchange: Exchange) -> list[str]:
        own = {"a": [{"y": 1, "x": 2}], "b": 2} if exchange.rank else {"b": 2, "a": [{"x": 2, "y": 1}]}
        objects = {"box": Kept(own)}
        flat = flatten(objects)
        tree = joined(flat, exchange, sampled(objects, flat)).objects["box"]
        return list(unflatten(tree, lambda name: torch.empty(0)))

    assert world(2, one) == [["b", "a"]] * 2


def test_ranks_that_save_under_names_of_their_own_are_not(world: World) -> None:
    def one(exchange: Exchange) -> list[str]:
        objects = {f"loader{exchange.rank}": Kept({"position": exchange.rank})}
        flat = flatten(objects)
        return list(joined(flat, exchange, sampled(objects, flat)).objects)

    assert world(2, one) == [["loader0", "loader1"]] * 2
