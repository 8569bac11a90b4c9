"""Samples that cannot be read are retried, then left out. Errors that no sample causes are raised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from holdfast.core.errors import UsageError
from holdfast.training.data.sample_reader import SampleReader


class Source:
    """Samples of which some cannot be read, or not at once, or have another shape, or cannot be collated."""

    def __init__(
        self, *, bad: Collection[int] = (), once: Collection[int] = (), odd: Collection[int] = (), lost: Any = ()
    ) -> None:
        self.bad, self.once, self.odd, self.lost = bad, once, odd, lost
        self.reads: Counter[int] = Counter()
        self.waits: list[float] = []

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        if index in self.bad or (index in self.once and self.reads[index] == 1):
            raise ValueError(f"sample {index} is broken")
        if index in self.lost:
            return object()
        return torch.full((3 if index in self.odd else 2,), float(index))

    def reader(self, *, tolerant: bool = True, **more: Any) -> SampleReader:
        return SampleReader(
            get=self.__getitem__,
            collate=default_collate,
            retries=2,
            tolerant=tolerant,
            sleep=self.waits.append,
            **more,
        )


def found(source: Source, samples: list[int]) -> tuple[list[float], list[int]]:
    result = source.reader().read(samples)
    assert result.samples == len(samples) - len(result.unreadable)
    return ([] if result.data is None else result.data[:, 0].tolist()), [one.sample for one in result.unreadable]


def test_sample_that_can_be_read_later_is_not_bad() -> None:
    source = Source(once={4})
    assert found(source, [3, 4]) == ([3, 4], [])
    assert source.waits == [0.1]


def test_bad_sample_is_retried_and_left_out() -> None:
    source = Source(bad={4})
    result = source.reader().read([3, 4, 5])
    assert result.data[:, 0].tolist() == [3, 5]
    assert [(one.sample, one.error) for one in result.unreadable] == [(4, "ValueError: sample 4 is broken")]
    assert source.reads == {3: 1, 4: 3, 5: 1}
    assert source.waits == pytest.approx([0.1, 0.2])


def test_many_bad_samples_are_not_all_waited_for() -> None:
    source = Source(bad=range(20))
    assert found(source, [*range(21)]) == ([20], [*range(20)])
    assert len(source.waits) == 16


def test_same_sample_twice_in_a_batch_is_read_twice() -> None:
    assert found(Source(bad={4}), [4, 3, 4]) == ([3], [4, 4])


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), UsageError("x")])
def test_error_that_no_sample_causes_is_raised_at_once(error: Exception) -> None:
    reads = []

    def get(index: int) -> Any:
        reads.append(index)
        raise error

    reader = SampleReader(get=get, collate=default_collate, retries=2, tolerant=True)
    with pytest.raises(type(error)):
        reader.read([1])
    assert reads == [1]


def test_reader_that_tolerates_nothing_raises_after_the_retries() -> None:
    source = Source(bad={4}, once={3})
    with pytest.raises(ValueError, match="sample 4 is broken"):
        source.reader(tolerant=False).read([3, 4])
    assert source.reads == {3: 2, 4: 3}


def test_only_sample_with_another_shape_is_left_out() -> None:
    assert found(Source(odd={4}), [3, 4, 5]) == ([3, 5], [4])


def test_samples_that_cannot_be_collated_are_left_out() -> None:
    assert found(Source(lost={4, 6}), [3, 4, 5, 6]) == ([3, 5], [4, 6])
    assert found(Source(lost={4}, odd={6}, bad={8}), [3, 4, 5, 6, 7, 8]) == ([3, 5, 7], [4, 6, 8])
    assert found(Source(lost={4, 6}), [4, 6]) == ([], [4, 6])


@pytest.mark.parametrize("samples", [[3, 4], [3, 4, 5, 6]])
def test_batch_that_shows_no_single_culprit_raises_its_error(samples: list[int]) -> None:
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        Source(odd={4, 5}).reader().read(samples)


def test_another_sample_replaces_a_batch_without_a_readable_one() -> None:
    assert Source(bad={3, 4}).reader().any_of(range(3, 99), None)[:, 0].tolist() == [5]


def test_dataset_without_a_readable_sample_raises_the_first_error() -> None:
    source = Source(bad=range(99))
    result = source.reader().read([7, 8])
    with pytest.raises(ValueError, match="sample 7 is broken"):
        source.reader().any_of(range(9, 99), result.error)
    with pytest.raises(ValueError, match="sample 9 is broken"):
        source.reader().any_of(range(9, 99), None)


def test_before_is_called_with_each_read() -> None:
    calls: list[int] = []
    Source(once={4}).reader(before=calls.append).read([3, 4])
    assert calls == [3, 4, 4]


class Workers:
    """A dataset that reads with the worker process of a `DataLoader`."""

    def __getitem__(self, index: int) -> Any:
        return next(iter(DataLoader(Source(bad={4}), sampler=[index], num_workers=1)))[0]  # type: ignore[arg-type]


def test_error_of_a_worker_process_is_named_without_its_traceback() -> None:
    reader = SampleReader(get=Workers().__getitem__, collate=default_collate, tolerant=True)
    result = reader.read([3, 4])
    assert result.data[:, 0].tolist() == [3]
    assert [(one.sample, one.error) for one in result.unreadable] == [(4, "ValueError: sample 4 is broken")]
