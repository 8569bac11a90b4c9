"""Where commits lie: the whole surface that a tier must offer to be read, filled, and looked after. No torch.

A store tells two troubles apart. `DamagedError`: the bytes are gone or are not those that were written, so another
copy is needed. Any other `CheckpointError`: this process cannot get at them now (rights, network, credentials), and
nothing may be concluded about the commit. A commit is there when its manifest is; what has none is nobody's.

A source is read a chunk at a time. One that can give parts of a chunk apart at no cost says so with a property
`grain: int`: offsets and addresses of such parts are multiples of it (1: any). They then need no second copy. One
that is read fastest into contiguous memory, and copied from there, says so with a property `staged: bool`. A store
that is no disk says with a property `readers: int` how many parts to ask for at once: many where answers take their
time, one for each processor where it is memory. One that goes by way of a cache of the host has a method `forget()`:
the next read is past it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

from holdfast.checkpoint.format.file_names import CheckpointName, located
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import FileRecord
from holdfast.checkpoint.io.durable_files import Buffer
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, DamagedError


class Source(Protocol):
    """One file of a commit, open for reading; any thread may read any part."""

    @property
    def nbytes(self) -> int:
        """The file's length as the store has it."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill all of `target` from `offset` on; DamagedError if the file ends before."""

    def __enter__(self) -> Self:
        """Open until the block ends."""

    def __exit__(self, *_: object) -> None:
        """Let go of it."""


class OpenSource:
    """A source that `close` lets go of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held, unless a source says otherwise."""


class Incoming(Protocol):
    """A commit on its way into a store: nobody sees it before it is published."""

    def write(self, file: str, parts: Iterable[Buffer]) -> FileRecord:
        """Write one file whole; its length and digests, once the store has it for good."""

    def publish(self, manifest: Manifest) -> None:
        """Make it a commit, durably, by writing its manifest last."""

    def discard(self) -> None:
        """Give it up. What cannot be removed now is nobody's commit."""


class CheckpointStore(Protocol):
    """One tier's commits."""

    @property
    def url(self) -> str:
        """Where it is, for people; without credentials."""

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same commits here, each with all its files; if not, it is this node's own, and
        of a commit it may have only some files."""

    def commits(self) -> tuple[CheckpointName, ...]:
        """What is a commit by name."""

    def claims(self) -> tuple[Claim, ...]:
        """Every claim that lies here; a claim that cannot be read is an error."""

    def manifest(self, name: CheckpointName) -> Manifest:
        """The manifest of a commit, whole and of this commit; DamagedError or UnknownFormatError."""

    def open(self, name: CheckpointName, file: str) -> Source:
        """One of its files; DamagedError if it is missing."""

    def quarantine(self, name: CheckpointName, reason: str) -> bool:
        """Move a bad commit aside, never delete it; False if it cannot be moved (it is then ignored where it is)."""


class Target(CheckpointStore, Protocol):
    """A store that all ranks share: commits are copied into it and deleted in it, and it keeps claims as well."""

    def receive(self, name: CheckpointName, content: str) -> Incoming:
        """Begin a commit of this name. `content` stands for all that it will hold: CheckpointError if another one is
        begun here under the name, and the two would meet."""

    def delete(self, name: CheckpointName) -> None:
        """Delete a commit, its manifest first. One that this release cannot read is left alone."""

    def keep_claim(self, claim: Claim) -> None:
        """Write a claim, exclusively; the same claim again is none too many."""

    def sweep(self, below: CheckpointName) -> None:
        """Remove what was never finished of the commits before this one."""


class NodeStore:
    """What is true of each store that is one node's own: claims are where all see them, and in the membership."""

    shared = False

    def claims(self) -> tuple[Claim, ...]:
        """There are none."""
        return ()


def needed_by(store: CheckpointStore, name: CheckpointName) -> CheckpointName | None:
    """A commit of which some bytes lie in this one's folder, if there is one: moved, it would take that along."""
    for other in store.commits():
        try:
            if other != name and str(name) in store.manifest(other).stands_on:
                return other
        except CheckpointError:
            continue  # it cannot be read as it is
    return None


def manifest_of(store: CheckpointStore, name: CheckpointName) -> Manifest:
    """The manifest of a commit. One that is found bad is read once more: bytes may be flipped on their way."""
    try:
        return store.manifest(name)
    except DamagedError:
        return store.manifest(name)


def open_file(store: CheckpointStore, name: CheckpointName, file: str) -> Source:
    """A file that a commit's manifest names: one of its own, or one of an earlier commit on which it stands."""
    home, own = located(name, file)
    try:
        return store.open(home, own)
    except DamagedError as error:
        if home == name:
            raise
        raise DamagedError(f"{home}, on which {name} stands: {error}") from error
