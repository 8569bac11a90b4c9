"""Dataclasses of the status as JSON, by the types of their fields.

The JSON key of a field ``boot_id`` is ``bootId``, unless ``stored`` sets another one. If a value cannot be read, the
field has its default. Without a default, the object cannot be read. A type with its own ``to_json`` and ``from_json``
uses these.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from holdfast_operator.api.ids import AttemptId, parse_attempt_id
from holdfast_operator.api.json import Json, integer, items, number
from holdfast_operator.api.times import format_time, parse_time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Read = Callable[[Any], Any]
FLAT = ""
"""The key of an attempt ID whose numbers are fields of the containing object."""


def stored(key: str, *, missing: Any = MISSING, read: Read | None = None, **options: Any) -> Any:
    """Return a field with this JSON key. ``read`` parses it; ``missing`` replaces a value that cannot be parsed."""
    return field(metadata={"key": key, "missing": missing, "read": read}, **options)


class JsonFields:
    """A dataclass that converts to JSON and from it by its fields."""

    __slots__ = ()
    SPARSE: ClassVar[bool] = False
    """Whether to omit fields with their default value. A field without a default is always written, even with the
    value of `missing`, because users and other programs read it."""

    def to_json(self: DataclassInstance) -> dict[str, Any]:
        """Return the fields by their JSON keys."""
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
        """Parse the fields. Raises ``ValueError`` if a required one is missing."""
        return cls(**read_fields(cls, value))  # type: ignore[arg-type]


def read_fields(kind: type[DataclassInstance], value: Json) -> dict[str, Any]:
    """Return the fields that can be read, by their names. Raises ``ValueError`` if a required one is missing."""
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
    """Return for each field: name, key, reader, the value if it cannot be read, and the value that is omitted."""
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
    """Return the function that parses a value of this type and returns None for any other value."""
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
    """Parse the object; None if this fails."""
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
    AttemptId: parse_attempt_id,
    Json: lambda value: value if isinstance(value, Mapping) and value else None,
}
