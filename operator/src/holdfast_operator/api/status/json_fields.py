"""Dataclasses of the status as JSON, by the types of their fields.

A field ``boot_id`` is called ``bootId``, unless ``stored`` names it. What cannot be read of a field with a default is
the default; of a field without one, the whole object cannot be read. A type with ``to_json`` and ``from_json`` of its
own keeps them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from holdfast_operator.api.ids import AttemptId, parse_pair
from holdfast_operator.api.json import Json, integer, items, number
from holdfast_operator.api.times import format_time, parse_time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Read = Callable[[Any], Any]
FLAT = ""
"""The key of an attempt whose numbers stand in the object itself."""


def stored(key: str, *, missing: Any = MISSING, read: Read | None = None, **options: Any) -> Any:
    """Return a field that has this key in JSON, is ``missing`` where it cannot be read, and is read by ``read``."""
    return field(metadata={"key": key, "missing": missing, "read": read}, **options)


class JsonFields:
    """A dataclass whose JSON is that of its fields."""

    __slots__ = ()
    SPARSE: ClassVar[bool] = False
    """Whether fields that have their default are left out. A field without a default is always written, also where it
    has the value that `missing` names: people and other programs read it."""

    def to_json(self: DataclassInstance) -> dict[str, Any]:
        """Return the fields by their keys."""
        found: dict[str, Any] = {}
        for name, key, _, _, usual in _plan(type(self)):
            value = getattr(self, name)
            if type(self).SPARSE and value == usual:  # type: ignore[attr-defined]
                continue
            if key == FLAT:
                found |= value.to_json() if value else {"generation": None, "attempt": None}
            else:
                found[key] = written(value)
        return found

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Read the fields; ValueError if one is missing that is needed."""
        return cls(**read_fields(cls, value))  # type: ignore[arg-type]


def read_fields(kind: type[DataclassInstance], value: Json) -> dict[str, Any]:
    """Return the fields that can be read, by their names."""
    found = {}
    for name, key, read, default, _ in _plan(kind):
        raw = value if key == FLAT else value.get(key)
        item = None if raw is None else read(raw)
        if item is None and default is MISSING:
            raise ValueError(f"{kind.__name__} has no {key or name}")
        found[name] = default if item is None else item
    return found


def written(value: Any) -> Any:
    """Return a value as JSON."""
    if value is None or type(value) in (str, int, bool, float):
        return value
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, tuple):
        return [written(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, StrEnum) else value.to_json()


@cache
def _plan(kind: type[DataclassInstance]) -> tuple[tuple[str, str, Read, Any, Any], ...]:
    """Return for each field: name, key, reader, the value if it cannot be read, and the value that is left out."""
    hints = get_type_hints(kind)
    return tuple(
        (
            one.name,
            _key(one),
            one.metadata.get("read") or _reader(hints[one.name], one),
            _default(hints[one.name], one),
            None if one.default is MISSING else one.default,
        )
        for one in fields(kind)
    )


def _default(kind: Any, one: Field[Any]) -> Any:
    missing = one.metadata.get("missing", MISSING)
    if missing is MISSING:
        missing = one.default
    return None if missing is MISSING and types.NoneType in get_args(kind) else missing


def _key(one: Field[Any]) -> str:
    first, *rest = one.name.split("_")
    return str(one.metadata.get("key", first + "".join(map(str.capitalize, rest))))


def _reader(kind: Any, one: Field[Any] | None = None) -> Read:
    """What reads a value of this type; None for what is none."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (some,) = (arg for arg in args if arg is not types.NoneType)
        return integer if some is int else _reader(some)
    if origin is tuple:
        read = _reader(args[0])
        return lambda value: tuple(item for raw in items(value) if (item := read(raw)) is not None)
    if kind is int:
        default = MISSING if one is None else _default(kind, one)
        return integer if default is MISSING else lambda value: max(number(value, default), min(default, 0))
    if kind in _READERS:
        return _READERS[kind]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        members = {str(member): member for member in kind}
        return lambda value: members.get(value) if isinstance(value, str) else None
    return lambda value: readable(kind, value)


def readable(kind: Any, value: Any) -> Any:
    """Return the object that can be read from a value, or None."""
    try:
        return kind.from_json(value) if isinstance(value, Mapping) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _float(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


_READERS: dict[Any, Read] = {
    str: lambda value: value if isinstance(value, str) else None,
    bool: lambda value: value is True,
    float: _float,
    datetime: parse_time,
    AttemptId: parse_pair,
    Json: lambda value: value if isinstance(value, Mapping) and value else None,
}
