"""Copying a commit to another store: verified on the way, its manifest last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from holdfast.checkpoint.manifest import Manifest, digest
from holdfast.checkpoint.names import CommitName, parse_commit, slices_file
from holdfast.checkpoint.reading import read_slices
from holdfast.checkpoint.slices import decode
from holdfast.checkpoint.stores import Incoming, Store
from holdfast.checkpoints.content import nbytes, read_file
from holdfast.checkpoints.places import read_manifest
from holdfast.checkpoints.progress import Progress
from holdfast.checkpoints.verifying import verify
from holdfast.errors import CheckpointError, DamagedError


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A commit that is now in the target; `fresh` if it was not there before."""

    name: CommitName
    nbytes: int
    fresh: bool


def lineage(store: Store, name: CommitName) -> list[CommitName]:
    """A commit and all that it stands on, the oldest first."""
    below = filter(None, map(parse_commit, read_manifest(store, name).stands_on))
    return [*sorted(below, key=lambda one: (one.step, one.pair)), name]


def copy(source: Store, name: CommitName, target: Store, shown: Progress) -> Copied:
    """Copy one commit; its bytes are checked against its manifest, and against what the target says it has. One that
    is there already is read back."""
    manifest = read_manifest(source, name)
    total = nbytes(manifest)
    if name in target.commits():
        if target.manifest(name) != manifest:
            raise CheckpointError(f"{target.url} has another commit under the name {name}: nothing was changed")
        verdict = verify(target, name)
        if verdict.damaged:
            raise DamagedError(
                f"{target.url} has {name} already, and it is damaged ({verdict.reason}): move it aside by "
                f"'holdfast checkpoints verify {target.url}/{name} --quarantine', and copy again"
            )
        shown.add(total)
        return Copied(name=name, nbytes=total, fresh=False)
    incoming = target.receive(name, digest(manifest))
    try:
        _fill(source, name, manifest, incoming, shown)
        incoming.publish(manifest)
    except BaseException:
        incoming.discard()
        raise
    return Copied(name=name, nbytes=total, fresh=True)


def _fill(source: Store, name: CommitName, manifest: Manifest, incoming: Incoming, shown: Progress) -> None:
    for file, record in sorted(manifest.own.items()):
        with source.open(name, file) as opened:
            written = incoming.write(file, read_file(file, opened, record))
        if written != record:
            raise DamagedError(f"{file} did not arrive as it was sent")
        beside = read_slices(partial(source.open, name), file)
        if decode(beside, record) is not None:
            incoming.write(slices_file(file), [beside])
        shown.add(record.nbytes)
