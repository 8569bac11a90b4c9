"""Paths from users. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from holdfast.core.errors import UsageError

# One slash, because pathlib reduces two to one.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")


def checkpoint_place(given: str | os.PathLike[str]) -> Path | str:
    """Return a path of a file system, or the URL of an object store. Raise `UsageError` as `local_path` does."""
    text = os.fspath(given)
    if "://" in text and not text.startswith("file:"):
        return text.rstrip("/")
    return local_path(text)


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return a path of a file system. Raise `UsageError` for a URL, and for `~`, which only a shell expands."""
    path = os.fspath(given)
    if _URL.match(path):
        raise UsageError(
            f"{path!r} is a URL, and nothing was read or written: expected a path, for example /checkpoints. To copy "
            "checkpoints to an object store, use 'holdfast run --object-url' or 'holdfast checkpoints copy'"
        )
    if path.partition("/")[0] == "~":
        raise UsageError(
            f"{path!r} begins with ~, which only a shell expands, and nothing was read or written: pass the "
            "complete path, for example os.path.expanduser(...)"
        )
    return Path(path)
