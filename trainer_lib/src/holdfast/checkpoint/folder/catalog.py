"""The checkpoints of a folder: list, quarantine and delete them. No torch.

Nothing is deleted because it is corrupt: it is moved to `quarantine/`. Retention deletes a checkpoint's manifest
first, so that a half-deleted folder never counts as a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import uuid4

from holdfast.checkpoint.folder.claims import clean_claims
from holdfast.checkpoint.format.file_names import (
    CLAIMS,
    DELETED_MANIFEST,
    LATEST,
    MANIFEST,
    QUARANTINE,
    RUN_LOCK,
    UPLOADING,
    CheckpointName,
    parse_commit,
)
from holdfast.checkpoint.format.manifest import LARGEST, Manifest, decode_as
from holdfast.checkpoint.io.durable_files import encode_json, read_regular, sync_folder
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnknownFormatError, UsageError

_log = logging.getLogger("holdfast.checkpoint.tier")

_OWN_NAMES: Final = frozenset({CLAIMS, LATEST, QUARANTINE, RUN_LOCK, UPLOADING})
_MOST_NAMED: Final = 5
# On a read, these errors mean that the bytes are lost. Any other error is a problem of this process.
_LOST: Final = frozenset({errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """The name of something that was found corrupt, and the reason."""

    path: str
    reason: str


def list_commits(root: Path) -> tuple[CheckpointName, ...]:
    """Return the checkpoints of a folder by their names. Half-deleted folders do not count."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return ()
    parsed = (parse_commit(name) for name in names)
    return tuple(
        name
        for name in parsed
        if name is not None and not name.staging and not os.path.lexists(root / str(name) / DELETED_MANIFEST)
    )


def check_place(root: Path) -> None:
    """Raise `UsageError` if `root` is itself a checkpoint: checkpoints inside it would be deleted with it."""
    if (root / MANIFEST).exists():
        raise UsageError(f"{root} is a single checkpoint: pass its parent folder, {root.parent}")


def what_is_wrong(root: Path) -> str:
    """Explain why a folder may be the wrong one. Return "" if it has checkpoints, or may be new."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError:
        return f"no such folder: {root}"
    except OSError as error:
        return f"{root} cannot be read: {error.strerror}"
    if any(map(parse_commit, names)):
        return ""
    below = [name for name in names if _holds_commits(root / name)]
    if below:
        return f"{root} holds no checkpoints, but its subfolders do: {_listed(below)}. Pass one of them"
    strange = [name for name in names if name not in _OWN_NAMES]
    return f"{root} holds no checkpoints of Holdfast, but {_listed(strange)}" if strange else ""


def _holds_commits(folder: Path) -> bool:
    try:
        return folder.is_dir() and bool(list_commits(folder))
    except OSError:
        return False


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


def read_manifest(root: Path, name: CheckpointName) -> Manifest:
    """Return a checkpoint's manifest. Raise `CorruptCheckpointError` or `UnknownFormatError` if it is not valid."""
    path = root / str(name) / MANIFEST
    with reading(path):
        return decode_as(read_regular(path, LARGEST), name)


class reading:  # noqa: N801  (named like a context manager)
    """Translate an `OSError`: lost bytes become `CorruptCheckpointError`, read failures `CheckpointError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in _LOST:
            lost = "is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
            raise CorruptCheckpointError(f"{self._path.name} {lost}") from error
        raise CheckpointError(
            f"cannot read {self._path}: {error.strerror}. Nothing was changed. Make it readable and start again"
        ) from error


def quarantine(root: Path, name: CheckpointName, reason: str) -> bool:
    """Move a corrupt checkpoint to `quarantine/`. Return False if it cannot be moved; reads then ignore it."""
    try:
        target = move_to_quarantine(root, name, reason)
    except OSError as error:
        _log.error("%s is corrupt (%s) and cannot be moved to quarantine: %s", name, reason, error.strerror)
        return False
    _log.error("%s is corrupt (%s): moved to %s", name, reason, target.relative_to(root))
    return True


def move_to_quarantine(root: Path, name: CheckpointName, reason: str) -> Path:
    """Move a checkpoint to `quarantine/`, where retention deletes nothing, and return its new path."""
    target = root / QUARANTINE / f"{name}.{uuid4().hex[:8]}"
    if (root / QUARANTINE).is_symlink():
        raise OSError(errno.ELOOP, f"{root / QUARANTINE} is a symbolic link, which may point anywhere")
    (root / QUARANTINE).mkdir(exist_ok=True)
    (root / str(name)).rename(target)
    note = {"path": str(name), "reason": reason, "time": datetime.now(UTC).isoformat()}
    target.with_name(f"{target.name}.reason.json").write_bytes(encode_json(note))
    sync_folder(root)
    return target


def delete(root: Path, names: Iterable[CheckpointName]) -> None:
    """Delete checkpoints, the manifest of each one first. Keep a checkpoint that this release cannot read."""
    for name in names:
        folder = root / str(name)
        try:
            read_manifest(root, name)
            (folder / MANIFEST).rename(folder / DELETED_MANIFEST)
            sync_folder(folder)
            _remove(folder, name)
        except (UnknownFormatError, CorruptCheckpointError) as error:
            _log.warning("retention does not delete %s: %s", name, error)
        except (OSError, CheckpointError) as error:
            _log.warning("retention could not delete %s: %s", name, error)


def _remove(folder: Path, name: CheckpointName) -> None:
    """Rename a folder to a name of unfinished work, and then delete its files.

    A crash therefore never leaves an empty checkpoint. A save that still writes into this folder finds it missing,
    not half deleted.
    """
    leftover = folder.with_name(f"{name}.tmp-{uuid4().hex}")
    folder.rename(leftover)
    shutil.rmtree(leftover)


def leftovers(root: Path, *, before: datetime) -> tuple[str, ...]:
    """Return the folders of interrupted saves and deletions in which nothing was written since `before`.

    A save that is still running changes the folder's modification times.
    """
    return tuple(sorted(entry.name for entry in root.iterdir() if _left(entry, before.timestamp())))


def _left(folder: Path, before: float) -> bool:
    name = parse_commit(folder.name)
    if name is None or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        begun = name.staging or os.path.lexists(folder / DELETED_MANIFEST)
        return begun and max(path.lstat().st_mtime for path in (folder, *folder.iterdir())) < before
    except FileNotFoundError:  # the folder has just become a checkpoint, or was deleted
        return False


def remove_leftovers(root: Path, names: Iterable[str]) -> None:
    """Remove such folders, and log those that cannot be removed."""
    for leftover in names:
        name = parse_commit(leftover)
        if name is not None:
            _clean_folder(root / leftover, name)


def clean(root: Path, *, own: AttemptId) -> None:
    """Remove unfinished work of earlier attempts.

    Only attempt IDs below `own` are affected: they can never be read.
    """
    for entry in list(root.iterdir()):
        name = parse_commit(entry.name)
        if entry.name.startswith(f"{LATEST}.tmp-"):
            entry.unlink(missing_ok=True)
        elif name is not None and name.attempt_id < own:
            _clean_folder(entry, name)
    clean_claims(root, own)


def _clean_folder(folder: Path, name: CheckpointName) -> None:
    try:
        if name.staging:
            _remove(folder, name)
            _log.info("removed the leftover %s", folder.name)
        elif os.path.lexists(folder / DELETED_MANIFEST):
            _remove(folder, name)
            _log.info("finished the deletion of %s", folder.name)
    except OSError as error:
        _log.warning("could not remove the leftover %s: %s", folder.name, error.strerror)
