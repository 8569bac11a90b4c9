"""The loader fetches exactly what it counts. Invalid arguments are refused with the fix."""

from typing import Any

import pytest
import torch

from holdfast.core.errors import UsageError
from holdfast.training.data import Audit, Position
from holdfast.training.data.loader import fingerprint, make_loader

CPU = torch.device("cpu")


class Squares:
    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fetched.append(index)
        return {"x": torch.tensor(float(index)), "square": index * index}


class Named(Squares):
    fingerprint = "v2"


def test_the_audit_counts_what_was_fetched() -> None:
    data = Squares(30)
    loader = make_loader(data, global_batch=7, micro_batch=2, device=CPU)
    position = Position(fingerprint="f", seed=5)
    batches = [loader.fetch(p, position) for p in loader.parts(position, rank=0, world_size=2)]
    expected = Audit()
    for sample in data.fetched:
        expected = expected.seen(0, sample)
    total = Audit()
    for batch in batches:
        total += batch.seen
    assert total == expected
    assert [batch.samples for batch in batches] == [2, 2]
    assert [int(v) for b in batches for v in b.data["square"]] == [i * i for i in data.fetched]


def test_a_rank_beyond_the_samples_gets_none() -> None:
    loader = make_loader(Squares(30), global_batch=2, micro_batch=1, device=CPU)
    parts = [loader.parts(Position(fingerprint="f", seed=0), rank=rank, world_size=3) for rank in range(3)]
    assert sorted(len(part) for part in parts) == [0, 1, 1]


def test_fingerprints_tell_datasets_apart() -> None:
    assert fingerprint(Squares(3)) == "Squares:3"
    assert fingerprint(Squares(4)) != fingerprint(Squares(3))
    assert fingerprint(Named(3)) == "Named:3:v2"


@pytest.mark.parametrize(
    ("dataset", "batch", "micro", "message"),
    [
        (Squares(0), 4, 2, "dataset of job.batches is empty"),
        (Squares(9), 4, 5, "micro_batch_size 5 is not between 1 and global_batch_size 4"),
        (Squares(9), 0, 0, "global_batch_size is 0: expected an integer"),
        (iter([1, 2]), 4, 2, "map-style dataset"),
    ],
)
def test_bad_arguments_say_what_to_change(dataset: Any, batch: int, micro: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(dataset, global_batch=batch, micro_batch=micro, device=CPU)
