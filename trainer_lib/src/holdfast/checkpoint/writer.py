"""One save by all ranks: each writes its share, rank 0 publishes. No torch.

A failure of the disk on any rank fails the save on all of them, with one message, and leaves what was committed
before untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.checkpoint import tier
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.commit import ShardRecord, begin, discard, exists, publish, write_shard
from holdfast.checkpoint.exchange import Exchange
from holdfast.checkpoint.files import Buffer
from holdfast.checkpoint.manifest import Chunk, Manifest, TensorRecord, check
from holdfast.checkpoint.names import CommitName
from holdfast.checkpoint.shard import Holding, Layout, Piece, ShardPlan, TensorSpec, divide, held_by, lay_out
from holdfast.errors import PeerLostError

Fill = Callable[[Sequence[tuple[Piece, memoryview]]], None]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is to be committed. The same on every rank, but for `alone` and the rows of what `holding` names."""

    name: CommitName
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
    mesh: Mapping[str, int] | None = None
    fill: Fill | None = None
    """Copies many pieces at once, where that is faster than to read each."""

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
    nbytes: int = 0
    """This rank's share."""
    stalled: float = 0.0
    """Until it was copied."""
    seconds: float = 0.0
    """From the end of the copy until it was durable."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A snapshot that no longer needs the live objects: this rank's file as it will be, in an arena.

    With an `error` it could not be made, and the save of all ranks fails by it.
    """

    snapshot: Snapshot
    plan: ShardPlan
    image: memoryview
    error: str = ""


class Planner:
    """What each rank writes where: computed once while names, shapes and ranks stay the same."""

    def __init__(self) -> None:
        self._key: Any = None
        self._layout: Layout | None = None

    def layout(self, specs: Sequence[TensorSpec], holding: Holding | None, *, rank: int, size: int) -> Layout:
        """One rank's share, and its place in the rank's file."""
        key = (tuple(specs), holding, rank, size)
        if self._layout is None or key != self._key:
            self._key, self._layout = key, lay_out(_share(specs, holding, rank, size))
        return self._layout


def stage(snapshot: Snapshot, arena: Arena, planner: Planner, *, rank: int, size: int) -> Staged:
    """Copy this rank's share out of the live objects; this is all for which training waits."""
    layout = planner.layout(snapshot.specs, snapshot.holding, rank=rank, size=size)
    plan = layout.headed({"format": "pt", "commit": str(snapshot.name), "rank": str(rank)})
    try:
        image = arena.image(plan.nbytes)
    except (OSError, MemoryError) as error:
        message = f"rank {rank}: no memory for a copy of {plan.nbytes} bytes: {error}"
        return Staged(snapshot=snapshot, plan=plan, image=memoryview(b""), error=message)
    head = len(plan.header)
    image[:head] = plan.header
    image[plan.nbytes :] = bytes(image.nbytes - plan.nbytes)
    places = zip(plan.pieces, plan.offsets, strict=True)
    snapshot.copy([(piece, image[offset : offset + piece.nbytes]) for piece, offset in places])
    return Staged(snapshot=snapshot, plan=plan, image=image)


def save(root: Path, snapshot: Snapshot, exchange: Exchange) -> SaveResult:
    """Commit the snapshot; every rank gets the same answer."""
    staged = stage(snapshot, Arena(), Planner(), rank=exchange.rank, size=exchange.size)
    return commit(root, staged, exchange)


def commit(root: Path, staged: Staged, exchange: Exchange, *, check: Callable[[], None] = lambda: None) -> SaveResult:
    """Commit what was staged; every rank gets the same answer. `check` may raise to give this rank's part up."""
    begun = exchange.share(_begin(root, staged.snapshot.name) if exchange.rank == 0 else None)
    if begun.get("exists"):
        return SaveResult(committed=True, message="this attempt has committed this step already")
    if "error" in begun:
        return SaveResult(committed=False, message=begun["error"])
    staging = begun["staging"]
    try:
        written = exchange.gather(_write(root / staging, staged, exchange, check))
    except PeerLostError:
        if exchange.rank == 0:
            discard(root, staging)
        raise
    ended = exchange.share(_finish(root, staging, staged.snapshot, written) if exchange.rank == 0 else None)
    return SaveResult(committed="error" not in ended, message=ended.get("error", ""))


def _begin(root: Path, name: CommitName) -> dict[str, Any]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        if exists(root, name):
            return {"exists": True}
        if (root / str(name)).exists():
            tier.quarantine(root, name, "MANIFEST.json is missing")
        return {"staging": begin(root, name)}
    except OSError as error:
        return {"error": f"rank 0: {error}"}


def _write(folder: Path, staged: Staged, exchange: Exchange, check: Callable[[], None]) -> dict[str, Any]:
    if staged.error:
        return {"error": staged.error}
    alone = staged.snapshot.alone
    try:
        return write_shard(folder, exchange.rank, staged.plan, staged.image, alone, check=check).to_json()
    except OSError as error:
        return {"error": f"rank {exchange.rank}: {error}"}


def _share(specs: Sequence[TensorSpec], holding: Holding | None, rank: int, size: int) -> tuple[Piece, ...]:
    if holding is None:
        return divide(specs, size)[rank]
    whole = [spec for spec in specs if spec.name not in holding.names]
    parts = [spec for spec in specs if spec.name in holding.names]
    return (*divide(whole, size)[rank], *held_by(parts, holding, rank))


def _finish(root: Path, staging: str, snapshot: Snapshot, written: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failed = [part["error"] for part in written if "error" in part]
    try:
        if not failed:
            publish(root, staging, _manifest(snapshot, [ShardRecord.from_json(part) for part in written]))
            return {}
    except OSError as error:
        failed = [f"rank 0: {error}"]
    discard(root, staging)
    return {"error": "; ".join(failed)}


def _manifest(snapshot: Snapshot, shards: Sequence[ShardRecord]) -> Manifest:
    manifest = Manifest(
        step=snapshot.name.step,
        pair=snapshot.name.pair,
        job_uid=snapshot.job_uid,
        publication=snapshot.publication,
        run_id=snapshot.run_id,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        world_size=len(shards),
        mesh=snapshot.mesh or {"data": len(shards)},
        tensors={spec.name: _record(spec, shards) for spec in snapshot.specs},
        files={name: record for shard in shards for name, record in shard.files.items()},
        state=snapshot.state,
        data=snapshot.data,
        numerics=snapshot.numerics,
    )
    check(manifest)
    return manifest


def _record(spec: TensorSpec, shards: Sequence[ShardRecord]) -> TensorRecord:
    chunks = [shard.chunks[spec.name] for shard in shards if spec.name in shard.chunks]
    return TensorRecord(dtype=spec.dtype, shape=spec.shape, chunks=tuple(sorted(chunks, key=_begin_of)))


def _begin_of(chunk: Chunk) -> tuple[int, ...]:
    return chunk.start
