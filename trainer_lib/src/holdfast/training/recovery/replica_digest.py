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

from holdfast.checkpoint.ranks.merge import tensors_in
from holdfast.checkpoint.state.flatten import flatten, trained

_TRAINED: Final = (torch.nn.Module, torch.optim.Optimizer)
_BLOCK_BYTES: Final = 64 << 20  # limits the memory of a comparison on a device to a few blocks
# Odd numbers, by which 64-bit words are multiplied. The products wrap around, so no bit is lost.
_FACTORS: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


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


def tensor_digests(objects: Mapping[str, Any], *, all_of_module: bool = True) -> dict[str, str]:
    """Return a digest of each tensor of the modules and optimizers. Tensors on devices are reduced there.

    Other objects are not asked for their state, which may be slow. Without `all_of_module`, the modules' buffers and
    frozen parameters are left out.
    """
    compared = {name: value for name, value in objects.items() if isinstance(value, _TRAINED)}
    flat = flatten(compared)
    found = dict.fromkeys(tensors_in(list(flat.tree.values())))  # tied weights once
    if not all_of_module:
        optimizers = [flat.tree[name] for name, value in compared.items() if isinstance(value, torch.optim.Optimizer)]
        kept = trained(compared, flat).union(tensors_in(optimizers))
        found = {name: None for name in found if name in kept}
    names = list(found)
    return dict(zip(names, _digests([flat.tensors[name].detach() for name in names]), strict=True))


def combined(digests: Mapping[str, str]) -> str:
    """Return one digest of all tensors."""
    return xxhash.xxh3_64_hexdigest("".join(f"{name}={digest};" for name, digest in sorted(digests.items())))


def first_difference(reports: Sequence[Mapping[str, str]], shards: Sequence[int], differing: Sequence[int]) -> str:
    """Return the first tensor that the first differing rank and another rank of its shard hold with other bits."""
    own = reports[differing[0]]
    others = [report for report, shard in zip(reports, shards, strict=True) if shard == shards[differing[0]]]
    names = dict.fromkeys(name for report in (own, *others) for name in report)
    return next((name for name in names if any(other.get(name) != own.get(name) for other in others)), "")


def _digests(tensors: Sequence[torch.Tensor]) -> Iterator[str]:
    here = [_on_cpu(tensor) if tensor.device.type == "cpu" else on_device(tensor) for tensor in tensors]
    devices = [value for value in here if isinstance(value, torch.Tensor)]
    # one copy for all tensors
    fetched = iter(torch.stack([value.to(devices[0].device) for value in devices]).tolist() if devices else ())
    return (f"{next(fetched):x}" if isinstance(value, torch.Tensor) else value for value in here)


def _on_cpu(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(_image(tensor).numpy().data)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor's bytes and their places, as a number on its device.

    `torch.hash_tensor` is not used: equal elements cancel each other in it, and it has no float8 or complex numbers.
    """
    image = _image(tensor)
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, image.numel(), _BLOCK_BYTES):
        block = image[begin : begin + _BLOCK_BYTES]
        padded = torch.nn.functional.pad(block, (0, -block.numel() % 8))
        if padded.storage_offset() % 8:  # a view of another tensor
            padded = padded.clone()
        first = begin // 8
        places = torch.arange(first + 1, first + 1 + padded.numel() // 8, device=tensor.device)
        mixed = places.mul_(_FACTORS[0]).add_(padded.view(torch.int64)).mul_(_FACTORS[1])
        digest += mixed.bitwise_xor_(mixed >> 32).mul_(_FACTORS[2]).sum()
    return digest


def _image(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
