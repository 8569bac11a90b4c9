"""Check that replicated objects are the same on all ranks, because only one rank's state is saved. No torch.

Ranks exchange a digest of each object with the other data of a save. The digest covers the object's JSON, and a few
bytes of its tensors if nothing else ensures that those are equal (`state.sampled`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from holdfast.checkpoint.format.mapping_order import has_order, without_order


def digests(trees: Any, samples: Mapping[str, str]) -> dict[str, str]:
    found = trees.get("objects", {}) if isinstance(trees, Mapping) else {}
    return {name: _digest(tree, samples.get(name, "")) for name, tree in found.items()}


def _digest(tree: Any, sample: str) -> str:
    text = _text(tree)
    if has_order(text):
        text = _text(without_order(tree))
    return xxhash.xxh3_64_hexdigest(f"{text}{sample}".encode())


def _text(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def differing(digests_of_ranks: Sequence[Mapping[str, str]]) -> dict[str, tuple[int, ...]]:
    """Return the objects that differ between ranks, and the ranks that differ from rank 0."""
    first = digests_of_ranks[0]
    differing_ranks = {
        name: tuple(rank for rank, one in enumerate(digests_of_ranks) if one.get(name) != first.get(name))
        for name in dict.fromkeys(name for one in digests_of_ranks for name in one)
    }
    return {name: ranks for name, ranks in differing_ranks.items() if ranks}
