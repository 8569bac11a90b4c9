"""Write one save of all ranks into a shared store: each rank writes its share, and rank 0 publishes. No torch.

If the store fails on any rank, the save fails on all ranks with one message. Earlier checkpoints are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from holdfast.checkpoint.format.coverage import check as check_coverage
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest, stamp
from holdfast.checkpoint.format.records import Chunk, FileRecord, Records
from holdfast.checkpoint.format.shard_layout import ShardPlan, TensorSpec
from holdfast.checkpoint.io.shard import Shard
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import Exchange, gather, share
from holdfast.checkpoint.ranks.replica_check import differing, digests
from holdfast.checkpoint.saving.finite_check import Inspection
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.lossy_delta import patched
from holdfast.checkpoint.saving.planner import Planner, record_of
from holdfast.checkpoint.saving.rank_results import Finished, RankWritten, SaveFailure, SaveStarted
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import Staged, stage
from holdfast.checkpoint.stores.base import ShardWriter, SharedStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.errors import CheckpointError, PeerLostError


def save(root: Path, snapshot: Snapshot, exchange: Exchange) -> SaveResult:
    """Save the snapshot as a checkpoint. Every rank returns the same result."""
    staged = stage(snapshot, Arena(), Planner(), rank=exchange.rank, size=exchange.size)
    return commit(FolderStore(root), staged, exchange)


def commit(
    store: SharedStore,
    staged: Staged,
    exchange: Exchange,
    *,
    check: Callable[[], None] = lambda: None,
    chain: Chain | None = None,
) -> SaveResult:
    """Write and publish what is staged. Every rank returns the same result. `check` may raise to cancel this rank's
    part.

    With a `chain`, the checkpoint may build on earlier ones. Either all ranks have a chain or none.
    """
    snapshot = staged.snapshot
    own_started = _begin(store, snapshot.name, chain) if exchange.rank == 0 else None
    try:
        started = share(exchange, SaveStarted, own_started)
    except PeerLostError:
        if own_started is not None and own_started.staging:
            store.discard(own_started.staging)
        raise
    if started.exists:
        return SaveResult(committed=True, message="this attempt has saved this step already", existed=True)
    if started.trouble:
        return SaveResult(committed=False, message=started.trouble.error, cause=started.trouble.cause)
    try:
        links = None if chain is None else Links(chain=chain, parent=started.parent)
        own = write_share(store.writer(started.staging), staged, exchange.rank, check, links)
        if exchange.size > 1 and not snapshot.shares:  # ranks that may have different objects were compared before
            own = replace(own, objects=digests(snapshot.state, snapshot.samples))
        written = gather(exchange, own)
    except PeerLostError:
        if exchange.rank == 0:
            store.discard(started.staging)
        raise
    own_finished = _finish(store, started, staged, written) if exchange.rank == 0 else None
    finished = share(exchange, Finished, own_finished)
    if chain is not None and not finished.trouble:
        chain.settled(snapshot.name, staged.plan, staged.image, incremental=finished.stands, inexact=snapshot.inexact)
    return SaveResult(
        committed=not finished.trouble,
        message=finished.trouble.error,
        cause=finished.trouble.cause,
        existed=finished.exists,
        nbytes=own.nbytes,
        differing=differing([part.objects for part in written]),
    )


def _begin(store: SharedStore, name: CheckpointName, chain: Chain | None) -> SaveStarted:
    try:
        staging = store.begin(name)
        if not staging:
            return SaveStarted(exists=True)
        return SaveStarted(staging=staging, parent=None if chain is None else chain.parent(store.exists))
    except (OSError, CheckpointError) as error:
        return SaveStarted(trouble=SaveFailure.of(error, 0))


@dataclass(frozen=True, kw_only=True)
class Links:
    """The chain of a save, and its parent checkpoint; None for a full checkpoint."""

    chain: Chain
    parent: CheckpointName | None


def write_share(
    write: ShardWriter, staged: Staged, rank: int, check: Callable[[], None], links: Links | None = None
) -> RankWritten:
    """Write this rank's files. `check` may raise to cancel."""
    if staged.error:
        return RankWritten(trouble=SaveFailure.no_memory(staged.error))
    own, snapshot = staged.plan, staged.snapshot
    try:
        if links is not None:
            return _write_links(write, staged, rank, check, links)
        shard = Shard(
            rank=rank,
            plan=own,
            image=staged.image,
            per_rank=snapshot.per_rank,
            filling=staged.filling,
            check=check,
            pace=staged.pace,
            inspect=Inspection(own, snapshot.weights).update,
        )
        files = write(shard)
    except MemoryError:
        lacks = f"rank {rank}: no memory for the changes since {links and links.parent}"
        return RankWritten(trouble=SaveFailure.no_memory(lacks))
    except (OSError, CheckpointError) as error:
        return RankWritten(trouble=SaveFailure.of(error, rank))
    return RankWritten(files=files, layout=_layout(own))


def _write_links(
    write: ShardWriter, staged: Staged, rank: int, check: Callable[[], None], links: Links
) -> RankWritten:
    staged.filling.wait(staged.plan.nbytes, check)
    snapshot, full = staged.snapshot, links.parent is None
    Inspection(staged.plan, snapshot.weights).update(staged.image[: staged.plan.nbytes])
    part = links.chain.share(snapshot.name, rank, staged.plan, staged.image, full=full, inexact=snapshot.inexact)
    shard = Shard(
        rank=rank, plan=part.plan, image=part.image, per_rank=snapshot.per_rank, check=check, pace=staged.pace
    )
    written = write(shard)
    return links.chain.record(snapshot.name, part, written)


def _finish(store: SharedStore, started: SaveStarted, staged: Staged, written: Sequence[RankWritten]) -> Finished:
    failure = SaveFailure.among(part.trouble for part in written)
    try:
        if not failure:
            manifest = manifest_by(staged, written, started.parent)
            store.publish(started.staging, manifest)
            return Finished(stands=bool(manifest.depends_on))
    except (OSError, CheckpointError) as error:
        failure = SaveFailure.of(error, 0)
    store.discard(started.staging)
    return Finished(exists=_known_to_exist(store, staged.snapshot.name), trouble=failure)


def _known_to_exist(store: SharedStore, name: CheckpointName) -> bool:
    try:
        return store.exists(name)
    except CheckpointError:
        return False  # the store is unavailable, and a later save repeats the question


def manifest_by(staged: Staged, written: Sequence[RankWritten], parent: CheckpointName | None = None) -> Manifest:
    """Return the manifest of a checkpoint, from each rank's report of its share."""
    snapshot = staged.snapshot
    if all(part.layout for part in written):
        plans = [staged.layouts.plan(snapshot.name, rank) for rank in range(len(written))]
        for rank, (own, part) in enumerate(zip(plans, written, strict=True)):
            if part.layout != _layout(own):
                raise CheckpointError(f"rank {rank} saves tensors with other names or shapes than rank 0 expects")
        records = staged.layouts.records(own.header for own in plans)
    else:
        exact = records_of(snapshot.specs, [part.chunks for part in written])
        records = patched(exact, [part.patches for part in written])
    return manifest_with(records, snapshot, [part.files for part in written], parent)


def _layout(own: ShardPlan) -> str:
    """Return a digest of the places of all rows in a file: files with different rows may have the same header."""
    return xxhash.xxh3_128_hexdigest(own.header + repr([piece.start for piece in own.pieces]).encode())


def records_of(specs: Sequence[TensorSpec], shards: Sequence[Mapping[str, Sequence[Chunk]]]) -> Records:
    """Return the places of each tensor, from each rank's report."""
    return Records(
        (spec.name, record_of(spec, [chunk for chunks in shards for chunk in chunks.get(spec.name, ())]))
        for spec in specs
    )


def manifest_with(
    records: Records,
    snapshot: Snapshot,
    shards: Sequence[Mapping[str, FileRecord]],
    parent: CheckpointName | None = None,
) -> Manifest:
    """Return the manifest of a checkpoint with these records, and these files of each rank."""
    manifest = Manifest(
        step=snapshot.name.step,
        attempt_id=snapshot.name.attempt_id,
        job_uid=snapshot.job_uid,
        publication=snapshot.publication,
        run_id=snapshot.run_id,
        created=stamp(snapshot.created),
        world_size=len(shards),
        mesh=snapshot.mesh or {"data": len(shards)},
        tensors=records,
        files={name: record for shard in shards for name, record in shard.items()},
        state=snapshot.state,
        data=snapshot.data,
        numerics=snapshot.numerics,
        parent=None if parent is None else str(parent),
    )
    if not manifest.depends_on:
        manifest = replace(manifest, parent=None)  # everything changed, so this is a full checkpoint
    check_coverage(manifest)
    return manifest
