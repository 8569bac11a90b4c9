"""The memory tier: each rank's part of a checkpoint in its node's memory, with a copy on another node. No torch.

A save has three phases, and a rank returns from `save` only after the last one:

    staged    every rank's bytes are complete in its slot and, if copies are due, in its neighbour's memory
    sealed    every rank created the same manifest from all reports, and wrote it into its slot and its neighbour's
    known     every rank reported this

Invariant: when `save` has returned on any rank, every slot and every copy of the checkpoint is sealed. The checkpoint
then survives the loss of all rank processes, and, with copies, of any one node. Until then, the previous checkpoint
is complete in another slot on every node: no rank begins the next save before all have sealed this one. If only some
checkpoints are copied, the newest copied one is also kept, in a third slot. It remains if a node is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, stamp
from holdfast.checkpoint.format.mapping_order import without_order
from holdfast.checkpoint.format.records import Chunk, FileRecord, Records
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.rate_limit import UNLIMITED, Pace
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.ranks.exchange import Exchange, gather
from holdfast.checkpoint.saving.rank_results import RankWritten, SaveFailure
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import Staged
from holdfast.checkpoint.saving.writer import manifest_with, records_of
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.memory import peer_client as peers
from holdfast.checkpoint.stores.memory.peer_client import STREAMS, Copy, Neighbour, Peer, PeerStore, successor
from holdfast.checkpoint.stores.memory.slot_writer import SlotWriter
from holdfast.checkpoint.stores.memory.slots import SlotSet
from holdfast.checkpoint.stores.memory.store import MemoryStore
from holdfast.checkpoint.tiers.rank_files import RankFiles
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.checkpoint.tiers.tier import TierWorld
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, NoCapacityError
from holdfast.core.json_fields import JsonFields
from holdfast.core.protocol import MEMORY_TIER, PEER_TIER

_log = logging.getLogger("holdfast.checkpoint.memory")


@dataclass(frozen=True, kw_only=True)
class MemorySaveFailure(SaveFailure):
    """Why a rank's part was not saved. `there`: its own memory has the part, and the copy on another node failed."""

    full: bool = False
    there: bool = False

    @classmethod
    def at(cls, error: Exception | None, rank: int, *, there: bool) -> MemorySaveFailure:
        if error is None:
            return cls()
        return cls(**vars(SaveFailure.of(error, rank)), full=isinstance(error, NoCapacityError), there=there)


@dataclass(frozen=True, kw_only=True)
class MemoryReport(JsonFields):
    """One rank's report about its part. `made`: an earlier checkpoint of this process is complete."""

    made: bool
    trouble: MemorySaveFailure
    failures: Any
    order: str
    created: str = ""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    chunks: Mapping[str, tuple[Chunk, ...]] | None = None


class MemoryTier:
    """One rank's part of the memory tier (`Tier`)."""

    name = MEMORY_TIER
    in_background = False

    def __init__(self) -> None:
        self._settings: TierSettings
        self._owner = ""
        self._slots: SlotSet | None = None
        self._peers: dict[Neighbour, Peer] = {}
        self._target: Neighbour | None = None
        self._newest: CheckpointName | None = None
        self._copied: CheckpointName | None = None
        self._searched = False
        self._made = False
        self._chunks: dict[int, Mapping[str, tuple[Chunk, ...]]] = {}
        self._reported: Mapping[str, tuple[Chunk, ...]] | None = None
        self._located: tuple[Sequence[TensorSpec], Records] | None = None

    def enter(self, world: TierWorld) -> None:
        self._settings = settings = world.settings
        for peer in self._peers.values():
            peer.close()
        streams, others = settings.in_flight or STREAMS, sorted(world.neighbours - {settings.me})
        self._peers = {one: Peer(one, settings.key, world.check, streams) for one in others}
        self._target = None if settings.peer_interval is None else successor(world.neighbours, settings.me)
        self._searched, self._chunks, self._reported, self._located = False, {}, None, None
        self._newest = self._copied = None
        self._own(f"own-{world.local_rank}")
        if settings.peer_interval is not None and self._target is None and world.exchange.rank == 0:
            _log.warning(
                "all workers are on node %s: the memory tier has no copies on another node, and the loss "
                "of this node loses its checkpoints (elasticity or placement.topologyKey spreads workers "
                "over nodes)",
                settings.me.node,
            )

    def stores(self, context: FencingContext) -> list[CheckpointStore]:
        """Return this node's memory, and then that of the other nodes."""
        others = (PeerStore(peer, context.jobs) for peer in self._peers.values())
        return [MemoryStore(self._settings.folder, context.jobs), *others]

    def reported_as(self, url: str) -> str:
        """Return the name of the memory tier for this node, and of the peer tier for other nodes."""
        if url.startswith(f"{MEMORY_TIER}://"):
            return PEER_TIER
        return MEMORY_TIER if url.startswith(f"{MEMORY_TIER}:") else ""

    def due_at(self, step: int) -> bool:
        return step % self._settings.interval == 0

    def pace(self) -> Pace:
        return UNLIMITED

    def restored(self, name: CheckpointName) -> None:
        """Record that training continues from this checkpoint, which is overwritten last."""
        self._newest = name

    def save(
        self,
        staged: Staged,
        exchange: Exchange,
        context: FencingContext,
        *,
        check: Callable[[], None] = lambda: None,
        requested: bool = False,
    ) -> SaveResult:
        """Save the checkpoint. Every rank returns the same result.

        The result is `full` if there is no capacity even for the first checkpoint.
        """
        self._find_newest(exchange, context)
        snapshot, part = staged.snapshot, RankFiles(staged, exchange)
        every = self._settings.peer_interval
        copied = self._target is not None and (requested or (every is not None and snapshot.name.step % every == 0))
        failure: Exception | None = None
        record = writer = None
        seconds = 0.0
        try:
            writer, record = self._stage(part)
            if copied:
                seconds = self._copy(part, writer, record)
        except (CheckpointError, OSError) as error:
            failure = error
        reports = gather(exchange, self._report(part, record, failure, exchange.rank))
        for rank, one in enumerate(reports):
            if one.chunks is not None:
                self._chunks[rank], self._located = one.chunks, None
        if any(one.trouble for one in reports) or writer is None:
            return _not_committed([one.trouble for one in reports], made=any(one.made for one in reports))
        manifest = self._manifest(snapshot, reports)
        failures = gather(exchange, self._seal(part, writer, manifest, copied, exchange.rank))
        if any(failures):
            return _not_committed(failures, made=True)
        self._newest, self._made = snapshot.name, True
        self._copied = snapshot.name if copied else self._copied
        return SaveResult(committed=True, nbytes=0 if record is None else record.nbytes, copying=seconds)

    def close(self) -> None:
        """Release the slots for another process."""
        for peer in self._peers.values():
            peer.close()
        if self._slots is not None:
            self._slots.close()
        self._slots, self._owner, self._peers, self._made = None, "", {}, False

    # Internal

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

    def _find_newest(self, exchange: Exchange, context: FencingContext) -> None:
        """Once per attempt, find the newest checkpoints here that count, so that all ranks keep the same ones."""
        if self._searched:
            return
        for peer in self._peers.values():
            peer.close()  # the restore is over, and open connections keep memory even if it is unlinked
        claims = exchange.share([claim.to_json() for claim in context.claims])
        context = replace(context, claims=tuple(map(Claim.from_json, claims)))
        held = exchange.gather(self._held(context))
        commits = [
            fencing.Commit.named(name, job, publication)
            for one in held
            for text, job, publication, _ in one
            if (name := parse_commit(text)) is not None
        ]
        found = fencing.order(commits, context.claims, job_uid=context.job_uid, resume=context.resume)
        names = [one.name for one in found]
        self._newest = self._newest or next(iter(names), None)
        if self._target is not None:  # otherwise no newer copied checkpoint would replace it
            copied = {text for one in held for text, _, _, there in one if there}
            self._copied = next((name for name in names if str(name) in copied), None)
        self._searched = True

    def _held(self, context: FencingContext) -> list[tuple[str, str, str, bool]]:
        store, found = MemoryStore(self._settings.folder, context.jobs), []
        copied = frozenset[CheckpointName]() if self._slots is None else self._slots.copied()
        for name in store.commits():
            try:
                manifest = store.manifest(name)
            except CheckpointError:
                continue
            found.append((str(name), manifest.job_uid, manifest.publication, name in copied))
        return found

    def _stage(self, part: RankFiles) -> tuple[SlotWriter, RankWritten]:
        if self._slots is None:
            raise CheckpointError("no world has formed yet")
        writer = self._begin(self._slots, part.snapshot, part.room)
        files = part.write(writer)
        writer.stage()
        return writer, RankWritten(files=files, chunks=part.chunks)

    def _begin(self, slots: SlotSet, snapshot: Snapshot, space: int) -> SlotWriter:
        """Begin a slot. If there is no capacity, request the launcher to free copies of lost neighbours, which it has
        open.
        """
        name, keep, job, me = snapshot.name, self._keep, snapshot.job_uid, self._settings.me
        try:
            return slots.begin(name, space, keep=keep, job=job)
        except NoCapacityError:
            launcher = Peer(me, self._settings.key)
            try:
                freed_later = peers.free_space(launcher, name, keep)
            except CheckpointError as error:
                _log.debug("the launcher frees no memory: %s", error)
                freed_later = 0
            finally:
                launcher.close()
            return slots.begin(name, space, keep=keep, job=job, freed_later=freed_later)

    def _copy(self, part: RankFiles, writer: SlotWriter, record: RankWritten) -> float:
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

    def _report(
        self, part: RankFiles, record: RankWritten | None, failure: Exception | None, rank: int
    ) -> MemoryReport:
        """Return this rank's report. It includes the places of tensors only when they have changed."""
        state = part.snapshot.state
        report = MemoryReport(
            made=self._made,
            trouble=MemorySaveFailure.at(failure, rank, there=record is not None),
            failures=state.get("failures") if isinstance(state, dict) else None,
            order=part.order,
        )
        if record is None:
            return report
        same, self._reported = record.chunks == self._reported, record.chunks
        return replace(report, created=stamp(), files=record.files, chunks=None if same else record.chunks)

    def _manifest(self, snapshot: Snapshot, reports: Sequence[MemoryReport]) -> Manifest:
        first = reports[0]
        if first.failures is not None:  # each rank counts by its own clock, but the manifest must be the same on all
            snapshot = replace(snapshot, state={**snapshot.state, "failures": first.failures})
        if len({one.order for one in reports}) > 1:  # if ranks filled mappings in different orders, none is kept
            snapshot = replace(snapshot, state=without_order(snapshot.state))
        records = self._records(snapshot.specs, len(reports))
        return replace(manifest_with(records, snapshot, [one.files for one in reports]), created=first.created)

    def _records(self, specs: Sequence[TensorSpec], size: int) -> Records:
        """Return the places of tensors, computed again only after a change."""
        if self._located is None or list(self._located[0]) != list(specs):
            self._located = specs, records_of(specs, [self._chunks[rank] for rank in range(size)])
        return self._located[1]

    def _seal(
        self, part: RankFiles, writer: SlotWriter, manifest: Manifest, copied: bool, rank: int
    ) -> MemorySaveFailure:
        there = False
        try:
            writer.seal(manifest, copied=copied)
            there = copied
            if copied:
                peers.seal(self._neighbour(), self._outgoing(part, {}), manifest)
        except (CheckpointError, OSError) as error:
            return MemorySaveFailure.at(error, rank, there=there)
        return MemorySaveFailure()


def _not_committed(failures: Sequence[MemorySaveFailure], *, made: bool) -> SaveResult:
    """Return the failed result.

    With `made`, an earlier checkpoint is complete, so a lack of capacity is not fatal.
    """
    failure, first = SaveFailure.among(failures), next((one for one in failures if one), MemorySaveFailure())
    return SaveResult(
        committed=False,
        message=failure.error,
        cause=failure.cause,
        copy_failed=first.there,
        full=not made and any(one.full for one in failures),
    )
