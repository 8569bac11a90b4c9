"""A marker that names the checkpoint that is being uploaded to the object store. No torch.

The uploader writes the marker, and retention respects it. Without the marker, a job that saves faster than it uploads
would delete each checkpoint during its upload, and no copy would ever complete.

Invariant: the marker holds back one checkpoint of a folder, with its base checkpoints, for at most one day. An
uploader that hangs or was killed therefore cannot fill the volume. Ages are measured by the volume's clock.
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
    """Hold back a checkpoint. If the marker cannot be written (the volume may be full), the upload still proceeds."""
    content = f"{name}\n{uuid4().hex}\n".encode()
    with contextlib.suppress(OSError):
        fresh = root / f"{UPLOADING}.tmp"
        fresh.write_bytes(content)
        fresh.replace(root / UPLOADING)
    try:
        yield
    finally:
        if _read(root) == content:  # not the marker of another launcher's uploader
            with contextlib.suppress(OSError):
                (root / UPLOADING).unlink()


def uploading_checkpoint(root: Path) -> CheckpointName | None:
    name = parse_commit(_read(root).partition(b"\n")[0].decode(errors="replace"))
    return None if name is None or _age(root) > LONGEST_SECONDS else name


def _read(root: Path) -> bytes:
    try:
        return read_regular(root.resolve() / UPLOADING, _LARGEST)
    except (OSError, CheckpointError):
        return b""


def _age(root: Path) -> float:
    """Return the seconds from the marker to the last checkpoint, both by the clock of the volume's server."""
    try:
        return root.stat().st_mtime - (root / UPLOADING).stat().st_mtime
    except OSError:
        return 0.0
