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
from holdfast.checkpoint.commit import ShardRecord, begin, discard, exists, publish, write_shard
from holdfast.checkpoint.exchange import Exchange
from holdfast.checkpoint.files import Buffer
from holdfast.checkpoint.manifest import Chunk, Manifest, TensorRecord, check
from holdfast.checkpoint.names import CommitName
from holdfast.checkpoint.shard import Holding, Piece, TensorSpec, divide, held_by, plan_shard


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


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Whether the commit is durable, and if not, why."""

    committed: bool
    message: str = ""


def save(root: Path, snapshot: Snapshot, exchange: Exchange) -> SaveResult:
    """Commit the snapshot; every rank gets the same answer."""
    begun = exchange.share(_begin(root, snapshot.name) if exchange.rank == 0 else None)
    if begun.get("exists"):
        return SaveResult(committed=True, message="this attempt has committed this step already")
    if "error" in begun:
        return SaveResult(committed=False, message=begun["error"])
    staging = begun["staging"]
    written = exchange.gather(_write(root / staging, snapshot, exchange))
    ended = exchange.share(_finish(root, staging, snapshot, written) if exchange.rank == 0 else None)
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


def _write(folder: Path, snapshot: Snapshot, exchange: Exchange) -> dict[str, Any]:
    share = _share(snapshot, exchange)
    plan = plan_shard(share, metadata={"format": "pt", "commit": str(snapshot.name), "rank": str(exchange.rank)})
    try:
        data = (snapshot.read(piece) for piece in plan.pieces)
        return write_shard(folder, exchange.rank, plan, data, snapshot.alone).to_json()
    except OSError as error:
        return {"error": f"rank {exchange.rank}: {error}"}


def _share(snapshot: Snapshot, exchange: Exchange) -> tuple[Piece, ...]:
    holding = snapshot.holding
    if holding is None:
        return divide(snapshot.specs, exchange.size)[exchange.rank]
    whole = [spec for spec in snapshot.specs if spec.name not in holding.names]
    parts = [spec for spec in snapshot.specs if spec.name in holding.names]
    return (*divide(whole, exchange.size)[exchange.rank], *held_by(parts, holding, exchange.rank))


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
        mesh={"data": len(shards)},
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
