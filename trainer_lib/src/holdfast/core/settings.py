"""Settings, each declared once as a field of a dataclass. The command line, the environment and the docs derive from
it.

A module declares its settings with `setting()`, each with its option, variable, parser, default, owner and meaning.
`settings_of` returns them. Parsers take the text and raise `ValueError` with what they expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

D = TypeVar("D")
T = TypeVar("T")
_UNITS: Final = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_VOLUME: Final = re.compile(r"(?P<path>/[^:]*)(?::(?P<number>[1-9]\d*)(?P<unit>Ki|Mi|Gi|Ti)?)?", re.ASCII)
_INTERVAL: Final = re.compile(r"Auto|[1-9]\d*[smh]?", re.ASCII)


class Owner(StrEnum):
    """Which process reads a setting."""

    LAUNCHER = "launcher"
    RANK = "rank"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting. `flag` includes its argument (`--nnodes N`). `meaning` and `shown`, the default, are Markdown."""

    name: str = ""
    flag: str
    variable: str
    read: Callable[[str], object]
    default: object
    owner: Owner
    meaning: str
    shown: str
    variable_wins: bool
    key: str
    """The setting's name among the checkpoint settings of a membership document."""

    @property
    def help(self) -> str:
        """The meaning without Markdown, for `--help`."""
        text = re.sub(r" \(\[[^)]*\)\)", "", self.meaning)  # a link in parentheses
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("%", "%%")
        return f"{text} (default: {self.shown.replace('`', '')})" if self.shown else text

    @property
    def option(self) -> str:
        """The option without its argument; "" if there is none."""
        return self.flag.partition(" ")[0]


def setting(
    default: D,
    read: Callable[[str], T],
    meaning: str,
    *,
    variable: str = "",
    flag: str = "",
    owner: Owner = Owner.LAUNCHER,
    shown: str = "",
    variable_wins: bool = False,
    key: str = "",
) -> D | T:
    """Declare a setting as a field of a dataclass."""
    plain = (
        "" if default is None or default is False else f"{default:g}" if isinstance(default, float) else str(default)
    )
    declared = Setting(
        flag=flag,
        variable=variable,
        read=read,
        default=default,
        owner=owner,
        meaning=meaning,
        shown=shown or plain,
        variable_wins=variable_wins,
        key=key,
    )
    return field(default=default, metadata={"setting": declared})


def settings_of(kind: Any, *, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares.

    With a prefix, each has a variable: its own, or one from its name.
    """
    declared = [replace(one.metadata["setting"], name=one.name) for one in fields(kind) if one.metadata]
    return tuple(
        replace(one, variable=one.variable or f"{prefix}{one.name.upper()}") if prefix else one for one in declared
    )


# Parsers


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A folder on a volume, and the number of bytes that may be used."""

    root: Path
    limit: int | None = None


def volume(text: str) -> Volume:
    """Parse `PATH[:SIZE]`, with a size in the format of Kubernetes."""
    match = _VOLUME.fullmatch(text)
    if match is None:
        raise ValueError("expected an absolute PATH or PATH:SIZE, for example /dev/shm:16Gi")
    limit = int(match["number"]) * _UNITS[match["unit"] or ""] if match["number"] else None
    return Volume(root=Path(match["path"]), limit=limit)


def format_size(nbytes: float) -> str:
    """Return a number of bytes in the largest unit that fits, such as `1.5 GiB`."""
    unit, factor = next((item for item in reversed(_UNITS.items()) if nbytes >= item[1]), ("", 1))
    digits = 1 if factor > 1 and nbytes / factor < 100 else 0
    return f"{nbytes / factor:.{digits}f}".removesuffix(".0") + f" {unit}B"


def whole(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers within bounds."""

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() else -1
        if number < least or (most is not None and number > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"expected an integer {bounds}")
        return number

    return read


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number, for example 0.5") from None


def switch(text: str) -> bool:
    """Return True for any text. An option with this parser takes no value."""
    return bool(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts only these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return text

    return read


def interval(text: str) -> str:
    """Validate steps, a duration or `Auto`."""
    if _INTERVAL.fullmatch(text.strip()) is None:
        raise ValueError("expected steps, for example 50, a duration, for example 30s or 5m, or Auto")
    return text.strip()
