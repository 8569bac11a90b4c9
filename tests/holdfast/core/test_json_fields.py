"""Dataclasses are converted to and from JSON by the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId
from holdfast.core.json_fields import JsonFields

NAME = CheckpointName(step=3, attempt_id=AttemptId(2, 1))


@dataclass(frozen=True, kw_only=True)
class Inner(JsonFields):
    file_count: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer(JsonFields):
    key: bytes
    folder: Path
    files: frozenset[str]
    inner: tuple[Inner, ...]
    held: Mapping[CheckpointName, Inner]
    cause: str
    limit: int | None
    keep: CheckpointName | None = None
    anything: Any = None
    counts: Mapping[str, int] = field(default_factory=dict)


OUTER = Outer(
    key=b"\x01\xff",
    folder=Path("/data"),
    files=frozenset({"b", "a"}),
    inner=(Inner(file_count=1), Inner(file_count=2, share=1.0)),
    held={NAME: Inner(file_count=3)},
    cause=FailureCause.FULL,
    limit=None,
    keep=NAME,
    anything={"x": [1]},
)


def test_what_is_written_is_read_back() -> None:
    assert Outer.from_json(json.loads(json.dumps(OUTER.to_json()))) == OUTER
    assert Outer.from_json(OUTER.to_json()) == OUTER, "without an encoding in between"


def test_fields_have_camel_case_and_sets_are_sorted() -> None:
    written = OUTER.to_json()
    assert written["inner"][0] == {"fileCount": 1, "share": 0.5}
    assert (written["files"], written["key"], written["keep"]) == (["a", "b"], "01ff", "step-3.g2.a1")


def test_a_default_may_be_missing_and_unknown_keys_are_passed() -> None:
    assert Inner.from_json({"fileCount": 1, "newer": True}) == Inner(file_count=1)
    assert Inner.from_json({"fileCount": 1, "share": 1}).share == 1


@pytest.mark.parametrize(
    "value", [{}, {"fileCount": True}, {"fileCount": "1"}, {"fileCount": 1.0}, {"fileCount": 1, "share": "2"}, [], 5]
)
def test_what_is_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        Inner.from_json(value)


@pytest.mark.parametrize("change", [{"key": "zz"}, {"held": {"x": {"fileCount": 1}}}, {"files": "ab"}, {"inner": {}}])
def test_what_cannot_be_read_within_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Outer.from_json(OUTER.to_json() | change)
