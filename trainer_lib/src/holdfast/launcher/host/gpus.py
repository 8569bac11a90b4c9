"""Lists the GPUs of this container. The sidecar sees none, and asks the node's exporter about these.

In some containers the driver lists all GPUs of the node. Only those with a device file belong to this container.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc/driver/nvidia/gpus")
_DEV: Final = Path("/dev")
_UUID: Final = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)
_MINOR: Final = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)


def visible(proc: Path = _PROC, dev: Path = _DEV) -> tuple[str, ...]:
    """Return their UUIDs; () without a driver."""
    found = (_uuid(path, dev) for path in sorted(proc.glob("*/information")))
    return tuple(uuid for uuid in found if uuid)


def _uuid(information: Path, dev: Path) -> str:
    try:
        text = information.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    uuid, minor = _UUID.search(text), _MINOR.search(text)
    here = uuid is not None and minor is not None and (dev / f"nvidia{minor[1]}").exists()
    return uuid[1] if uuid is not None and here else ""
