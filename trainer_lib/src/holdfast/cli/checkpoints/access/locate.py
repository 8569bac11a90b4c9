"""Resolves a user's argument to a store and a checkpoint in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from holdfast.checkpoint.format.file_names import MANIFEST, CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.stores.base import CheckpointStore, SharedStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.checkpoint.stores.open import open_store, parted
from holdfast.cli.checkpoints.access.node_store import NodeFolderStore, open_node_store
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnknownFormatError, UsageError
from holdfast.core.protocol import LOCAL_TIER, MEMORY_TIER

_FILE: Final = "file://"
_NODE_LOCAL: Final = (f"{MEMORY_TIER}:", f"{LOCAL_TIER}:")


@dataclass(frozen=True, kw_only=True)
class CheckpointLocation:
    """A store, and a checkpoint in it if the user named one."""

    store: FolderStore | ObjectStore | NodeFolderStore
    name: CheckpointName | None = None

    @property
    def changeable(self) -> SharedStore:
        """The store, if checkpoints in it may be changed. Raises UsageError if only its launcher may change it."""
        if isinstance(self.store, NodeFolderStore):
            raise self.store.refusal()
        return self.store


def find(where: str, *, fresh: bool = False) -> CheckpointLocation:
    """Resolve a folder or URL of checkpoints, or of one of them; `fresh`: it need not exist."""
    root, name = _split(where)
    node_store = _node_store(root)
    if node_store is not None:
        return CheckpointLocation(store=node_store, name=name)
    if root.startswith(_FILE):
        _check_folder(Path(unquote(parted(root).path)), where, name, fresh=fresh)
    elif "://" not in root:
        _check_folder(Path(root), where, name, fresh=fresh)
    return CheckpointLocation(store=open_store(root), name=name)


def _node_store(root: str) -> NodeFolderStore | None:
    """Return the store of `memory:/PATH` and `local:/PATH`, as logs name these tiers, or of the path alone.

    `memory:///PATH` belongs to such a tier if the folder exists, and otherwise to fsspec.
    """
    if not root.startswith(_NODE_LOCAL):
        return None if "://" in root else open_node_store(Path(root))
    tier, _, path = root.partition(":")
    if path.startswith("//") and not (path.startswith("///") and Path(path).is_dir()):
        return None
    if not path.startswith("/"):
        raise UsageError(
            f"holdfast checkpoints: invalid value {root}: expected {tier}:/PATH with the absolute path of that "
            "tier's folder"
        )
    folder = Path(unquote(path))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    found = open_node_store(folder) or NodeFolderStore(f"{tier}:{folder}", [])
    if not found.url.startswith(f"{tier}:"):
        raise UsageError(f"holdfast checkpoints: {folder} belongs to another tier: pass {found.url}")
    return found


def _split(where: str) -> tuple[str, CheckpointName | None]:
    if not where:
        raise UsageError("holdfast checkpoints: empty path: pass the folder of the checkpoints")
    head, _, last = where.rstrip("/").rpartition("/")
    name = parse_commit(last)
    if name is None:
        return where, None
    if name.staging:
        raise CheckpointError(f"{where} is an unfinished save, not a checkpoint, and is never read")
    return head or ("/" if where.startswith("/") else "."), name


def _check_folder(path: Path, where: str, name: CheckpointName | None, *, fresh: bool) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: pass the folder of the checkpoints")
    if not fresh and not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    if name is None and (path / MANIFEST).exists():
        raise CheckpointError(
            f"{where} holds a {MANIFEST} but does not have the name of a checkpoint "
            "(step-<step>.g<generation>.a<attempt>): restore its name"
        )


def choose(place: CheckpointLocation, step: int | None) -> CheckpointName:
    """Return the named checkpoint, that of `step`, or the newest one that may be read."""
    if place.name is not None:
        if step is not None and step != place.name.step:
            raise UsageError(
                f"holdfast checkpoints: {place.name} is not a checkpoint of step {step}: leave --step out"
            )
        if place.name not in place.store.commits():
            raise CheckpointError(f"{place.store.url} has no checkpoint {place.name}")
        return place.name
    names = [name for name in place.store.commits() if step in (None, name.step)]
    if not names:
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{place.store.url} has no {what}")
    claims = place.store.claims()
    free = [name for name in names if not fenced(place.store, name, claims)]
    return max(free or names)


def every(place: CheckpointLocation, step: int | None = None) -> list[CheckpointName]:
    """Return the selected checkpoints, the newest first; all of them if none is named."""
    if place.name is not None or step is not None:
        return [choose(place, step)]
    return sorted(place.store.commits(), reverse=True)


def read_manifest(store: CheckpointStore, name: CheckpointName) -> Manifest:
    """Return the manifest of a checkpoint. Errors contain the name of the checkpoint."""
    try:
        return store.manifest(name)
    except (CorruptCheckpointError, UnknownFormatError) as error:
        raise type(error)(f"{name}: {error}") from error


def fenced(store: CheckpointStore, name: CheckpointName, claims: tuple[Claim, ...]) -> str:
    """Return why the job with the newest claim would not read this checkpoint; empty if it would."""
    if not claims:
        return ""
    newest = max(claims, key=lambda claim: claim.attempt_id)
    return fencing.readable(_owned(store, name), claims, job_uid=newest.job_uid).reason


def _owned(store: CheckpointStore, name: CheckpointName) -> fencing.Commit:
    try:
        manifest = store.manifest(name)
    except (CorruptCheckpointError, UnknownFormatError):
        return fencing.Commit.named(name)
    return fencing.Commit.named(name, manifest.job_uid, manifest.publication)
