"""The error that is raised if no copy of a file can be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.checkpoint.restore.copies import Copies
from holdfast.checkpoint.stores.base import Source
from holdfast.core.errors import CheckpointError, CorruptCheckpointError

FILE = "rank-0.safetensors"


def failing(error: CheckpointError) -> Callable[[str], Source]:
    def opener(file: str) -> Source:
        raise error

    return opener


def error_of(*errors: CheckpointError) -> CheckpointError:
    copies = Copies(openers=[failing(error) for error in errors], records={})
    with pytest.raises(CheckpointError) as raised:
        copies.fetch(FILE, lambda _: None)
    return raised.value


def test_only_copy_raises_its_own_error() -> None:
    away = CheckpointError("the volume does not answer")
    assert error_of(away) is away


def test_several_copies_raise_one_error_with_all_reasons() -> None:
    away, bad = CheckpointError("the volume does not answer"), CorruptCheckpointError("the file is too short")
    error = error_of(away, bad)
    assert str(error) == "the volume does not answer; the file is too short"
    assert type(error) is CheckpointError, "a store that does not answer may have a valid copy"
    assert type(error_of(bad, bad)) is CorruptCheckpointError
