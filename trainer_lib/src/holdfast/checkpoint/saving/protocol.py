"""One save by all ranks: each writes its share, rank 0 publishes. No torch.

A failure of the disk on any rank fails the save on all of them, with one message, and leaves what was committed
before untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder.publish import ShardRecord, begin, discard, exists, publish, write_shard
from holdfast.checkpoint.format.coverage import check
from holdfast.checkpoint.format.failure_causes import FailureCause, cause_among, failed
from holdfast.checkpoint.format.file_names import CheckpointName, inherited
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import Chunk, FileRecord, Records
from holdfast.checkpoint.format.shard_layout import Holding, Piece, ShardPlan, Shares, TensorSpec
from holdfast.checkpoint.io.durable_files import Buffer, make_folder, sync_folder
from holdfast.checkpoint.io.fill_progress import Filling
from holdfast.checkpoint.io.rate_limit import UNHINDERED, Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.ranks.replica_check import apart, digests
from holdfast.checkpoint.saving.finite_check import Inspection
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.lossy_delta import patched
from holdfast.checkpoint.saving.write_plan import Layouts, Planner, record_of
from holdfast.core.errors import CheckpointError, PeerLostError

# How far an image is filled is told after a sixteenth of it, so that the disk begins, and then each time it is twice
# as far: what follows is slower than the copy. Never for less than this.
_FIRST_PART: Final = 1 / 16
_PART_BYTES: Final = 32 << 20

Fill = Callable[[Sequence[tuple[Piece, memoryview]]], None]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is to be committed. The same on every rank, but for `alone` and the parts of what `holding` or `shares` is
    about."""

    name: CheckpointName
    specs: Sequence[TensorSpec]
    read: Callable[[Piece], Buffer]
    state: Any
    data: Any
    alone: Any
    numerics: Mapping[str, Any]
    job_uid: str = ""
    publication: str = ""
    run_id: str = ""
    holding: Holding | None = None
    shares: Shares | None = None
    mesh: Mapping[str, int] | None = None
    created: datetime | None = None
    """When, if not when its manifest is made."""
    fill: Fill | None = None
    """Copies many pieces at once, where that is faster than to read each."""
    inexact: frozenset[str] = frozenset()
    """Of these tensors, with a threshold for deltas, a restored element need only be within it."""
    weights: frozenset[str] = frozenset()
    """The tensors without which there is nothing to train: they must be finite, or the commit fails."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """By object, what tells whether its tensors are alike on all ranks (see `alike`)."""

    def copy(self, places: Sequence[tuple[Piece, memoryview]]) -> None:
        """Put each piece where it belongs."""
        if self.fill is not None:
            self.fill(places)
            return
        for piece, target in places:
            target[:] = memoryview(self.read(piece)).cast("B")


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Whether the commit is durable, and if not, why."""

    committed: bool
    message: str = ""
    cause: str = ""
    """Of one that failed: a word of `failures.FailureCause`."""
    nbytes: int = 0
    """This rank's share."""
    stalled: float = 0.0
    """Until it was copied."""
    seconds: float = 0.0
    """From the end of the copy until it was durable."""
    copying: float = 0.0
    """Of a commit in memory, what it took to send it to another node; 0 if it was not sent."""
    copy_failed: bool = False
    """Of a commit in memory that failed: by its copy on another node."""
    existed: bool = False
    """A commit of this name was there before this one could be."""
    full: bool = False
    """There is no room on the local tier, not even for a first commit."""
    apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The objects that are not the same on all ranks, with the ranks on which they are not as on rank 0."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A snapshot, and this rank's file as it will be, in an arena; after `copy` the live objects are not needed.

    With an `error` it cannot be made, and the save of all ranks fails by it.
    """

    snapshot: Snapshot
    layouts: Layouts
    plan: ShardPlan
    image: memoryview
    error: str = ""
    filling: Filling = field(default_factory=Filling)
    pace: Pace = UNHINDERED

    def copy(self) -> None:
        """Fill the image; who writes it may follow. This is all for which training waits."""
        if self.error:
            return
        try:
            self.image[: len(self.plan.header)] = self.plan.header
            self.image[self.plan.nbytes :] = bytes(self.image.nbytes - self.plan.nbytes)
            for part in self._parts():
                self.snapshot.copy([(piece, self.image[offset:end]) for piece, offset, end in part])
                self.filling.reach(part[-1][2])
        except BaseException as error:
            self.filling.fail(f"the state could not be copied: {error!r}")
            raise
        self.filling.reach(self.image.nbytes)

    def _parts(self) -> Iterator[list[tuple[Piece, int, int]]]:
        """Pieces with their places, each time about as many bytes as before it."""
        least = max(_PART_BYTES, int(self.plan.nbytes * _FIRST_PART))
        part: list[tuple[Piece, int, int]] = []
        for piece, offset in zip(self.plan.pieces, self.plan.offsets, strict=True):
            part.append((piece, offset, offset + piece.nbytes))
            if part[-1][2] >= least:
                yield part
                part, least = [], 2 * part[-1][2]
        if part:
            yield part


def plan(snapshot: Snapshot, arena: Arena | None, planner: Planner, *, rank: int, size: int) -> Staged:
    """Find room for this rank's share, unless whoever saves it copies the live objects; nothing is copied yet."""
    layouts = planner.layouts(snapshot.specs, snapshot.shares or snapshot.holding, size)
    own, image, error = layouts.plan(snapshot.name, rank), memoryview(b""), ""
    try:
        if arena is not None:
            image = arena.image(own.nbytes)
    except (OSError, MemoryError) as trouble:
        error = f"rank {rank}: no memory for a copy of {own.nbytes} bytes: {trouble}"
    return Staged(snapshot=snapshot, layouts=layouts, plan=own, image=image, error=error)


def stage(snapshot: Snapshot, arena: Arena, planner: Planner, *, rank: int, size: int) -> Staged:
    """Copy this rank's share out of the live objects."""
    staged = plan(snapshot, arena, planner, rank=rank, size=size)
    staged.copy()
    return staged


def save(root: Path, snapshot: Snapshot, exchange: Exchange) -> SaveResult:
    """Commit the snapshot; every rank gets the same answer."""
    staged = stage(snapshot, Arena(), Planner(), rank=exchange.rank, size=exchange.size)
    return commit(root, staged, exchange)


def commit(
    root: Path,
    staged: Staged,
    exchange: Exchange,
    *,
    check: Callable[[], None] = lambda: None,
    chain: Chain | None = None,
) -> SaveResult:
    """Commit what is staged; every rank gets the same answer. `check` may raise to give this rank's part up.

    With a `chain`, which all ranks have or none, it may stand on the commits before it.
    """
    own_begun = _begin(root, staged.snapshot.name, chain) if exchange.rank == 0 else None
    try:
        begun = exchange.share(own_begun)
    except PeerLostError:
        if own_begun is not None and "staging" in own_begun:
            discard(root, own_begun["staging"])
        raise
    if begun.get("exists"):
        return SaveResult(committed=True, message="this attempt has committed this step already", existed=True)
    if "error" in begun:
        return SaveResult(committed=False, message=begun["error"], cause=begun["cause"])
    staging, parent = begun["staging"], begun["parent"]
    try:
        own = write_share(root / staging, staged, exchange, check, None if chain is None else _Links(chain, parent))
        written = exchange.gather({**own, "objects": _digests(staged.snapshot, exchange)})
    except PeerLostError:
        if exchange.rank == 0:
            discard(root, staging)
        raise
    ended = exchange.share(_finish(root, staging, staged, written, parent) if exchange.rank == 0 else None)
    if chain is not None and "error" not in ended:
        snapshot = staged.snapshot
        chain.settled(snapshot.name, staged.plan, staged.image, stands=ended["stands"], inexact=snapshot.inexact)
    nbytes = sum(file["bytes"] for name, file in own.get("files", {}).items() if inherited(name) is None)
    return SaveResult(
        committed="error" not in ended,
        message=ended.get("error", ""),
        cause=ended.get("cause", ""),
        existed=ended.get("exists", False),
        nbytes=nbytes,
        apart=apart([part["objects"] for part in written]),
    )


def _digests(snapshot: Snapshot, exchange: Exchange) -> dict[str, str]:
    """A world of one has nobody to compare with; of `shares` ranks may have other objects, and have compared."""
    return {} if exchange.size == 1 or snapshot.shares else digests(snapshot.state, snapshot.samples)


def _begin(root: Path, name: CheckpointName, chain: Chain | None) -> dict[str, Any]:
    try:
        make_folder(root)
        if exists(root, name):
            sync_folder(root)  # this may have failed after the rename
            return {"exists": True}
        if (root / str(name)).exists():
            catalog.quarantine(root, name, "MANIFEST.json is missing")
        parent = None if chain is None else chain.parent(lambda link: exists(root, link))
        return {"staging": begin(root, name), "parent": parent and str(parent)}
    except OSError as error:
        return failed(error, 0)


class _Links(NamedTuple):
    chain: Chain
    parent: str | None


def write_share(
    folder: Path, staged: Staged, exchange: Exchange, check: Callable[[], None], links: _Links | None
) -> dict[str, Any]:
    """What rank 0 must know of this rank's share. Of all of it: its files, and the layout that says the rest."""
    if staged.error:
        return {"error": staged.error, "cause": FailureCause.MEMORY}
    rank, own, alone = exchange.rank, staged.plan, staged.snapshot.alone
    try:
        if links is not None:
            return _write_links(folder, staged, rank, check, links).to_json()
        inspect = Inspection(own, staged.snapshot.weights).update
        files = write_shard(
            folder,
            rank,
            own,
            staged.image,
            alone,
            filling=staged.filling,
            check=check,
            pace=staged.pace,
            inspect=inspect,
        )
    except MemoryError:
        lacks = f"rank {rank}: no memory for what changed since {links and links.parent}"
        return {"error": lacks, "cause": FailureCause.MEMORY}
    except (OSError, CheckpointError) as error:
        return failed(error, rank)
    return {
        "layout": _layout(own),
        "files": {name: record.to_json() for name, record in files.items()},
    }


def _write_links(folder: Path, staged: Staged, rank: int, check: Callable[[], None], links: _Links) -> ShardRecord:
    staged.filling.wait(staged.plan.nbytes, check)
    snapshot, alone = staged.snapshot, links.parent is None
    Inspection(staged.plan, snapshot.weights).update(staged.image[: staged.plan.nbytes])
    share = links.chain.share(snapshot.name, rank, staged.plan, staged.image, alone=alone, inexact=snapshot.inexact)
    written = write_shard(folder, rank, share.plan, share.image, snapshot.alone, check=check, pace=staged.pace)
    return links.chain.record(snapshot.name, share, written)


def _finish(
    root: Path, staging: str, staged: Staged, written: Sequence[dict[str, Any]], parent: str | None
) -> dict[str, Any]:
    troubles: list[Mapping[str, Any]] = [part for part in written if "error" in part]
    try:
        if not troubles:
            manifest = manifest_by(staged, written, parent)
            publish(root, staging, manifest)
            return {"stands": bool(manifest.stands_on)}
    except (OSError, CheckpointError) as error:
        troubles = [failed(error, 0)]
    discard(root, staging)
    taken = exists(root, staged.snapshot.name)
    return {"error": "; ".join(one["error"] for one in troubles), "cause": cause_among(troubles), "exists": taken}


def manifest_by(staged: Staged, written: Sequence[Mapping[str, Any]], parent: str | None) -> Manifest:
    """What a commit says of itself, by what each rank says of its share."""
    snapshot = staged.snapshot
    if not all("layout" in part for part in written):
        return manifest_of(snapshot, [ShardRecord.from_json(part) for part in written], parent)
    plans = [staged.layouts.plan(snapshot.name, rank) for rank in range(len(written))]
    for rank, (own, part) in enumerate(zip(plans, written, strict=True)):
        if part["layout"] != _layout(own):
            raise CheckpointError(f"rank {rank} saves tensors of other names or shapes than rank 0 expects of it")
    files = {name: FileRecord.from_json(record) for part in written for name, record in part["files"].items()}
    return _sealed(snapshot, len(written), files, staged.layouts.records(own.header for own in plans), None)


def _layout(own: ShardPlan) -> str:
    """Which rows of which tensors a file holds where: headers of different rows may be the same."""
    return xxhash.xxh3_128_hexdigest(own.header + repr([piece.start for piece in own.pieces]).encode())


def manifest_of(snapshot: Snapshot, shards: Sequence[ShardRecord], parent: str | None = None) -> Manifest:
    """What a commit of these shards says of itself."""
    exact = records_of(snapshot.specs, [shard.chunks for shard in shards])
    records = patched(exact, [shard.patches for shard in shards])
    return manifest_with(records, snapshot, [shard.files for shard in shards], parent)


def records_of(specs: Sequence[TensorSpec], shards: Sequence[Mapping[str, Sequence[Chunk]]]) -> Records:
    """Where each tensor lies, by what each rank says of its own."""
    return Records(
        (spec.name, record_of(spec, [chunk for chunks in shards for chunk in chunks.get(spec.name, ())]))
        for spec in specs
    )


def manifest_with(
    records: Records, snapshot: Snapshot, shards: Sequence[Mapping[str, FileRecord]], parent: str | None = None
) -> Manifest:
    """What a commit of these files of each rank says of itself, whose tensors lie so."""
    files = {name: record for shard in shards for name, record in shard.items()}
    return _sealed(snapshot, len(shards), files, records, parent)


def _sealed(
    snapshot: Snapshot,
    size: int,
    files: Mapping[str, FileRecord],
    tensors: Records,
    parent: str | None,
) -> Manifest:
    manifest = Manifest(
        step=snapshot.name.step,
        pair=snapshot.name.pair,
        job_uid=snapshot.job_uid,
        publication=snapshot.publication,
        run_id=snapshot.run_id,
        created=(snapshot.created or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        world_size=size,
        mesh=snapshot.mesh or {"data": size},
        tensors=tensors,
        files=files,
        state=snapshot.state,
        data=snapshot.data,
        numerics=snapshot.numerics,
        parent=parent,
    )
    if not manifest.stands_on:
        manifest = replace(manifest, parent=None)  # all has changed: it is a full one
    check(manifest)
    return manifest
