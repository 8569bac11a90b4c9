"""The readable checkpoints, newest first, and the copies of them to quarantine. No torch.

A corrupt copy is logged. It is moved to its store's quarantine once another checkpoint was read. Until then,
everything stays in place, except for the first checkpoint of a job. A corrupt copy also stays if it has the only data
of a checkpoint that was restored, which will be needed. In the folder of a job, a reader without a job moves nothing:
it may be a single process on a machine that reads incorrectly.

A step may be complete in memory, and stored as changes since an earlier step in the durable stores. The files have
the same names but different bytes. These are two editions: each is read by its own manifest, the one in memory first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.format.manifest import Manifest, decode, encode
from holdfast.checkpoint.policy import fencing
from holdfast.checkpoint.ranks.exchange import Exchange, each, gather
from holdfast.checkpoint.restore.fault_check import Fault, Outcome
from holdfast.checkpoint.stores.base import CheckpointStore, manifest_of
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import Claim
from holdfast.core.errors import CheckpointError, CorruptCheckpointError, UnknownFormatError
from holdfast.core.json_fields import JsonFields

_log = logging.getLogger("holdfast.checkpoint.reader")

Location = Path | Sequence[CheckpointStore]
"""One folder, or stores in order of preference."""


class DeletedError(Exception):
    """The checkpoint was deleted during the read: no store has it any more, and every rank knows it.

    It is not corrupt.
    """


def as_stores(location: Location) -> tuple[CheckpointStore, ...]:
    return (FolderStore(location),) if isinstance(location, Path) else tuple(location)


_BOTH: Final = frozenset({True, False})


@dataclass(frozen=True, kw_only=True)
class _View(JsonFields):
    """What one rank finds of a checkpoint's manifest."""

    seal: str = ""
    job_uid: str = ""
    publication: str = ""
    faults: tuple[Fault, ...] = ()
    foreign: str = ""
    error: str = ""


@dataclass(kw_only=True)
class Candidates:
    """The state of a search, which is the same on every rank. `held` has the checkpoints of each store."""

    stores: Sequence[CheckpointStore]
    exchange: Exchange
    claims: tuple[Claim, ...]
    job_uid: str
    resume: fencing.Resume
    step: int | None
    before: int | None = None
    without_job: bool = False
    bad: list[catalog.Quarantined] = field(default_factory=list)
    lost: list[catalog.Quarantined] = field(default_factory=list)
    to_quarantine: list[tuple[CheckpointStore, CheckpointName, str]] = field(default_factory=list)
    """The copies that this rank moves to quarantine, with the reasons."""
    held: list[frozenset[str]] = field(default_factory=list)
    manifest_faults: tuple[Fault, ...] = ()
    """The faults of the current checkpoint's manifests, if another store has a valid one."""
    edition: frozenset[bool] = _BOTH
    """Which stores have the files of the current manifest: shared ones (True), node-local ones (False), or both."""
    has_other_edition: bool = False
    """Whether another edition of the current checkpoint is tried next."""

    def commits(self) -> Iterator[tuple[CheckpointName, Manifest]]:
        """Yield the readable checkpoints with a valid manifest, newest first, in the same order on every rank."""
        for name in self._names():
            self.edition = _BOTH
            manifest = self._manifest(name)
            if manifest is None:
                continue
            if manifest.depends_on and not all(store.shared for store in self.stores):
                yield from self._in_memory_first(name)
            yield name, manifest

    def _in_memory_first(self, name: CheckpointName) -> Iterator[tuple[CheckpointName, Manifest]]:
        """Yield the edition in memory, if there is one. After it, only the durable stores count."""
        durable, self.edition = self.manifest_faults, frozenset({False})
        manifest, view = self._view(name)
        views = gather(self.exchange, view)
        leader = next((rank for rank, one in enumerate(views) if one.seal), None)
        self.manifest_faults = self._confirmed_faults(views)
        if leader is not None:
            self.has_other_edition = True
            yield name, self._agreed(manifest, views, leader)
            self.has_other_edition = False
        self.manifest_faults, self.edition = durable, frozenset({True})

    def holding(self, name: CheckpointName) -> list[CheckpointStore]:
        """Return this rank's stores that have the checkpoint. Those with a corrupt manifest come last."""
        held = zip(self.stores, self.held, strict=True)
        found = [store for store, names in held if str(name) in names and store.shared in self.edition]
        manifest_faults = {fault.url for fault in self.manifest_faults}
        return sorted(found, key=lambda store: store.url in manifest_faults)

    def _names(self) -> list[CheckpointName]:
        answers = each(self.exchange, self._list)
        shared = answers[0]["held"]
        self.held = [
            frozenset(shared[place] if store.shared else answers[self.exchange.rank]["held"][place])
            for place, store in enumerate(self.stores)
        ]
        found = (Claim.from_json(claim) for answer in answers for claim in answer["claims"])
        self.claims = fencing.union(self.claims, found)
        names = {parse_commit(name) for answer in answers for held in answer["held"] for name in held}
        requested = [name for name in names if name is not None and self._is_wanted(name.step)]
        return sorted(requested, reverse=True)

    def _is_wanted(self, step: int) -> bool:
        return self.step in (None, step) and (self.before is None or step < self.before)

    def _list(self) -> dict[str, Any]:
        """List what the stores hold. Rank 0 reads the shared stores, and each rank reads its own."""
        seen = [store if self.exchange.rank == 0 or not store.shared else None for store in self.stores]
        return {
            "held": [[] if store is None else [str(name) for name in store.commits()] for store in seen],
            "claims": [claim.to_json() for store in seen if store is not None for claim in store.claims()],
        }

    def _manifest(self, name: CheckpointName) -> Manifest | None:
        """Return the checkpoint's manifest, the same on every rank; None if it must not or cannot be used."""
        self.manifest_faults = ()
        manifest, view = self._view(name)
        views = gather(self.exchange, view)
        leader = next((rank for rank, one in enumerate(views) if one.seal), None)
        if not self._readable(name, None if leader is None else views[leader]):
            return None
        if leader is None:
            self._without_manifest(name, views)
            return None
        self.manifest_faults = self._confirmed_faults(views)
        return self._agreed(manifest, views, leader)

    def _agreed(self, manifest: Manifest | None, views: Sequence[_View], leader: int) -> Manifest:
        """Return the leader's manifest on every rank."""
        if manifest is not None and all(one.seal == views[leader].seal for one in views):
            return manifest
        text = encode(manifest).decode() if manifest is not None and leader == self.exchange.rank else None
        return decode(self.exchange.gather(text)[leader].encode())

    def _confirmed_faults(self, views: Sequence[_View]) -> tuple[Fault, ...]:
        """Return the faults of manifests. In a shared store, a fault counts only if all ranks find it."""
        shared = {store.url for store in self.stores if store.shared}
        bad = frozenset.intersection(*(frozenset(fault.url for fault in one.faults) for one in views))
        every = (fault for one in views for fault in one.faults)
        return tuple(fault for fault in every if fault.url in bad or fault.url not in shared)

    def _view(self, name: CheckpointName) -> tuple[Manifest | None, _View]:
        faults: list[Fault] = []
        foreign = error = ""
        # The durable manifest decides: a step may be saved in memory first, and then as changes in the durable store.
        for store in sorted(self.holding(name), key=lambda store: not store.shared):
            try:
                manifest = manifest_of(store, name)
            except CorruptCheckpointError as damage:
                faults.append(Fault(url=store.url, reason=str(damage)))
            except UnknownFormatError as unknown:
                foreign = foreign or f"{store.url}/{name}: {unknown}"
            except CheckpointError as unavailable:
                error = error or str(unavailable)
            else:
                return manifest, _View(
                    seal=xxhash.xxh3_128_hexdigest(encode(manifest)),
                    job_uid=manifest.job_uid,
                    publication=manifest.publication,
                    faults=tuple(faults),
                )
        return None, _View(faults=tuple(faults), foreign=foreign, error=error)

    def _readable(self, name: CheckpointName, view: _View | None) -> bool:
        named = fencing.Commit.named
        commit = named(name) if view is None else named(name, view.job_uid, view.publication)
        return fencing.readable(commit, self.claims, job_uid=self.job_uid, resume=self.resume).ok

    def _without_manifest(self, name: CheckpointName, views: Sequence[_View]) -> None:
        foreign = next((view.foreign for view in views if view.foreign), "")
        if foreign:
            raise UnknownFormatError(
                f"{foreign}. Nothing was changed. To resume from an older checkpoint, move this one out of the folder"
            )
        error = next((view.error for view in views if view.error), "")
        if error:
            raise CheckpointError(error)
        faults = [fault for view in views for fault in view.faults]
        self._record_lost(name, faults[0].reason if faults else "MANIFEST.json is missing")
        self.mark_corrupt(
            name, views[self.exchange.rank].faults, {fault.url: fault.reason for fault in reversed(faults)}
        )

    # Evaluation of the reads

    def judge(self, name: CheckpointName, outcomes: Sequence[Outcome]) -> dict[str, str]:
        """Return the stores that have a corrupt copy, with the reasons."""
        faults = [*self.manifest_faults, *(fault for one in outcomes for fault in one.faults)]
        faulty = {fault.url: fault.reason for fault in reversed(faults)}
        damage = [one.damage or one.error for one in outcomes if one.damage or one.error]
        if damage and self.has_other_edition:
            _log.warning("%s is not complete in memory (%s): the durable copy is read", name, damage[0])
        elif damage:
            self._record_lost(name, damage[0])
        elif self.exchange.rank == 0:
            used = ", ".join(dict.fromkeys(url for one in outcomes for url in one.used))
            _log.info("%s was read from %s", name, used)
            for url, reason in faulty.items():
                _log.error("%s in %s is corrupt (%s); another copy was used", name, url, reason)
        return dict(reversed(faulty.items()))

    def mark_corrupt(self, name: CheckpointName, own: Sequence[Fault], faulty: Mapping[str, str]) -> None:
        """Choose the copies to quarantine: rank 0 those in shared stores, and each rank those in its own stores."""
        own_urls = {fault.url for fault in (*own, *self.manifest_faults)}
        several = len(self.stores) > 1
        self.bad += [
            catalog.Quarantined(path=str(name), reason=f"{url}: {reason}" if several else reason)
            for url, reason in faulty.items()
        ]
        for store in self.holding(name):
            if store.url in faulty and (self.exchange.rank == 0 if store.shared else store.url in own_urls):
                self.to_quarantine.append((store, name, faulty[store.url]))

    def quarantine_corrupt(self) -> None:
        """Quarantine the chosen copies, since another checkpoint was read. Leave a job's copies to its own ranks."""
        of_job = self.without_job and self.claims
        for store, name, reason in self.to_quarantine:
            if of_job:
                _log.error(
                    "this rank read %s in %s as corrupt (%s): it belongs to a job and is not moved",
                    name,
                    store.url,
                    reason,
                )
            else:
                store.quarantine(name, reason)
        if of_job:
            self.bad.clear()

    def stuck(self) -> tuple[catalog.Quarantined, ...]:
        """Return the lost checkpoints in shared stores.

        What was only on nodes is lost with them, and cannot be repaired.
        """
        shared = zip(self.stores, self.held, strict=True)
        durable = {name for store, names in shared if store.shared for name in names}
        return tuple(one for one in self.lost if one.path in durable)

    def _record_lost(self, name: CheckpointName, reason: str) -> None:
        """Record a lost checkpoint on every rank. Raise `DeletedError` if no store that had it has it any more."""
        had = [store for store, names in zip(self.stores, self.held, strict=True) if str(name) in names]
        own = [store for store in had if self.exchange.rank == 0 or not store.shared]
        if all(self.exchange.gather(all(is_gone(store, name) for store in own))):
            raise DeletedError(name)
        self.lost.append(catalog.Quarantined(path=str(name), reason=reason))
        if self.exchange.rank == 0:
            _log.error("%s is lost: no store has a complete and valid copy (%s)", name, reason)


def is_gone(store: CheckpointStore, name: CheckpointName) -> bool:
    """Return whether a store reports that it no longer has the checkpoint.

    A store that cannot be read reports nothing.
    """
    try:
        if name not in store.commits():
            store.manifest(name)
    except CorruptCheckpointError:
        return True
    except (CheckpointError, OSError):
        return False
    return False
