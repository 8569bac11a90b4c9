"""Dataclasses as JSON, by the types of their fields. Pure.

The JSON name of a field `per_second` is `perSecond`. A field with a default is optional, and unknown fields are
ignored. Bytes are hex digits, sets are sorted lists, enums are their values. A type with its own `to_json` and
`from_json` uses them. The field `attempt_id` is `pair` in JSON.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import EnumType, IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEYS: Final = {"attempt_id": "pair"}


class JsonFields:
    """A dataclass whose JSON form has its fields."""

    def to_json(self: DataclassInstance) -> dict[str, Any]:
        """Return the fields by their names."""
        return {one.key: _written(getattr(self, one.name)) for one in _fields_of(type(self))}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the fields. Raise `KeyError`, `TypeError` or `ValueError` if one is missing or has another type."""
        known = _fields_of(cls)  # type: ignore[arg-type]
        return cls(**{one.name: _read(one.kind, value[one.key]) for one in known if one.needed or one.key in value})


@dataclass(frozen=True, kw_only=True)
class _Field:
    name: str
    key: str
    kind: Any
    needed: bool


@cache
def _fields_of(kind: type[DataclassInstance]) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    return tuple(
        _Field(
            name=one.name,
            key=_KEYS.get(one.name) or _camel(one.name),
            kind=hints[one.name],
            needed=one.default is MISSING and one.default_factory is MISSING,
        )
        for one in fields(kind)
    )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _written(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    match value:
        case Mapping():
            return {_written(key): _written(item) for key, item in value.items()}
        case frozenset():
            return sorted(map(_written, value))
        case tuple() | list():
            return [_written(item) for item in value]
        case IntEnum():
            return int(value)
        case str():
            return str(value)  # the text of an enum, also where the result is not encoded
        case bytes():
            return value.hex()
        case Path():
            return str(value)
    return value


def _read(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (some,) = (one for one in args if one is not types.NoneType)
        return None if value is None else _read(some, value)
    if origin in (tuple, frozenset):
        return origin(_read(args[0], item) for item in _typed(list, value))
    if origin is Mapping:
        return {_read(args[0], key): _read(args[1], item) for key, item in _typed(dict, value).items()}
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if isinstance(kind, EnumType):
        return kind(value)
    if kind in (bytes, Path):
        return bytes.fromhex(_typed(str, value)) if kind is bytes else Path(_typed(str, value))
    if kind is Any or (kind is float and type(value) is int):
        return value
    return _typed(kind, value)


def _typed(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{str(value)[:40]!r} is not of type {kind.__name__}")
    return value
