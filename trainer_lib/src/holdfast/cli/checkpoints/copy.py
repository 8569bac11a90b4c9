"""Copies a checkpoint to another store. The bytes are verified on the way, and the manifest is written last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import digest
from holdfast.checkpoint.restore.transfer import transfer
from holdfast.checkpoint.stores.base import CheckpointStore, Target
from holdfast.cli.checkpoints.access.commit_reader import nbytes
from holdfast.cli.checkpoints.access.locate import CheckpointLocation, fenced, read_manifest
from holdfast.cli.checkpoints.access.progress_bar import Progress, progress
from holdfast.cli.checkpoints.verify import verify
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnknownFormatError

_BAD: Final = (CorruptCheckpointError, UnknownFormatError)


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A checkpoint that is now in the target; `fresh` if it was not there before."""

    name: CheckpointName
    nbytes: int
    fresh: bool


@dataclass(frozen=True, kw_only=True)
class Uncopied:
    """A checkpoint that was not copied, and why. `damaged`: it is corrupt."""

    name: CheckpointName
    reason: str
    damaged: bool
    fine: bool = False
    """This is no error: the checkpoint is fenced in its store, or was deleted meanwhile."""


def left_out(place: CheckpointLocation, requested: Sequence[CheckpointName]) -> list[Uncopied]:
    """Return the checkpoints that the claims of their store fence.

    The target has no claims, so a copy would make them readable again. A checkpoint that the user named is copied in
    any case.
    """
    if place.name is not None:
        return []
    claims = place.store.claims()
    reasons = {name: fenced(place.store, name, claims) for name in requested}
    return [
        Uncopied(name=name, reason=f"{reason}; pass {place.store.url}/{name} to copy it", damaged=False, fine=True)
        for name, reason in reasons.items()
        if reason
    ]


def copy_all(
    source: CheckpointStore, requested: Sequence[CheckpointName], target: Target
) -> Iterator[Copied | Uncopied]:
    """Copy these checkpoints and those that they depend on, the oldest first.

    A corrupt checkpoint, and those that depend on it, are skipped and reported.
    """
    order: dict[CheckpointName, list[CheckpointName]] = {}
    bad: dict[CheckpointName, Uncopied] = {}
    for name in reversed(requested):
        try:
            *below, _ = lineage(source, name)
            order |= {one: [] for one in below if one not in order} | {name: below}
        except _BAD as error:
            bad[name] = _uncopied(source, name, error)
    yield from bad.values()
    for name, below in order.items():
        lost = next((one for one in below if one in bad), None)
        if lost is not None:
            bad[name] = _uncopied(source, name, CorruptCheckpointError(f"it depends on {lost}, which was not copied"))
            yield bad[name]
            continue
        try:
            with progress(f"copy {name}", nbytes(read_manifest(source, name))) as shown:
                copied = copy(source, name, target, shown)
        except _BAD as error:
            bad[name] = _uncopied(source, name, error)
            yield bad[name]
        else:
            yield copied


def _uncopied(source: CheckpointStore, name: CheckpointName, error: CheckpointError) -> Uncopied:
    if name not in source.commits():  # retention deleted it
        return Uncopied(name=name, reason="deleted while it was read", damaged=False, fine=True)
    reason = str(error).removeprefix(f"{name}: ")
    return Uncopied(name=name, reason=reason, damaged=isinstance(error, CorruptCheckpointError))


def lineage(store: CheckpointStore, name: CheckpointName) -> list[CheckpointName]:
    """Return a checkpoint and all those that it depends on, the oldest first."""
    below = filter(None, map(parse_commit, read_manifest(store, name).depends_on))
    return [*sorted(below), name]


def copy(source: CheckpointStore, name: CheckpointName, target: Target, shown: Progress) -> Copied:
    """Copy one checkpoint. The bytes are verified against the manifest, and against what the target reports.

    A checkpoint that exists in the target is read and verified.
    """
    manifest = read_manifest(source, name)
    total = nbytes(manifest)
    if name in target.commits():
        if target.manifest(name) != manifest:
            raise CheckpointError(f"{target.url} has another checkpoint named {name}. Nothing was changed")
        verification = verify(target, name)
        if verification.damaged:
            raise CorruptCheckpointError(
                f"{target.url} has {name} already, and it is corrupt ({verification.reason}): move it to "
                f"quarantine with 'holdfast checkpoints verify {target.url}/{name} --quarantine', and copy "
                "again"
            )
        shown.add(total)
        return Copied(name=name, nbytes=total, fresh=False)
    incoming = target.receive(name, digest(manifest))
    try:
        transfer(source, name, manifest, incoming, shown=shown.add)
        incoming.publish(manifest)
    except BaseException:
        incoming.discard()
        raise
    return Copied(name=name, nbytes=total, fresh=True)
