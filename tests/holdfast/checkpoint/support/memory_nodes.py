"""Nodes with one launcher and one rank each, which save in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from tier_ranks import TierRank

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour, Peer, PeerStore
from holdfast.checkpoint.stores.memory.peer_server import PeerServer
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.checkpoint.tiers.memory_tier import MemoryTier
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.core.attempt import AttemptId
from holdfast.core.errors import CorruptCheckpointError

KEY = b"k" * 32


FIRST = AttemptId(1, 1)


TERMS = FencingContext(claims=(), job_uid="job", resume=Resume.ALWAYS)


def tensors(step: int) -> dict[str, bytes]:
    return {"large": bytes([step]) * (3 << 20), "small": b"s" * (step + 1)}


def snapshot_of(step: int, rank: int, attempt_id: AttemptId = FIRST) -> Snapshot:
    data = tensors(step)
    return Snapshot(
        name=CheckpointName(step=step, attempt_id=attempt_id),
        specs=[TensorSpec(name=name, dtype="U8", shape=(len(one),)) for name, one in data.items()],
        read=lambda piece: data[piece.spec.name][piece.start[0] : piece.start[0] + piece.shape[0]],
        state={"objects": {}, "counters": {}},
        data=None,
        per_rank={"rank": rank},
        numerics={},
        job_uid="job",
        publication="p",
    )


class Nodes:
    """One launcher and one rank per node."""

    def __init__(self, root: Path, names: str, **settings: Any) -> None:
        self.names = names
        self.tiers: dict[str, TierRank] = {}
        self.folders = {name: root / name for name in names}
        for folder in self.folders.values():
            folder.mkdir()
        self.servers = {
            name: PeerServer(self.folders[name], host="127.0.0.1", limit=settings.get("limit")) for name in names
        }
        for server in self.servers.values():
            server.key = KEY
        self.at = {
            name: Neighbour(node=name, pod=name, host="127.0.0.1", port=self.servers[name].port) for name in names
        }
        given = {"limit": None, "interval": 1, "peer_interval": 1, "per_second": None, **settings}
        self.settings = {
            name: TierSettings(folder=self.folders[name], me=self.at[name], key=KEY, **given) for name in names
        }

    def tier(self, exchange: Any, check: Callable[[], None] = lambda: None) -> TierRank:
        """Return the tier of a restarted rank. The previous process is gone."""
        name = self.names[exchange.rank]
        if name in self.tiers:
            self.tiers[name].close()
        neighbours = frozenset(self.at.values())
        tier = TierRank(MemoryTier(), self.settings[name], exchange, neighbours=neighbours, check=check)
        self.tiers[name] = tier
        return tier

    def move(self, name: str, port: int) -> None:
        """Serve the memory of the node at another address."""
        self.at[name] = replace(self.at[name], port=port)
        self.settings[name] = replace(self.settings[name], me=self.at[name])

    def lose(self, name: str) -> None:
        self.servers.pop(name).close()
        shutil.rmtree(self.folders.pop(name))

    def stores(self, at: str) -> list[CheckpointStore]:
        """Return the stores as a rank on the node has them."""
        others = [PeerStore(Peer(self.at[name], KEY)) for name in self.servers if name != at]
        return [MemoryStore(self.folders[at]), *others]

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def read(stores: list[CheckpointStore], name: CheckpointName) -> dict[str, bytes]:
    """Read the complete state from any store, and compare each chunk with the manifest."""
    manifest = next(store.manifest(name) for store in stores if name in store.commits())
    files = {file: fetch(stores, manifest, name, file) for file in manifest.files}
    return {
        tensor: b"".join(files[c.file][c.offset : c.offset + c.nbytes] for c in sorted(record.chunks, key=str))
        for tensor, record in manifest.tensors.items()
    }


def fetch(stores: list[CheckpointStore], manifest: Manifest, name: CheckpointName, file: str) -> bytes:
    for store in stores:
        try:
            with store.open(name, file) as source:
                data = bytearray(source.nbytes)
                source.read_into(0, memoryview(data))
        except CorruptCheckpointError:
            continue
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        assert tuple(map(xxhash.xxh3_128_hexdigest, chunks)) == manifest.files[file].chunks
        return bytes(data)
    raise AssertionError(f"{file} is nowhere")


def saves(tier: TierRank, rank: int, *steps: int) -> list[SaveResult]:
    return [tier.save(snapshot_of(step, rank), TERMS) for step in steps]
