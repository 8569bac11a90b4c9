"""Mutations that turn a valid input into a hostile one.

The corpus has the mutations that once caused errors, and one for each way in which a longer run was refused.
"""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, settings
from hypothesis import strategies as st

Json = Any

NUMBERS = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, float("inf")]
TEXTS = ["", "x", "../x", "\ud800", "F64", "rank-0.json", "step-1.g1.a1"]
NESTED = [[], [0], [[]], {}, {"a": 1}, {"$tensor": "model/weight"}, {"$float": "x"}]
JUNK = st.sampled_from([*NUMBERS, *TEXTS, *NESTED])


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(document: Json, changes: list[tuple[int, int, Json]]) -> Json:
    """Mutate the nth place: set another value, remove it, repeat it, or copy another place."""
    for number, kind, junk in changes:
        every = [path for path in places(document) if path]
        if not every:
            return document
        path = every[number % len(every)]
        holder = document
        for part in path[:-1]:
            holder = holder[part]
        if kind == 0:
            holder[path[-1]] = copy.deepcopy(junk)  # a copy, because a later change must not apply to both
        elif kind == 1:
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
        else:
            holder[f"{path[-1]}{junk}"] = copy.deepcopy(holder[path[-1]])
    return document


def altered(raw: bytes, edits: list[tuple[int, str, Any]]) -> bytes:
    """Mutate the nth byte: replace bytes, insert bytes, or remove some."""
    for place, kind, what in edits:
        at = place % (len(raw) + 1)
        if kind == "cut":
            raw = raw[:at] + raw[at + what :]
        else:
            more = bytes.fromhex(what)
            raw = raw[:at] + more + raw[at + (len(more) if kind == "put" else 0) :]
    return raw


def told_apart(changes: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split the changes into those of a document and those of its bytes."""
    return [one for one in changes if isinstance(one[1], int)], [one for one in changes if isinstance(one[1], str)]


CORPUS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "corpus.json").read_text())


def kept(name: str) -> Callable[[Any], Any]:
    """Add each example of the corpus to the generated ones."""

    def added(test: Any) -> Any:
        for changes in CORPUS[name].values():
            test = example(changes=[tuple(change) for change in changes])(test)
        return test

    return added


CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2), JUNK), min_size=1, max_size=3)
# Byte values: large numbers, starts of other formats, and the elements of pickles, zips and JSON.
PIECES = (
    "00 01 7f 80 ff 22 2c 2d 2e 3a 5b 5d 7b 7d 28 29 30 42 4a 4b 4e 52 58 62 63 68 71 72 74 75 7d 81 85 86 8a 94 "
    "ffff ffffffff 00e40b54 00e40b5402000000 ffffffffffffffff 504b0304 504b0102 4e614e"
)
BYTES = st.sampled_from(PIECES.split()) | st.binary(min_size=1, max_size=4).map(bytes.hex)
EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["put", "add"]), BYTES)
    | st.tuples(st.integers(0, 1 << 16), st.just("cut"), st.sampled_from([1, 2, 8, 1 << 16])),
    min_size=1,
    max_size=3,
)
FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@contextmanager
def little_memory(most: int = 8 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
