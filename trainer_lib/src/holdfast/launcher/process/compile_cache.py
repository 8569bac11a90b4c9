"""Repairs the cache of torch's compiler after a kill.

A killed compiler leaves an incomplete library under its final name. Inductor treats every existing file as complete,
so later attempts and jobs would fail with "file too short". Incomplete files are removed under the lock of their
writer, so no file in progress is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import itertools
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_log = logging.getLogger("holdfast.launcher")
_SUFFIXES: Final = frozenset({".so", ".o"})
_MOST_FILES: Final = 50_000
# Offsets in a 64-bit ELF header: the position of the section table, the size and the number of its entries. Linkers
# write this table last.
_HEADER: Final = struct.Struct("<4s36xQ10xHHH")


def folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which ranks with this environment keep compiled code."""
    given = environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        return Path(given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def repair(cache: Path) -> list[Path]:
    """Remove incomplete libraries that no process is writing. Return them."""
    removed = []
    for file in itertools.islice(_libraries(cache), _MOST_FILES):
        if _incomplete(file):
            with _locked(cache, file.parent.name) as alone, contextlib.suppress(FileNotFoundError):
                if alone and _incomplete(file):
                    file.unlink()
                    removed.append(file)
    if removed:
        text = "removed %d incomplete files from the compile cache %s: a compiler was killed; they are compiled again"
        _log.warning(text, len(removed), cache)
    return removed


def _libraries(cache: Path) -> Iterator[Path]:
    """Yield the libraries. The first two letters of its key name the folder of each."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(cache):
            if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                yield from (Path(file) for file in os.scandir(entry.path) if Path(file).suffix in _SUFFIXES)


def _incomplete(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            head, size = opened.read(_HEADER.size), os.fstat(opened.fileno()).st_size
    except OSError:
        return False
    if len(head) < _HEADER.size:
        return True
    magic, sections, width, count, _ = _HEADER.unpack(head)
    return magic != b"\x7fELF" or not sections or sections + width * count > size


@contextlib.contextmanager
def _locked(cache: Path, letters: str) -> Iterator[bool]:
    """Hold the locks of all keys with files in this folder; False if a compiler holds one of them."""
    with contextlib.ExitStack() as held:
        try:
            locks = [held.enter_context(lock.open("ab")) for lock in (cache / "locks").glob(f"?{letters}*.lock")]
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = all(os.fstat(lock.fileno()).st_nlink for lock in locks)  # else another file is the lock by now
        except OSError:
            alone = False
        yield alone
