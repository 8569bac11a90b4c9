"""What `kubectl describe` prints of a status: short enough to read on one screen or two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sim import Sim

from holdfast_operator.api.status.serialization import without_nulls

MOST_LINES = 80


def described(value: Any) -> Iterator[str]:
    """Yield a line for each scalar, each object's name and each list entry, as `kubectl describe` prints them."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield f"{key}:"
            yield from described(item)
        elif isinstance(item, list):
            yield f"{key}:"
            for entry in item:
                yield from described(entry) if isinstance(entry, Mapping) else [str(entry)]
        else:
            yield f"{key}: {item}"


def test_the_status_of_three_workers_is_short(trained: Sim) -> None:
    trained.run(30)
    lines = list(described(without_nulls(trained.body["status"])))
    assert len(lines) <= MOST_LINES, "\n".join(lines)
