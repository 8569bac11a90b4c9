"""The order of mappings in trees of state. Pure.

The keys of a JSON object in a manifest are sorted. So a mapping of text whose order is another one is said as
`{"$map": [[key, value], …]}`, which every release reads, and comes back in its order. What is compared between ranks
is compared without it: a mapping that was filled in another order is no other state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

MAP: Final = "$map"
MARK: Final = "$"
_SAID: Final = f'{{"{MAP}":[["'


def in_order(keys: Iterable[str]) -> bool:
    """Whether sorting leaves them as they are."""
    return all(one < other for one, other in pairwise(keys))


def mapping(tree: Any) -> dict[str, Any] | None:
    """What a mapping of text holds, in whichever form it is said; None for all else."""
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


def has_order(text: str) -> bool:
    """Whether a tree's JSON, without spaces, may have a mapping that is said in its order."""
    return _SAID in text


def without_order(tree: Any) -> Any:
    """The same with each mapping of text as a JSON object."""
    if isinstance(tree, list):
        return [without_order(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    found = mapping(tree)
    return {key: without_order(item) for key, item in (tree if found is None else found).items()}
