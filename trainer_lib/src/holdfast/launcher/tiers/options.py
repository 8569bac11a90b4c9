"""What is asked of the memory tier and the local one. Apart from them: most launchers have none, and load neither."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

DEFAULT_LOCAL_INTERVAL: Final = 10  # steps

_UNITS: Final = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_SIZE: Final = re.compile(r"([1-9]\d*)(Ki|Mi|Gi|Ti)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """A folder on a volume of the node, and how often ranks commit there, in steps."""

    root: Path
    limit: int | None = None
    interval: int = 1
    per_second: int | None = None
    """Most bytes that each rank writes there, or sends on from there."""
    in_flight: int | None = None
    """Most writes of each rank at once, or of memory, most reads from one other node."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`PATH[:SIZE]`, the size as Kubernetes writes it; ValueError says what is wrong."""
        path, _, size = text.partition(":")
        if not path.startswith("/"):
            raise ValueError(f"{text!r} does not do: give the absolute PATH of a volume, or PATH:SIZE")
        return cls(root=Path(path), limit=read_size(size) if size else None)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(TierOptions):
    """The same in memory, and what goes on to another node from there."""

    peer_interval: int | None = None


def read_size(text: str) -> int:
    """Bytes, as `512Mi` or `16Gi`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size: give bytes, or a number with Ki, Mi, Gi or Ti")
    return int(match[1]) * _UNITS[match[2] or ""]
