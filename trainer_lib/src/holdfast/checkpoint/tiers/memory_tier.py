"""The memory tier: each rank's part of a commit in its own node's memory, with a copy on another node. No torch.

A commit here is made in three turns, and a rank returns from `save` only after the last:

    staged    every rank's bytes are whole in its slot, and where copies are due, whole in its neighbour's memory
    sealed    every rank made the same manifest of what all told, and put it into its slot and its neighbour's
    known     every rank said so

Invariant: when `save` has returned on any rank, every slot and every copy of the commit is sealed, so the commit
outlives all rank processes, and with copies any one node. Until then the commit before it is whole in another slot
everywhere: nobody begins the next one before all have sealed this one. Where only some commits are copied, the newest
one of these is spared too, in a third slot: it is what is left when a node is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import xxhash

from holdfast.checkpoint.folder.publish import ShardRecord
from holdfast.checkpoint.format.failure_causes import cause_among, failed
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.mapping_order import without_order
from holdfast.checkpoint.format.records import Chunk, FileRecord, Records
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.ranks.exchange import Exchange
from holdfast.checkpoint.saving.protocol import SaveResult, Snapshot, manifest_with, records_of
from holdfast.checkpoint.saving.write_plan import Planner
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.memory import peer_client as peers
from holdfast.checkpoint.stores.memory.peer_client import STREAMS, Copy, Neighbour, Peer, PeerStore, successor
from holdfast.checkpoint.stores.memory.slot_writer import SlotWriter
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.checkpoint.tiers.rank_files import RankFiles
from holdfast.checkpoint.tiers.settings import MemorySettings
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, NoRoomError
from holdfast.core.protocol import LOCAL_TIER, MEMORY_TIER, PEER_TIER

_log = logging.getLogger("holdfast.checkpoint.memory")


def tier_of(url: str) -> str:
    """Which tier a store of a node is, as the rank that read from it sees it."""
    if url.startswith(f"{LOCAL_TIER}:"):
        return LOCAL_TIER
    return PEER_TIER if url.startswith("memory://") else MEMORY_TIER


class MemoryTier:
    """One rank's side of it, in one world after the other."""

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self._owner = ""
        self._slots: SlotSet | None = None
        self._peers: dict[Neighbour, Peer] = {}
        self._target: Neighbour | None = None
        self._exchange: Exchange | None = None
        self._newest: CheckpointName | None = None
        self._copied: CheckpointName | None = None
        self._planner = Planner()
        self._looked = False
        self._made = False
        self._chunks: dict[int, Mapping[str, tuple[Chunk, ...]]] = {}
        self._told: Mapping[str, tuple[Chunk, ...]] | None = None
        self._located: tuple[Sequence[TensorSpec], Records] | None = None

    @property
    def copies(self) -> bool:
        """Whether commits are copied to another node now."""
        return self._target is not None

    def enter(
        self,
        settings: MemorySettings,
        members: frozenset[Neighbour],
        local_rank: int,
        exchange: Exchange,
        check: Callable[[], None],
    ) -> None:
        """Another world has lined up. `check` may raise while a neighbour is waited for."""
        self._exchange, self._settings = exchange, settings
        me = self._settings.me
        for peer in self._peers.values():
            peer.close()
        at_once = settings.in_flight or STREAMS
        self._peers = {one: Peer(one, settings.key, check, at_once) for one in sorted(members - {me})}
        self._target = None if self._settings.peer_interval is None else successor(members, me)
        self._looked, self._chunks, self._told, self._located = False, {}, None, None
        self._newest = self._copied = None
        self._own(f"own-{local_rank}")
        if self._settings.peer_interval is not None and self._target is None and exchange.rank == 0:
            _log.warning(
                "all workers are on node %s: nobody keeps copies of the memory tier on another one, and the loss of "
                "this node loses its commits (elasticity or placement.topologyKey spreads workers over nodes)",
                me.node,
            )

    def stores(self, terms: FencingContext) -> list[CheckpointStore]:
        """This node's memory, then that of the others."""
        there = (PeerStore(peer, terms.jobs) for peer in self._peers.values())
        return [MemoryStore(self._settings.folder, terms.jobs), *there]

    def due_at(self, step: int) -> bool:
        """Whether every rank commits this step here."""
        return step % self._settings.interval == 0

    def restored(self, name: CheckpointName) -> None:
        """Training goes on from this commit: it is overwritten last."""
        self._newest = name

    def save(self, snapshot: Snapshot, terms: FencingContext, *, copy: bool = False) -> SaveResult:
        """Commit; every rank gets the same answer. NoRoomError if there is no room for the very first one: training
        would go on without what it was asked for. `copy`: to the other nodes too, also if that is not due."""
        exchange = self._world()
        self._look(exchange, terms)
        part = RankFiles(snapshot, exchange, self._planner)
        copied = self._copies_at(snapshot.name.step) or (copy and self.copies)
        trouble: Exception | None = None
        record = writer = None
        seconds = 0.0
        try:
            writer, record = self._stage(part)
            if copied:
                seconds = self._copy(part, writer, record)
        except (CheckpointError, OSError) as error:
            trouble = error
        told = exchange.gather(
            {**self._report(record, trouble), "failures": _failures(snapshot), "order": part.order}
        )
        self._note(told)
        troubles = [one for one in told if one["error"]]
        if any(one["full"] for one in told) and not any(one["made"] for one in told):
            raise NoRoomError("; ".join(one["error"] for one in troubles))
        if troubles or writer is None:
            return _not_committed(troubles)
        manifest = self._manifest(snapshot, told)
        troubles = [one for one in exchange.gather(self._seal(part, writer, manifest, copied)) if one]
        if troubles:
            return _not_committed(troubles)
        self._newest, self._made = snapshot.name, True
        self._copied = snapshot.name if copied else self._copied
        return SaveResult(
            committed=True,
            nbytes=0 if record is None else sum(file.nbytes for file in record.files.values()),
            copying=seconds,
        )

    def close(self) -> None:
        """Let another process write these slots."""
        for peer in self._peers.values():
            peer.close()
        if self._slots is not None:
            self._slots.close()
        self._slots, self._owner, self._peers = None, "", {}

    # Inside

    def _world(self) -> Exchange:
        if self._exchange is None:
            raise CheckpointError("no world has lined up yet")
        return self._exchange

    def _own(self, owner: str) -> None:
        if owner != self._owner or self._slots is None:
            if self._slots is not None:
                self._slots.close()
            self._slots = SlotSet(self._settings.folder, owner, limit=self._settings.limit)
            self._owner = owner
        self._slots.count = 2 if self._settings.peer_interval in (None, self._settings.interval) else 3

    @property
    def _keep(self) -> tuple[CheckpointName, ...]:
        return tuple(name for name in (self._newest, self._copied) if name is not None)

    def _copies_at(self, step: int) -> bool:
        every = self._settings.peer_interval
        return self._target is not None and every is not None and step % every == 0

    def _look(self, exchange: Exchange, terms: FencingContext) -> None:
        """Once an attempt: which commits here are the newest that count. All ranks must spare the same ones."""
        if self._looked:
            return
        for peer in self._peers.values():
            peer.close()  # a restore is over: what a connection holds open there keeps its memory, unlinked or not
        claims = exchange.share([claim.to_json() for claim in terms.claims])
        terms = replace(terms, claims=tuple(map(Claim.from_json, claims)))
        told = exchange.gather(self._have(terms))
        commits = [
            fencing.Commit.named(name, job, publication)
            for one in told
            for text, job, publication, _ in one
            if (name := parse_commit(text)) is not None
        ]
        found = fencing.order(commits, terms.claims, job_uid=terms.job_uid, resume=terms.resume)
        names = [one.name for one in found]
        self._newest = self._newest or next(iter(names), None)
        if self._target is not None:  # else none will be that could take its place
            copied = {text for one in told for text, _, _, there in one if there}
            self._copied = next((name for name in names if str(name) in copied), None)
        self._looked = True

    def _have(self, terms: FencingContext) -> list[tuple[str, str, str, bool]]:
        store, found = MemoryStore(self._settings.folder, terms.jobs), []
        copied = frozenset[CheckpointName]() if self._slots is None else self._slots.copied()
        for name in store.commits():
            try:
                manifest = store.manifest(name)
            except CheckpointError:
                continue
            found.append((str(name), manifest.job_uid, manifest.publication, name in copied))
        return found

    def _stage(self, part: RankFiles) -> tuple[SlotWriter, ShardRecord]:
        if self._slots is None:
            raise CheckpointError("no world has lined up yet")
        writer = self._begin(self._slots, part.snapshot, part.room)
        files = part.write(writer)
        writer.stage()
        return writer, ShardRecord(files=files, chunks=part.chunks)

    def _begin(self, slots: SlotSet, snapshot: Snapshot, room: int) -> SlotWriter:
        """Copies that lost neighbours left are the launcher's, which has them open: it is asked to let go of them."""
        name, keep, job, me = snapshot.name, self._keep, snapshot.job_uid, self._settings.me
        try:
            return slots.begin(name, room, keep=keep, job=job)
        except NoRoomError:
            launcher = Peer(me, self._settings.key)
            try:
                promised = peers.make_room(launcher, name, keep)
            except CheckpointError as error:
                _log.debug("the launcher makes no room: %s", error)
                promised = 0
            finally:
                launcher.close()
            return slots.begin(name, room, keep=keep, job=job, promised=promised)

    def _copy(self, part: RankFiles, writer: SlotWriter, record: ShardRecord) -> float:
        """How long it took."""
        began, copy = time.monotonic(), self._outgoing(part, record.files)
        places = [writer.place(file) for file in copy.files]
        peers.send(self._neighbour(), copy, places, per_second=self._settings.per_second)
        return time.monotonic() - began

    def _outgoing(self, part: RankFiles, files: Mapping[str, FileRecord]) -> Copy:
        source = f"{xxhash.xxh3_64_hexdigest(self._settings.me.pod)}-{self._owner}"
        return Copy(
            owner=source,
            job=part.snapshot.job_uid,
            name=part.snapshot.name,
            keep=self._keep,
            files=files,
            room=part.room,
        )

    def _neighbour(self) -> Peer:
        if self._target is None:
            raise CheckpointError("there is no other node")
        return self._peers[self._target]

    def _report(self, record: ShardRecord | None, trouble: Exception | None) -> dict[str, Any]:
        """Where tensors lie seldom changes: that is told when it does."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        said: dict[str, Any] = {"made": self._made, "error": "", "full": isinstance(trouble, NoRoomError)}
        if trouble is not None:
            said |= failed(trouble, self._world().rank) | {"there": record is not None}
        if record is None:
            return said
        same, self._told = record.chunks == self._told, record.chunks
        told = record.to_json()
        return {**said, "created": now, "files": told["files"], "chunks": None if same else told["chunks"]}

    def _note(self, told: Sequence[Mapping[str, Any]]) -> None:
        for rank, one in enumerate(told):
            if one.get("chunks") is not None:
                told_of = one["chunks"].items()
                self._chunks[rank] = {name: tuple(map(Chunk.from_json, chunks)) for name, chunks in told_of}
                self._located = None

    def _manifest(self, snapshot: Snapshot, told: Sequence[Mapping[str, Any]]) -> Manifest:
        files = [{name: FileRecord.from_json(record) for name, record in one["files"].items()} for one in told]
        if told[0]["failures"] is not None:  # each rank counts them by its own clock; the manifest is the same on all
            snapshot = replace(snapshot, state={**snapshot.state, "failures": told[0]["failures"]})
        if len({one["order"] for one in told}) > 1:  # mappings that ranks filled in other orders keep none
            snapshot = replace(snapshot, state=without_order(snapshot.state))
        records = self._records(snapshot.specs, len(told))
        return replace(manifest_with(records, snapshot, files), created=str(told[0]["created"]))

    def _records(self, specs: Sequence[TensorSpec], size: int) -> Records:
        """Where tensors lie, put together again only when that has changed."""
        if self._located is None or list(self._located[0]) != list(specs):
            self._located = specs, records_of(specs, [self._chunks[rank] for rank in range(size)])
        return self._located[1]

    def _seal(self, part: RankFiles, writer: SlotWriter, manifest: Manifest, copied: bool) -> dict[str, Any]:
        there = False
        try:
            writer.seal(manifest, copied=copied)
            there = copied
            if copied:
                peers.seal(self._neighbour(), self._outgoing(part, {}), manifest)
        except (CheckpointError, OSError) as error:
            return {**failed(error, self._world().rank), "there": there}
        return {}


def _not_committed(troubles: Sequence[Mapping[str, Any]]) -> SaveResult:
    """`there`: the rank's part is in its own memory, and it is the copy on another node that failed."""
    return SaveResult(
        committed=False,
        message="; ".join(one["error"] for one in troubles),
        cause=cause_among(troubles),
        copy_failed=bool(troubles) and bool(troubles[0]["there"]),
    )


def _failures(snapshot: Snapshot) -> Any:
    return snapshot.state.get("failures") if isinstance(snapshot.state, dict) else None
