"""``messages.golden`` lists every message of the operator's decisions, so that texts are reviewed in one place.

Write it again with ``python tests/holdfast_operator/decision/reporting/test_messages.py``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast_operator.decision.reporting import messages

GOLDEN = Path(__file__).with_suffix("").with_name("messages.golden")


def samples(name: str, annotation: str, place: int) -> tuple[Any, ...]:
    """Values for a parameter: its name in angle brackets stands for a text, its place for a number."""
    if annotation == "bool":
        return (True, False)
    if "Sequence" in annotation:
        return ([f"<{name}>", "<another>"],)
    return (f"<{name}>",) if annotation == "str" else (place + 1,)


def texts(message: Callable[..., str]) -> Iterator[str]:
    """The message with and without what may be left out."""
    parameters = inspect.signature(message).parameters.values()
    needed = [item for item in parameters if item.default is item.empty]
    for chosen in (needed, list(parameters)) if len(needed) < len(parameters) else (needed,):
        values = itertools.product(*(samples(item.name, item.annotation, place) for place, item in enumerate(chosen)))
        for combination in values:
            yield message(**{item.name: value for item, value in zip(chosen, combination, strict=True)})


def listing() -> str:
    """All messages, by subject."""
    subjects = [value for name, value in vars(messages).items() if inspect.ismodule(value) and name != "common"]
    found = [
        (name, message)
        for subject in subjects
        for name, message in vars(subject).items()
        if inspect.isfunction(message) and message.__module__ == subject.__name__ and not name.startswith("_")
    ]
    return "".join(f"{name}: {text}\n" for name, message in found for text in texts(message))


def test_the_golden_file_lists_every_message() -> None:
    assert listing() == GOLDEN.read_text()


def test_no_message_ends_with_a_full_stop() -> None:
    assert [line for line in listing().splitlines() if line.endswith(".")] == []


if __name__ == "__main__":
    GOLDEN.write_text(listing())
