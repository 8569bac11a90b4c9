"""Read this rank's micro-batches from a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import getitem
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from holdfast.training.data.bad_samples import Unreadable
from holdfast.training.data.cursor import BatchShare, Position, micro_batches, sample_at, share_of
from holdfast.training.data.sample_audit import Audit
from holdfast.training.data.sample_reader import SampleReader
from holdfast.training.options.elasticity import Elasticity
from holdfast.training.options.elasticity import global_batch as scaled_batch
from holdfast.training.options.validation import check_batches


class MapDataset(Protocol):
    """The methods that `job.batches` needs of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The collated batch and the number of samples in it.

    The audit has these samples and the unreadable ones: all of them are consumed.
    """

    data: Any
    samples: int
    seen: Audit
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The data of a job: the reader of its dataset, its order and its steps.

    `global_batch` is the script's request. `batch_at` returns the batch of one step in a world of some size.
    """

    size: int
    global_batch: int
    micro_batch: int
    reader: SampleReader
    device: torch.device
    elasticity: Elasticity = field(default_factory=Elasticity)

    def batch_at(self, world_size: int) -> int:
        """Return the number of samples of one global step in a world of this size."""
        return scaled_batch(self.elasticity, self.global_batch, world_size)

    def parts(
        self, position: Position, *, rank: int, world_size: int, alike: bool = False, micro_batch: int | None = None
    ) -> list[BatchShare]:
        """Return this rank's micro-batches of the step at `position`; none if the world has more ranks than samples.

        With `alike`, all ranks have the same number: a rank with fewer gets empty ones in addition. `micro_batch` is
        another size of micro-batches, which is the same on all ranks.
        """
        size = micro_batch or self.micro_batch
        batch = self.batch_at(world_size)
        share = share_of(cursor=position.cursor, batch=batch, rank=rank, world_size=world_size)
        parts = list(micro_batches(share, size))
        most = -(-batch // (world_size * size)) if alike else 0
        return parts + [BatchShare(begin=share.begin, end=share.begin) for _ in range(most - len(parts))]

    def fetch(self, part: BatchShare, position: Position) -> MicroBatch:
        """Read the samples of a micro-batch. It lacks those that cannot be read.

        An empty micro-batch has one sample that does not count, so that a model can run on it.
        """
        seen, samples = Audit(), []
        for number in range(part.begin, part.end):
            epoch, sample = self.sample(number, position)
            samples.append(sample)
            seen = seen.seen(epoch, sample)
        found = self.reader.read(samples)
        others = (self.sample(number, position)[1] for number in count(part.end))
        data = found.data if found.samples else self.reader.any_of(others, found.error)
        return MicroBatch(
            data=_moved(data, self.device), samples=found.samples, seen=seen, unreadable=found.unreadable
        )

    def sample(self, number: int, position: Position) -> tuple[int, int]:
        """Return (epoch, index in the dataset) of a sample."""
        return sample_at(position.place(number), size=self.size, seed=position.seed)


def make_loader(
    dataset: MapDataset,
    *,
    global_batch: int,
    micro_batch: int,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
    elasticity: Elasticity | None = None,
    retries: int = 0,
    tolerant: bool = False,
    before: Callable[[int], object] = lambda _: None,
) -> Loader:
    """Return the loader for the arguments of `job.batches`. Raise `UsageError` if they are not valid.

    `retries`, `tolerant` and `before` are those of the `SampleReader`.
    """
    check_batches(dataset, global_batch=global_batch, micro_batch=micro_batch, collate=collate)
    loader = Loader(
        size=len(dataset),
        global_batch=global_batch,
        micro_batch=micro_batch,
        reader=SampleReader(
            get=partial(getitem, dataset),
            collate=collate or default_collate,
            retries=retries,
            tolerant=tolerant,
            before=before,
        ),
        device=device,
        elasticity=elasticity or Elasticity(),
    )
    loader.batch_at(1)  # rejects a batch that no world could divide
    return loader


def fingerprint(dataset: MapDataset) -> str:
    """Return the identity of a dataset: its type and length, and its own `fingerprint` if it has one."""
    own = getattr(dataset, "fingerprint", None)
    value = own() if callable(own) else own
    return f"{type(dataset).__qualname__}:{len(dataset)}" + (f":{value}" if value is not None else "")


def _moved(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [_moved(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
