"""The interface of a checkpoint store, with which a tier is read, written and maintained. No torch.

A store reports two kinds of errors. `CorruptCheckpointError` means that bytes are missing or differ from what was
written, so another copy is needed. Any other `CheckpointError` means that this process cannot read them now
(permissions, network, credentials), which allows no conclusion about the checkpoint. A checkpoint exists if its
manifest exists.
Files without a manifest do not count as one.

A source is read one chunk at a time. These optional members describe it:

- The property `grain: int` shows that parts of a chunk can be read separately at no cost, and need no second copy.
  The offsets and addresses of such parts are multiples of it (1: any).
- The property `staged: bool` shows that a read into contiguous memory, followed by a copy, is fastest.
- The property `readers: int` of a store is the number of parts to request at once: many for slow answers, and one per
  processor for memory. A disk does not have it.
- The method `forget()` of a source with a host cache makes the next read bypass it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, Self

from holdfast.checkpoint.format.file_names import CheckpointName, located
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.checkpoint.io.shard import Shard
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, CorruptCheckpointError


class Source(Protocol):
    """One file of a checkpoint, open for reading. Any thread may read any part."""

    @property
    def nbytes(self) -> int:
        """The file's length in the store, in bytes."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill all of `target` from `offset` on. Raise `CorruptCheckpointError` if the file ends before."""

    def __enter__(self) -> Self:
        """Keep the file open until the context ends."""

    def __exit__(self, *_: object) -> None:
        """Close the file."""


class OpenSource:
    """A source whose context calls `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the source. By default, there is nothing to close."""


class Incoming(Protocol):
    """A checkpoint that is being written into a store. Readers do not see it before it is published."""

    def write(self, file: str, parts: Iterable[Buffer]) -> FileRecord:
        """Write one complete file. Return its length and digests once it is durable."""

    def publish(self, manifest: Manifest) -> None:
        """Turn the files into a durable checkpoint by writing its manifest last."""

    def discard(self) -> None:
        """Abandon the checkpoint. Files that cannot be removed now do not count as a checkpoint."""


class CheckpointStore(Protocol):
    """The checkpoints of one tier."""

    @property
    def url(self) -> str:
        """The location, for people, without credentials."""

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same checkpoints here, each with all its files.

        Otherwise the store is node-local, and may have only some files of a checkpoint.
        """

    def commits(self) -> tuple[CheckpointName, ...]:
        """Return the names of the checkpoints."""

    def claims(self) -> tuple[Claim, ...]:
        """Return every claim in the store. Raise an error if a claim cannot be read."""

    def manifest(self, name: CheckpointName) -> Manifest:
        """Return a manifest. Raise `CorruptCheckpointError` or `UnknownFormatError` if it is not valid."""

    def open(self, name: CheckpointName, file: str) -> Source:
        """Open one of its files. Raise `CorruptCheckpointError` if it is missing."""

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Move a corrupt checkpoint aside, and never delete it.

        Return False if it cannot be moved; reads then ignore it.
        """


class Target(CheckpointStore, Protocol):
    """A store that all ranks share. Checkpoints are copied into it and deleted in it, and it also keeps claims."""

    def receive(self, name: CheckpointName, content: str) -> Incoming:
        """Begin a checkpoint of this name. `content` identifies all that it will contain.

        Raise `CheckpointError` if another content was begun under this name, because the files would mix.
        """

    def delete(self, name: CheckpointName) -> None:
        """Delete a checkpoint, its manifest first. Keep a checkpoint that this release cannot read."""

    def keep_claim(self, claim: Claim) -> None:
        """Write a claim exclusively. Writing the same claim again is not an error."""

    def sweep(self, below: CheckpointName) -> None:
        """Remove the unfinished files of the checkpoints before this one."""


ShardWriter = Callable[[Shard], dict[str, FileRecord]]
"""Writes one rank's files of a checkpoint durably, and returns their records."""


class SharedStore(Target, Protocol):
    """The shared tier of a job: its ranks save into it together, and its attempts claim it.

    A save has three phases. Rank 0 begins it, each rank writes its files, and rank 0 publishes them. `staging`
    identifies one save between these phases.
    """

    def prepare(self) -> None:
        """Create what claims and checkpoints need."""

    def exists(self, name: CheckpointName) -> bool:
        """Return whether the store has this checkpoint."""

    def highest_generation(self) -> int:
        """Return the highest generation of which the store has a claim; 0 if there is none."""

    def write_claim(self, claim: Claim, *, again: bool = False) -> None:
        """Write a claim exclusively. Raise `ClaimError` if another process has claimed the same attempt.

        `again`: an earlier try may have written it already.
        """

    def remove_claims(self, claims: Iterable[Claim]) -> None:
        """Remove claims that a durable claim has superseded. A claim that cannot be removed is harmless."""

    def clean(self, own: AttemptId) -> None:
        """Remove the unfinished work of the attempts before `own`."""

    def set_aside(self, name: CheckpointName, reason: str) -> None:
        """Move a checkpoint to `quarantine/`. Raise `CheckpointError` if it cannot be moved."""

    def uploading(self) -> CheckpointName | None:
        """Return the checkpoint that is being copied to another store, which retention keeps."""

    def begin(self, name: CheckpointName) -> str:
        """Begin a save, and return its `staging`; "" if the store has the checkpoint already."""

    def writer(self, staging: str) -> ShardWriter:
        """Return the function with which each rank writes its files."""

    def publish(self, staging: str, manifest: Manifest) -> None:
        """Turn the files of all ranks into a durable checkpoint by writing its manifest last."""

    def discard(self, staging: str) -> None:
        """Remove the files of a failed save. A later attempt removes what cannot be removed now."""


class NodeStore:
    """The common part of node-local stores. Claims are in shared stores and in the membership."""

    shared = False

    def claims(self) -> tuple[Claim, ...]:
        """Return no claims."""
        return ()


def needed_by(store: CheckpointStore, name: CheckpointName) -> CheckpointName | None:
    """Return another checkpoint that needs bytes in the folder of `name`, which a move would remove; None if none
    does.
    """
    for other in store.commits():
        try:
            if other != name and str(name) in store.manifest(other).depends_on:
                return other
        except CheckpointError:
            continue  # it is already unreadable
    return None


def manifest_of(store: CheckpointStore, name: CheckpointName) -> Manifest:
    """Return the manifest of a checkpoint. Read it again once if it is corrupt, because bits may flip in transit."""
    try:
        return store.manifest(name)
    except CorruptCheckpointError:
        return store.manifest(name)


def open_file(store: CheckpointStore, name: CheckpointName, file: str) -> Source:
    """Open a file that a checkpoint's manifest names: its own, or one of an earlier checkpoint that it builds on."""
    home, own = located(name, file)
    try:
        return store.open(home, own)
    except CorruptCheckpointError as error:
        if home == name:
            raise
        raise CorruptCheckpointError(f"{home}, on which {name} depends: {error}") from error
