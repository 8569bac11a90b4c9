"""Compare the weights and the optimizer state of all replicas, and find the ranks that differ.

Replicas apply the same averages to the same state, so their bits are equal. Another state on one rank is silent
corruption: of its memory, of its device, or by a script that writes to one rank's weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash

from holdfast.checkpoint.state.flatten import Flat

_TRAINED: Final = (torch.nn.Module, torch.optim.Optimizer)


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """The result of a comparison of all replicas, which is the same on every rank."""

    step: int
    """The completed step whose state was compared."""
    differing: tuple[int, ...] = ()
    """The ranks whose state differs from that of most replicas. Without a majority, all ranks of that shard."""
    majority: bool = True
    """Whether more than half of the replicas hold the same state."""
    tensor: str = ""
    """The first tensor that differs, with the name that it has in a checkpoint; "" if all are equal."""

    @property
    def equal(self) -> bool:
        """Whether all replicas hold the same state."""
        return not self.differing

    def __str__(self) -> str:
        if self.equal:
            return f"all replicas hold the same state after step {self.step}"
        ranks = ", ".join(map(str, self.differing))
        return (
            f"after step {self.step}, the state of rank {ranks} differs from other replicas, first in {self.tensor}"
        )


def compare(digests: Sequence[str], shards: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks that differ, and whether each shard has a majority. Both lists are in order of the ranks.

    Only ranks with the same shard hold the same state. If a shard has no majority, all its ranks differ.
    """
    differing: list[int] = []
    majority = True
    for shard in sorted(set(shards)):
        ranks = [rank for rank, own in enumerate(shards) if own == shard]
        digest, count = Counter(digests[rank] for rank in ranks).most_common(1)[0]
        if 2 * count > len(ranks):
            differing += [rank for rank in ranks if digests[rank] != digest]
        else:
            differing += ranks
            majority = False
    return tuple(sorted(differing)), majority


def tensor_digests(objects: Mapping[str, Any], flat: Flat) -> dict[str, str]:
    """Return a digest of each tensor of the modules and optimizers. Tensors on devices are reduced there."""
    names = {name for name, value in objects.items() if isinstance(value, _TRAINED)}
    found = [(name, tensor.detach()) for name, tensor in flat.tensors.items() if name.partition("/")[0] in names]
    return dict(zip((name for name, _ in found), _digests([tensor for _, tensor in found]), strict=True))


def combined(digests: Mapping[str, str]) -> str:
    """Return one digest of all tensors."""
    return xxhash.xxh3_64_hexdigest("".join(f"{name}={digest};" for name, digest in sorted(digests.items())))


def first_difference(reports: Sequence[Mapping[str, str]], shards: Sequence[int], differing: Sequence[int]) -> str:
    """Return the first tensor that the first differing rank and another rank of its shard hold with other bits."""
    own = reports[differing[0]]
    others = [report for report, shard in zip(reports, shards, strict=True) if shard == shards[differing[0]]]
    return next((name for name in own if any(other.get(name) != own[name] for other in others)), "")


def _digests(tensors: Sequence[torch.Tensor]) -> Iterator[str]:
    here = [_on_cpu(tensor) if tensor.device.type == "cpu" else torch.hash_tensor(tensor) for tensor in tensors]
    devices = [value for value in here if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack(devices).tolist() if devices else ())  # one copy for all tensors
    return (f"{next(fetched):x}" if isinstance(value, torch.Tensor) else value for value in here)


def _on_cpu(tensor: torch.Tensor) -> str:
    image = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(image.numpy().data)
