"""The order of mappings in trees of state, and the size of their text. Pure.

The keys of a JSON object in a manifest are sorted. A mapping with text keys in another order is therefore stored as
`{"$map": [[key, value], …]}`, which every release reads, and which keeps the order. Comparisons between ranks ignore
the order: two mappings that were filled in different orders are the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

MAP: Final = "$map"
MARK: Final = "$"
_NAMED: Final = 3
_PREFIX: Final = f'{{"{MAP}":[["'


def in_order(keys: Iterable[str]) -> bool:
    """Return whether the keys are already sorted."""
    return all(one < other for one, other in pairwise(keys))


def mapping(tree: Any) -> dict[str, Any] | None:
    """Return the contents of a mapping with text keys, in either form; None for anything else."""
    match tree:
        case {"$map": list(pairs)} if len(tree) == 1:
            found = dict(pair for pair in pairs if _is_entry(pair))
            return found if len(found) == len(pairs) else None
        case dict() if not any(key.startswith(MARK) for key in tree):
            return tree
    return None


def _is_entry(pair: Any) -> bool:
    plain = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
    return plain and not pair[0].startswith(MARK)


def parts(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the top-level parts of each object's tree with their paths."""
    for name, tree in objects.items():
        found = mapping(tree)
        yield from ((f"{name}.{key}", part) for key, part in found.items()) if found else [(name, tree)]


def text_bytes(tree: Any) -> int:
    """Estimate the size of a tree as JSON, in bytes. Few numbers have more than eight digits."""
    if isinstance(tree, str):
        return len(tree) + 3
    if isinstance(tree, dict):
        return 2 + sum(len(key) + 4 + text_bytes(item) for key, item in tree.items())
    if isinstance(tree, list):
        return 2 + sum(map(text_bytes, tree)) + len(tree)
    return 8


def too_much(trees: Iterable[tuple[str, Any]]) -> str:
    """Return a message that names the largest of these trees, and what to do if they are too large together."""
    sizes = sorted(((text_bytes(tree), name) for name, tree in trees), reverse=True)
    largest = ", ".join(f"{name} ({nbytes / 1e6:.3g} MB)" for nbytes, name in sizes[:_NAMED])
    return (
        f"{len(sizes)} values that are not tensors are kept in it; the largest are {largest}. Keep large "
        "values as tensors, for example bytes as torch.frombuffer(bytearray(value), dtype=torch.uint8)"
    )


def has_order(text: str) -> bool:
    """Return whether a tree's JSON, without spaces, may contain a mapping in its own order."""
    return _PREFIX in text


def without_order(tree: Any) -> Any:
    """Return the tree with each mapping of text keys as a JSON object."""
    if isinstance(tree, list):
        return [without_order(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    found = mapping(tree)
    return {key: without_order(item) for key, item in (tree if found is None else found).items()}
