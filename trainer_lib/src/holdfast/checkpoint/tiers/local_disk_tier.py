"""The local tier: each rank's part of a checkpoint on its own node's disk, written during training. No torch.

A save has three phases on a separate thread, and uses the same image as a save on the shared tier:

    agreed    rank 0 received what every node has, and decided which checkpoint stays and whether a new one fits
    written   every rank's files are fsynced, and rank 0 created the manifest of all of them
    known     every rank published its files with that manifest, and reported it

Invariant: the newest checkpoint with every file on some node is not deleted before all ranks know that a newer one is
published. After a crash at any time, one complete checkpoint is therefore left, if no disk is lost. A rank's part is
only on its own node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

from holdfast.checkpoint.folder.catalog import read_manifest
from holdfast.checkpoint.folder.publish import begin, discard, publish, write_shard
from holdfast.checkpoint.format.failure_causes import FailureCause, cause_of
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import LARGEST, decode, encode
from holdfast.checkpoint.io.durable_files import encode_json, make_folder, sync_folder
from holdfast.checkpoint.io.rate_limit import WRITERS, Pace
from holdfast.checkpoint.io.slice_digests import LEAST_BYTES
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.ranks.exchange import Exchange, gather, share
from holdfast.checkpoint.saving.rank_results import NONE, RankWritten, SaveFailure
from holdfast.checkpoint.saving.snapshot import SaveResult
from holdfast.checkpoint.saving.stager import Staged
from holdfast.checkpoint.saving.writer import manifest_by, write_share
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.local_disk import LocalStore, own_folder, own_folders
from holdfast.checkpoint.stores.memory.peer_client import Peer, PeerStore
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.checkpoint.tiers.tier import TierWorld
from holdfast.core.errors import CheckpointError
from holdfast.core.json_fields import JsonFields
from holdfast.core.protocol import LOCAL_TIER
from holdfast.core.settings import format_size

_log = logging.getLogger("holdfast.checkpoint.local")

# What a part needs in addition to tensors and per-rank state: digests of slices, and blocks of small files.
_EXTRA_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HeldFiles(JsonFields):
    """What one node's ranks have of a checkpoint: its owner, the names of all its files, and those on this node."""

    job_uid: str
    publication: str
    files: frozenset[str]
    here: frozenset[str]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class LocalDiskReport(JsonFields):
    """One rank's report before a save: the checkpoints on its node, and the bytes that its part needs."""

    rank: int
    pod: str
    need: int
    limit: int | None
    held: Mapping[CheckpointName, HeldFiles] = field(default_factory=dict)
    error: str = ""
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision(JsonFields):
    """The checkpoint that every rank keeps, and the reason if no new one is saved."""

    keep: CheckpointName | None
    error: str = ""
    cause: str = ""
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class ManifestResult(JsonFields):
    """The manifest that rank 0 created, or the reason why there is none. `full`: some node's disk is full."""

    manifest: str = ""
    full: bool = False
    trouble: SaveFailure = NONE


def decide(reports: Sequence[LocalDiskReport], context: FencingContext) -> Decision:
    """Keep the newest checkpoint that counts and has every file on some node.

    Reject a save that does not fit with it.
    """
    keep = _newest(reports, context)
    failures = [one for one in reports if one.error]
    if failures:
        text = "; ".join(f"rank {one.rank}: {one.error}" for one in failures)
        return Decision(keep=keep, error=text, cause=failures[0].cause)
    pods = [[one for one in reports if one.pod == pod] for pod in sorted({one.pod for one in reports})]
    lacks = [lack for pod in pods if (lack := _lacks(pod, keep))]
    cause = FailureCause.FULL if lacks else ""
    return Decision(keep=keep, error="; ".join(lacks), cause=cause, full=bool(lacks) and keep is None)


def _newest(reports: Sequence[LocalDiskReport], context: FencingContext) -> CheckpointName | None:
    held: dict[CheckpointName, list[HeldFiles]] = {}
    for one in reports:
        for name, here in one.held.items():
            held.setdefault(name, []).append(here)
    commits = [
        fencing.Commit.named(name, ones[0].job_uid, ones[0].publication)
        for name, ones in held.items()
        if ones[0].files <= frozenset[str]().union(*(one.here for one in ones))
    ]
    found = fencing.order(commits, context.claims, job_uid=context.job_uid, resume=context.resume)
    return next((one.name for one in found), None)


def _lacks(pod: Sequence[LocalDiskReport], keep: CheckpointName | None) -> str:
    """Explain why the ranks of one pod cannot save. The smallest sufficient limit holds two parts of each rank."""
    need, limit = sum(one.need for one in pod), pod[0].limit
    held = None if keep is None else pod[0].held.get(keep)
    used = 0 if held is None else held.nbytes
    # Checked from the first save on: a volume with the capacity of one part would never get a second checkpoint.
    if limit is None or max(need, used) + need <= limit:
        return ""
    return (
        f"the local tier is too small: {len(pod)} ranks of pod {pod[0].pod} need "
        f"{format_size(max(need, used) + need)} for two parts of each, and it has {format_size(limit)}: "
        "raise checkpoint.local.sizeLimit (or --local-tier PATH:SIZE)"
    )


class LocalTier:
    """One rank's part of the local tier (`Tier`)."""

    name = LOCAL_TIER
    in_background = True

    def __init__(self) -> None:
        self._settings: TierSettings
        self._local_rank = 0
        self._peers: list[Peer] = []
        self._known: dict[Path, HeldFiles] = {}

    def enter(self, world: TierWorld) -> None:
        self.close()
        self._settings, self._local_rank = world.settings, world.local_rank
        others = sorted(world.neighbours - {world.settings.me})
        self._peers = [Peer(one, world.settings.key, world.check) for one in others]
        self._known = {}

    def pace(self) -> Pace:
        """Return the rate and the number of writers for this rank's next part."""
        return Pace(self._settings.per_second, self._settings.in_flight or WRITERS)

    def due_at(self, step: int) -> bool:
        """Return whether every rank saves this step here, or the first possible one after it."""
        return step % self._settings.interval == 0

    def stores(self, context: FencingContext) -> list[CheckpointStore]:
        """Return this node's disk, and then those of the other nodes."""
        others = (PeerStore(peer, context.jobs, tier=LOCAL_TIER) for peer in self._peers)
        return [LocalStore(self._settings.folder, context.jobs), *others]

    def reported_as(self, url: str) -> str:
        """Return the tier's name for the disk of any node."""
        return LOCAL_TIER if url.startswith(f"{LOCAL_TIER}:") else ""

    def restored(self, name: CheckpointName) -> None:
        """Do nothing: each save determines which checkpoint stays."""

    def close(self) -> None:
        """Close the connections, because open files keep their disk space even if they are removed."""
        for peer in self._peers:
            peer.close()

    def save(
        self,
        staged: Staged,
        exchange: Exchange,
        context: FencingContext,
        *,
        check: Callable[[], None] = lambda: None,
        requested: bool = False,
    ) -> SaveResult:
        """Save what is staged. Every rank returns the same result. `check` may raise to cancel this rank's part."""
        name = staged.snapshot.name
        self.close()
        decision = self._agree(staged, exchange, context)
        if decision.error:
            return SaveResult(committed=False, message=decision.error, cause=decision.cause, full=decision.full)
        part = _StagedRank(own_folder(self._settings.folder, staged.snapshot.job_uid, self._local_rank), name)
        try:
            self._prune(decision.keep, name)
            own = part.write(staged, exchange.rank, check)
            written = gather(exchange, own)
            sealed = share(
                exchange, ManifestResult, _manifest_result(staged, written) if exchange.rank == 0 else None
            )
            failure = sealed.trouble
            if not failure:
                failure = SaveFailure.among(gather(exchange, part.publish(sealed.manifest, exchange.rank)))
        except BaseException:
            part.discard()
            raise
        if failure:
            part.discard()
            full = sealed.full and decision.keep is None
            return SaveResult(committed=False, message=failure.error, cause=failure.cause, full=full)
        self._prune(name, name)
        return SaveResult(committed=True, nbytes=own.nbytes)

    # Internal

    def _agree(self, staged: Staged, exchange: Exchange, context: FencingContext) -> Decision:
        reports = gather(exchange, self._report(staged, exchange.rank, context))
        return share(exchange, Decision, decide(reports, context) if exchange.rank == 0 else None)

    def _report(self, staged: Staged, rank: int, context: FencingContext) -> LocalDiskReport:
        need = staged.plan.nbytes + len(encode_json(staged.snapshot.per_rank)) + _extra_bytes(staged)
        error, cause = staged.error, FailureCause.MEMORY if staged.error else ""
        held: dict[CheckpointName, HeldFiles] = {}
        try:
            held = self._held(context)
        except OSError as failure:
            error, cause = (error, cause) if error else (str(failure), cause_of(failure))
        me, limit = self._settings.me, self._settings.limit
        return LocalDiskReport(rank=rank, pod=me.pod, need=need, limit=limit, held=held, error=error, cause=cause)

    def _held(self, context: FencingContext) -> dict[CheckpointName, HeldFiles]:
        """Return all checkpoints of this node. Each manifest is read once."""
        found: dict[CheckpointName, HeldFiles] = {}
        known, self._known = self._known, {}
        for path in _commits(own_folders(self._settings.folder, context.jobs)):
            name = parse_commit(path.name)
            here = known.get(path) or _read_held(path)
            if here is None or name is None or name.staging:
                continue
            self._known[path] = here
            other = found.get(name)
            found[name] = here if other is None else _merged(here, other)
        return found

    def _prune(self, keep: CheckpointName | None, making: CheckpointName) -> None:
        """Delete everything on this node except `keep` and the checkpoint being saved.

        Ranks may do so concurrently.
        """
        for path in _commits(own_folders(self._settings.folder)):
            name = parse_commit(path.name)
            same = None if name is None else CheckpointName(step=name.step, attempt_id=name.attempt_id)
            if same != making and (name is None or name != keep):
                _remove(path)


class _StagedRank:
    """One rank's files of a checkpoint that is being written."""

    def __init__(self, root: Path, name: CheckpointName) -> None:
        self._root = root
        self._name = name
        self._staging = ""

    def write(self, staged: Staged, rank: int, check: Callable[[], None]) -> RankWritten:
        """Write the files, and return rank 0's data about them."""
        try:
            make_folder(self._root, mode=0o700)
            _remove(self._root / str(self._name))  # of a checkpoint that not all ranks know
            self._staging = begin(self._root, self._name)
            return write_share(partial(write_shard, self._root / self._staging), staged, rank, check)
        except OSError as error:
            return RankWritten(trouble=SaveFailure.of(error, rank))

    def publish(self, manifest: str, rank: int) -> SaveFailure:
        try:
            publish(self._root, self._staging, decode(manifest.encode()))
        except (OSError, CheckpointError) as error:
            return SaveFailure.of(error, rank)
        return NONE

    def discard(self) -> None:
        """Remove unpublished files. Published ones stay until the next save prunes them."""
        if self._staging:
            discard(self._root, self._staging)


def _manifest_result(staged: Staged, written: Sequence[RankWritten]) -> ManifestResult:
    """Return the manifest of all ranks' files, or the reason why there is none."""
    failure = SaveFailure.among(part.trouble for part in written)
    if any(part.trouble.cause == FailureCause.FULL for part in written):
        advice = ": free space on the node's disk, or leave checkpoint.local (--local-tier) out"
        return ManifestResult(trouble=replace(failure, error=failure.error + advice), full=True)
    try:
        if not failure:
            raw = encode(manifest_by(staged, written))
            if len(raw) > LARGEST:
                raise CheckpointError(f"a manifest of {len(raw)} bytes is more than the limit of {LARGEST}")
            return ManifestResult(manifest=raw.decode())
    except CheckpointError as error:
        failure = SaveFailure.of(error, 0)
    return ManifestResult(trouble=failure)


def _extra_bytes(staged: Staged) -> int:
    """Return the bytes in addition to the tensors: the manifest of all ranks, and the digests of slices."""
    specs = staged.snapshot.specs
    slices = staged.plan.nbytes // 512 if staged.plan.nbytes >= LEAST_BYTES else 0
    return _EXTRA_BYTES + slices + sum(512 + len(spec.name) for spec in specs)


def _commits(folders: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += sorted(folder.iterdir())
    return found


def _read_held(path: Path) -> HeldFiles | None:
    """Return the content of a checkpoint's folder, if its manifest is valid."""
    name = parse_commit(path.name)
    if name is None or name.staging:
        return None
    try:
        manifest = read_manifest(path.parent, name)
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    except CheckpointError:
        return None
    except OSError:
        return None  # another rank of this node is removing it
    here = {file for file, record in manifest.files.items() if sizes.get(file) == record.nbytes}
    return HeldFiles(
        job_uid=manifest.job_uid,
        publication=manifest.publication,
        files=frozenset(manifest.files),
        here=frozenset(here),
        nbytes=sum(sizes.values()),
    )


def _merged(one: HeldFiles, other: HeldFiles) -> HeldFiles:
    return HeldFiles(
        job_uid=one.job_uid,
        publication=one.publication,
        files=one.files,
        here=one.here | other.here,
        nbytes=one.nbytes + other.nbytes,
    )


def _remove(path: Path) -> None:
    """Remove a folder. A checkpoint is renamed first, so that it never counts while its files are deleted."""
    try:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        name = parse_commit(path.name)
        if name is not None and not name.staging:
            path = path.rename(path.with_name(f"{name}.tmp-{uuid4().hex}"))
            sync_folder(path.parent)
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another rank of this node removed it
    except OSError as error:
        _log.warning("%s cannot be removed from the local tier: %s", path, error.strerror)
