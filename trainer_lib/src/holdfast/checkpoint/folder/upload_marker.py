"""Which commit of a folder is on its way to the object store: its uploader says so there, and retention heeds it.

Without that, a job that commits faster than copies are made deletes each one under its uploader's hands, and no copy
ever arrives. Invariant: of a folder one commit is held back, with what it stands on, and no longer than a day, so
that an uploader which is stuck or was killed fills no volume. Ages are by the volume's clock. No torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import uuid4

from holdfast.checkpoint.format.file_names import UPLOADING, CheckpointName, parse_commit
from holdfast.checkpoint.io.durable_files import read_regular
from holdfast.core.errors import CheckpointError

LONGEST_SECONDS: Final = 86_400.0
_LARGEST: Final = 1 << 10


@contextlib.contextmanager
def held(root: Path, name: CheckpointName) -> Iterator[None]:
    """Hold a commit back. A volume that does not take the word (it may be full) holds up no copy."""
    word = f"{name}\n{uuid4().hex}\n".encode()
    with contextlib.suppress(OSError):
        fresh = root / f"{UPLOADING}.tmp"
        fresh.write_bytes(word)
        fresh.replace(root / UPLOADING)
    try:
        yield
    finally:
        if _read(root) == word:  # and not that of another launcher's uploader
            with contextlib.suppress(OSError):
                (root / UPLOADING).unlink()


def on_its_way(root: Path) -> CheckpointName | None:
    name = parse_commit(_read(root).partition(b"\n")[0].decode(errors="replace"))
    return None if name is None or _age(root) > LONGEST_SECONDS else name


def _read(root: Path) -> bytes:
    try:
        return read_regular(root.resolve() / UPLOADING, _LARGEST)
    except (OSError, CheckpointError):
        return b""


def _age(root: Path) -> float:
    """How long before the last commit it was written: both by the clock of who serves the volume."""
    try:
        return root.stat().st_mtime - (root / UPLOADING).stat().st_mtime
    except OSError:
        return 0.0
