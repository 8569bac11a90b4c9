"""Copying a commit to another store: verified on the way, its manifest last."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.names import CommitName, parse_commit
from holdfast.checkpoint.stores import Incoming, Store
from holdfast.checkpoints.content import read_file
from holdfast.checkpoints.places import read_manifest
from holdfast.checkpoints.progress import Progress
from holdfast.errors import CheckpointError, DamagedError


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A commit that is now in the target; `fresh` if it was not there before."""

    name: CommitName
    nbytes: int
    fresh: bool


def lineage(store: Store, name: CommitName) -> list[CommitName]:
    """A commit and all that it stands on, the oldest first."""
    chain = [name]
    while (parent := read_manifest(store, chain[-1]).parent) is not None:
        parsed = parse_commit(parent)
        if parsed is None or parsed in chain:
            raise DamagedError(f"{chain[-1]} stands on {parent!r}, which is no commit")
        chain.append(parsed)
    return chain[::-1]


def copy(source: Store, name: CommitName, target: Store, shown: Progress) -> Copied:
    """Copy one commit; its bytes are checked against its manifest, and against what the target says it has."""
    manifest = read_manifest(source, name)
    total = sum(record.nbytes for record in manifest.files.values())
    if name in target.commits():
        if target.manifest(name) != manifest:
            raise CheckpointError(f"{target.url} has another commit under the name {name}: nothing was changed")
        shown.add(total)
        return Copied(name=name, nbytes=total, fresh=False)
    incoming = target.receive(name)
    try:
        _fill(source, name, manifest, incoming, shown)
        incoming.publish(manifest)
    except BaseException:
        incoming.discard()
        raise
    return Copied(name=name, nbytes=total, fresh=True)


def _fill(source: Store, name: CommitName, manifest: Manifest, incoming: Incoming, shown: Progress) -> None:
    for file, record in sorted(manifest.files.items()):
        with source.open(name, file) as opened:
            written = incoming.write(file, read_file(file, opened, record))
        if written != record:
            raise DamagedError(f"{file} did not arrive as it was sent")
        shown.add(record.nbytes)
